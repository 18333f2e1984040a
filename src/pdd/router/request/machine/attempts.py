"""Runs of the pipeline: the first, and those that continue after the last sent token when something failed.

Every failure has the same answer: the token IDs sent so far are enough to continue anywhere, so the
pipeline begins again after them, with the engines that can be used at that moment. When none is left, an
answer that has begun pauses until one is back.
"""

from dataclasses import replace

from pdd.router.request.events import EnginesNow, Failure, Pause, PauseOver, Planned, StartPrefill
from pdd.router.request.machine.state import Phase, RequestState

MAX_ATTEMPTS = 6
"""Bound on runs of the pipeline without a new token: more would only hide that nothing works."""


def on_planned(state: RequestState, event: Planned) -> None:
    """The first attempt runs."""
    state.plan = event.plan
    _begin(state, relayed=event.plan.pipeline == "p-rld-md")


def on_engines_now(state: RequestState, event: EnginesNow) -> None:
    """From now on these engines are used; an answer that waited for one goes on."""
    relays = event.relays if state.plan.relays_allowed else ()
    state.plan = replace(state.plan, prefills=event.prefills, relays=relays, mains=event.mains)
    if state.phase is Phase.PAUSED:
        # What failed before may be another process by now; the bound on attempts without a token holds.
        state.failed.clear()
        state.unreachable.clear()
        recover(state, state.last_failure)


def on_pause_over(state: RequestState, _event: PauseOver) -> None:
    """No engine came back."""
    state.fail(state.last_failure)


def recover(state: RequestState, failure: Failure) -> None:
    """Continue after the last sent token with the engines that are left."""
    state.stop_legs()
    state.settle_all()
    state.chosen = None
    state.last_failure = failure
    plan = state.plan
    if plan.whole_on_main and state.tokens:
        message = f"{failure.message}; this answer cannot be continued exactly by another engine"
        state.fail(Failure(kind="not_resumable", message=message, status=502))
    elif state.fruitless_attempts >= MAX_ATTEMPTS:
        state.fail(failure)
    elif state.first(plan.prefills) is None and not state.has_prefilled:
        # Decode engines are not asked to prefill instead: that would only spread the overload.
        _pause(state, may_wait=failure.kind == "engine_lost" and bool(plan.prefills))
    elif state.first(plan.relays) is None and state.first(plan.mains) is None:
        _pause(state)
    elif state.first(plan.prefills) is None:
        _decode_directly(state)
    else:
        _begin(state, relayed=True)


def _begin(state: RequestState, *, relayed: bool) -> None:
    """Run the pipeline from the first token that is not yet sent."""
    plan = state.plan
    _count_attempt(state)
    state.base_position = len(state.tokens)
    state.prefill = state.first(plan.prefills)
    state.main = state.first(plan.mains, reachable=True)
    wants_relay = relayed or state.main is None
    state.relay = state.first(plan.relays, reachable=True) if wants_relay else None
    if state.prefill is None:
        message = "no prefill engine is reachable"
        state.fail(Failure(kind="no_prefill_engine", message=message, status=503))
        return
    follows = state.room > 1
    targets = tuple(peer for peer in (state.relay, state.main) if peer is not None) if follows else ()
    if follows and not targets:
        _decode_directly(state)
        return
    _start_prefill(state, state.prefill, targets)


def _start_prefill(state: RequestState, engine: str, targets: tuple[str, ...]) -> None:
    for peer in targets:
        state.transfers[state.attempt, peer] = "open"
    state.is_held = bool(state.plan.hold_tokens and state.relay and state.main)
    state.speaker = state.open_leg(engine)
    state.phase = Phase.PREFILLING
    state.effects.append(
        StartPrefill(
            leg=state.speaker,
            attempt=state.attempt,
            engine=engine,
            position=len(state.tokens),
            targets=targets,
            held=(state.main,) if state.is_held and state.main else (),
        )
    )


def _decode_directly(state: RequestState) -> None:
    """Continue without any transfer, on an engine that recomputes what it lacks.

    A relay comes first: it is near P and most likely holds the prompt already.
    """
    _count_attempt(state)
    relay, main = state.first(state.plan.relays), state.first(state.plan.mains)
    state.relay, state.main = None, None
    engine = relay or main
    if engine is None:
        _pause(state)
        return
    state.phase = Phase.JOINING
    state.start_decode(engine, "relay" if relay else "main", landed=False)


def _count_attempt(state: RequestState) -> None:
    state.attempt += 1
    state.fruitless_attempts += 1


def _pause(state: RequestState, *, may_wait: bool = False) -> None:
    """An answer that has begun waits for an engine to come back; one that has not ends with an error.

    Args:
        state: The request.
        may_wait: Wait in any case: an engine that was lost to this request seems to be back.
    """
    if not state.tokens and not may_wait:
        state.fail(state.last_failure)
        return
    state.phase = Phase.PAUSED
    state.effects.append(Pause())
