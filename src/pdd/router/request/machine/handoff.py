"""Who speaks after P: RLD while the KV crosses the WAN, then MD, exactly where the other one stopped."""

from pdd.router.request.events import HandoffChosen, ResumeTransfer, RoundDone, StartRound, Tokens
from pdd.router.request.machine.state import Phase, RequestState


def start_relay(state: RequestState) -> None:
    """RLD speaks."""
    assert state.relay is not None
    state.phase = Phase.RELAYING
    state.start_decode(state.relay, "relay", landed=True)


def on_relay_tokens(state: RequestState, event: Tokens) -> None:
    """RLD's tokens are given to the client; MD's KV is sent for if the answer outgrows its bound."""
    if event.leg != state.speaker:
        return
    if event.finish is not None:
        state.close_leg(event.leg)
    assert state.relay is not None
    state.settle(state.attempt, state.relay)
    before = len(state.tokens)
    state.accept(event.tokens, "relay", event.finish, event.stop_reason)
    state.eager_tokens += len(state.tokens) - before
    if state.phase is Phase.DONE:
        return
    if state.eager_tokens >= state.plan.hold_tokens:
        resume_main(state)
    if state.phase is Phase.BETWEEN_ROUNDS:
        _catch_up(state)


def resume_main(state: RequestState) -> None:
    """MD is needed after all: what was held for it is sent."""
    if state.is_held and state.main is not None:
        state.is_held = False
        state.was_resumed = True
        state.effects.append(ResumeTransfer(attempt=state.attempt, peer=state.main))


def on_handoff_chosen(state: RequestState, event: HandoffChosen) -> None:
    """The handoff begins, unless MD's KV is gone by now."""
    if state.main is None or state.transfer(state.main) != "landed":
        return
    state.chosen = event
    state.handoff_mode = event.mode
    if event.mode == "one-shot":
        hand_over(state)
    else:
        _start_round(state, state.main)


def on_round_done(state: RequestState, event: RoundDone) -> None:
    """RLD's next token decides what follows.

    A handoff right now would throw away what RLD has done of that token, and the client would wait so much
    longer. Catch-up is chosen where RLD is idle, so the token is near.
    """
    if event.leg == state.round:
        state.close_leg(event.leg)
        state.phase = Phase.BETWEEN_ROUNDS


def _catch_up(state: RequestState) -> None:
    """Another round catches up further, RLD speaks on to the end of a block, or hands over what is left."""
    assert state.chosen is not None
    assert state.main is not None
    prompt_tokens = state.plan.prompt_tokens
    move = state.chosen.catch_up.move(
        made_tokens=prompt_tokens + len(state.tokens),
        computed_tokens=prompt_tokens + state.round_position,
        rounds=state.handoff_rounds,
    )
    match move:
        case "round":
            _start_round(state, state.main)
        case "hand_over":
            hand_over(state)
        case "wait":
            pass


def _start_round(state: RequestState, main: str) -> None:
    state.handoff_rounds += 1
    state.round_position = len(state.tokens)
    state.round = state.open_leg(main)
    state.phase = Phase.CATCHING_UP
    state.effects.append(StartRound(leg=state.round, engine=main, position=state.round_position))


def hand_over(state: RequestState) -> None:
    """RLD falls silent at this position and MD goes on from it."""
    state.stop_legs()
    join(state)


def join(state: RequestState) -> None:
    """MD speaks from here on, and nothing is held at RLD."""
    assert state.main is not None
    if state.relay is not None:
        state.settle(state.attempt, state.relay)
    state.phase = Phase.JOINING
    state.start_decode(state.main, "main", landed=state.transfer(state.main) == "landed")


def on_main_tokens(state: RequestState, event: Tokens) -> None:
    """MD's tokens are given to the client."""
    if event.leg != state.speaker:
        return
    if event.finish is not None:
        state.close_leg(event.leg)
    if state.phase is not Phase.DECODING:  # this runs for every token
        if state.main is not None:
            state.settle(state.attempt, state.main)
        state.phase = Phase.DECODING
    state.accept(event.tokens, "main", event.finish, event.stop_reason)
