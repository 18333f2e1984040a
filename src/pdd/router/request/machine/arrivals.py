"""The prompt is computed and its KV arrives: who goes on from there."""

from pdd.router.request.events import ChooseHandoff, Failure, Landed, Prefilled, ReleaseTransfer
from pdd.router.request.machine.attempts import recover
from pdd.router.request.machine.handoff import join, resume_main, start_relay
from pdd.router.request.machine.state import Phase, RequestState

WAITING = (Phase.WAITING_RELAY, Phase.WAITING_MAIN)


def on_prefilled(state: RequestState, event: Prefilled) -> None:
    """P's token is given to the client, unless every token has to come from MD, and the answer goes on."""
    if event.leg != state.speaker:
        return
    state.close_leg(event.leg)
    state.has_prefilled = True
    if state.room <= 1 or not state.plan.whole_on_main:
        # P was told to stop after one token; that is no reason for the answer to end.
        finish = None if event.finish == "length" else event.finish
        state.accept((event.token,), "prefill", finish, event.stop_reason)
    if state.phase is not Phase.DONE:
        go_where_the_kv_is(state)


def on_landed(state: RequestState, event: Landed) -> None:
    """It is noted; a lease on what is not wanted any more ends at once."""
    key = (event.attempt, event.peer)
    transfer = state.transfers.get(key)
    if transfer == "open" and state.phase is not Phase.DONE:
        state.transfers[key] = "landed"
        if event.attempt == state.attempt:
            _use(state, event.peer)
    elif transfer in ("cancelled", "failed", "released"):  # the last: an order that was given twice
        state.transfers[key] = "released"
        state.effects.append(ReleaseTransfer(attempt=event.attempt, peer=event.peer))


def go_where_the_kv_is(state: RequestState) -> None:
    """An engine that holds the prompt's KV speaks, or the one whose KV is on its way is waited for."""
    relay, main = state.transfer(state.relay), state.transfer(state.main)
    if main == "landed":
        join(state)
    elif relay == "landed":
        start_relay(state)
    elif relay == "open":
        state.phase = Phase.WAITING_RELAY
    elif main == "open":
        state.phase = Phase.WAITING_MAIN
        resume_main(state)
    else:
        message = "the prompt's KV reached no decode engine"
        recover(state, Failure(kind="transfer_failed", message=message))


def _use(state: RequestState, peer: str) -> None:
    """KV of the current attempt is at the peer."""
    if state.phase in WAITING:
        go_where_the_kv_is(state)
    elif state.phase is Phase.RELAYING and peer == state.main and state.relay is not None:
        gap = len(state.tokens) - state.base_position
        state.effects.append(ChooseHandoff(relay=state.relay, gap_tokens=gap))
