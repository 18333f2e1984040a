"""The state machine of one request: ``step(event) -> effects``, pure. The table below is all it reacts to.

It owns which engine may speak to the client, at which token position, and what happens when one fails.
It knows no clock, socket or engine API; the driver does what the effects say and feeds back what happens.
"""

from collections.abc import Callable, Iterable, Mapping

from pdd.router.request.events import (
    ClientGone,
    DeadlinePassed,
    Effect,
    EnginesNow,
    Event,
    Failure,
    HandoffChosen,
    Landed,
    LegFailed,
    PauseOver,
    Planned,
    Prefilled,
    RoundDone,
    StopMatched,
    Tokens,
    TransferFailed,
    TransferStalled,
)
from pdd.router.request.machine import arrivals, attempts, handoff, losses
from pdd.router.request.machine.state import RELAY_SPEAKS, Phase, RequestState

# ---- the events that end a request from every phase alike


def on_stop_matched(state: RequestState, _event: StopMatched) -> None:
    """A stop string ended the answer."""
    state.complete("stop")


def on_client_gone(state: RequestState, _event: ClientGone) -> None:
    """Nobody reads any more."""
    state.end("cancelled")


def on_deadline(state: RequestState, _event: DeadlinePassed) -> None:
    """The time is over."""
    message = f"the request did not finish in time (it was {state.phase})"
    state.fail(Failure(kind="deadline", message=message, status=504, retryable=False))


# ---- the table: every (phase, event) that means something; all others are late and change nothing

Handler = Callable[..., None]
"""Takes the state and the event."""

STARTED = tuple(phase for phase in Phase if phase not in (Phase.RENDERING, Phase.DONE))

ROWS: tuple[tuple[tuple[Phase, ...], type, Handler], ...] = (
    ((Phase.RENDERING,), Planned, attempts.on_planned),
    ((Phase.PREFILLING,), Prefilled, arrivals.on_prefilled),
    ((*STARTED, Phase.DONE), Landed, arrivals.on_landed),
    ((*STARTED, Phase.DONE), TransferFailed, losses.on_transfer_failed),
    ((Phase.WAITING_MAIN,), TransferStalled, losses.on_transfer_stalled),
    (RELAY_SPEAKS, Tokens, handoff.on_relay_tokens),
    ((Phase.RELAYING,), HandoffChosen, handoff.on_handoff_chosen),
    ((Phase.CATCHING_UP,), RoundDone, handoff.on_round_done),
    ((Phase.JOINING, Phase.DECODING), Tokens, handoff.on_main_tokens),
    (STARTED, LegFailed, losses.on_leg_failed),
    (STARTED, EnginesNow, attempts.on_engines_now),
    ((Phase.PAUSED,), PauseOver, attempts.on_pause_over),
    (STARTED, StopMatched, on_stop_matched),
    ((Phase.RENDERING, *STARTED), ClientGone, on_client_gone),
    ((Phase.RENDERING, *STARTED), DeadlinePassed, on_deadline),
)

TABLE: Mapping[tuple[Phase, type], Handler] = {
    (phase, event): handler for phases, event, handler in ROWS for phase in phases
}


class RequestMachine(RequestState):
    """The state of one request, moved by the table."""

    def step(self, event: Event) -> list[Effect]:
        """What to do now that ``event`` happened; late events change nothing."""
        handler = TABLE.get((self.phase, type(event)))
        if handler is None:
            return []
        self.effects = []
        handler(self, event)
        return self.effects

    def room_for_more(self, leg: int) -> int:
        """How many tokens of the leg would change nothing but the length of the answer.

        Nearly every token of every answer is such a one. For it, ``step`` would return nothing but an
        ``Emit`` of all tokens by the leg's engine.
        """
        if leg != self.speaker:
            return 0
        if self.phase is Phase.DECODING:
            return self.room - 1
        if self.phase is Phase.RELAYING and self.transfer(self.relay) == "released":
            unheld = self.plan.hold_tokens - self.eager_tokens if self.is_held else self.room
            return max(0, min(self.room, unheld) - 1)
        return 0

    def take(self, ids: Iterable[int]) -> None:
        """Tokens that ``room_for_more`` had room for were given to the client."""
        before = len(self.tokens)
        self.tokens.extend(ids)
        if self.phase is Phase.RELAYING:
            self.eager_tokens += len(self.tokens) - before
