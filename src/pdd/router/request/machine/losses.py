"""An engine or a transfer is lost, or stands still: who goes on in its place."""

from pdd.router.request.events import Failure, LegFailed, TransferFailed, TransferStalled
from pdd.router.request.machine.arrivals import WAITING, go_where_the_kv_is
from pdd.router.request.machine.attempts import recover
from pdd.router.request.machine.handoff import hand_over, resume_main
from pdd.router.request.machine.state import RELAY_SPEAKS, Phase, RequestState


def on_leg_failed(state: RequestState, event: LegFailed) -> None:
    """The answer goes on with what is left, or ends with what the client got wrong."""
    if event.leg not in state.legs:
        return
    engine = state.legs[event.leg]
    is_round = event.leg == state.round
    state.close_leg(event.leg)
    state.failures.append(event.failure)
    if not event.failure.retryable:
        state.fail(event.failure)
        return
    state.failed.add(engine)
    if is_round:
        # MD is lost before it said a word: RLD simply goes on to the end.
        state.settle(state.attempt, engine)
        state.phase = Phase.RELAYING
    elif _waits_for_main(state):
        state.phase = Phase.WAITING_MAIN
        resume_main(state)
    elif _main_can_join(state):
        hand_over(state)
    else:
        recover(state, event.failure)


def on_transfer_failed(state: RequestState, event: TransferFailed) -> None:
    """The peer is reached by no KV of this request any more; nobody waits for it."""
    key = (event.attempt, event.peer)
    if state.transfers.get(key) != "open":
        return
    if not event.is_certain:
        state.settle(*key)
    state.transfers[key] = "failed"
    state.unreachable.add(event.peer)
    if event.attempt == state.attempt and state.phase in WAITING:
        go_where_the_kv_is(state)


def on_transfer_stalled(state: RequestState, event: TransferStalled) -> None:
    """Nobody speaks and the WAN stands still: a relay covers the time, if there is one."""
    if (event.attempt, event.peer) != (state.attempt, state.main) or state.transfer(state.main) != "open":
        return
    if state.first(state.plan.relays, reachable=True) is not None:
        message = f"the KV for {event.peer} does not move"
        recover(state, Failure(kind="transfer_stalled", message=message))


def _waits_for_main(state: RequestState) -> bool:
    """Whether RLD was lost, no other is left, and MD's KV is on its way."""
    return (
        state.phase is Phase.RELAYING
        and state.transfer(state.main) == "open"
        and state.first(state.plan.relays, reachable=True) is None
    )


def _main_can_join(state: RequestState) -> bool:
    """Whether RLD was lost, and MD holds the KV and lives."""
    return (
        state.phase in RELAY_SPEAKS
        and state.transfer(state.main) == "landed"
        and state.main not in state.failed
    )
