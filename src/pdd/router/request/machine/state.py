"""The state of one request, and the few moves everything that happens to it is made of.

It owns which legs and transfers are open, which engine may speak, and the tokens that were given out. It
does not know what follows from an event: that is the table's.
"""

from array import array
from enum import StrEnum
from typing import Literal

from pdd.core.errors import InvariantError
from pdd.router.request.events import (
    CancelTransfer,
    Complete,
    Effect,
    Emit,
    Fail,
    Failure,
    HandoffChosen,
    Plan,
    ReleaseTransfer,
    StartDecode,
    StopLeg,
    Token,
)

TransferState = Literal["open", "landed", "failed", "cancelled", "released"]
Outcome = Literal["complete", "error", "cancelled"]


class Phase(StrEnum):
    """Where a request is."""

    RENDERING = "rendering"
    PREFILLING = "prefilling"
    WAITING_RELAY = "waiting for relay"
    WAITING_MAIN = "waiting for main"
    RELAYING = "relaying"
    CATCHING_UP = "catching up"
    BETWEEN_ROUNDS = "between rounds"
    JOINING = "joining"
    DECODING = "decoding"
    PAUSED = "paused"
    DONE = "done"

    __hash__ = str.__hash__  # the enum's own is Python code, and the table is asked for every token


RELAY_SPEAKS = (Phase.RELAYING, Phase.CATCHING_UP, Phase.BETWEEN_ROUNDS)


_NO_PLAN = Plan(pipeline="p-md", prefills=(), relays=(), mains=(), max_tokens=0, prompt_tokens=0)
_NONE_LEFT = Failure(kind="no_engine_left", message="no engine is left", status=503)


class RequestState:
    """One request. ``effects`` is what is to be done after the present event.

    ``prefill``, ``relay`` and ``main`` are the engines of the current attempt, ``speaker`` the leg that may
    give tokens to the client, ``round`` that of the catch-up round.
    """

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.phase = Phase.RENDERING
        self.outcome: Outcome | None = None
        self.plan = _NO_PLAN
        self.tokens = array("i")  # an answer may be long, and a list takes nine times as much
        # The current attempt.
        self.attempt = 0
        self.prefill: str | None = None
        self.relay: str | None = None
        self.main: str | None = None
        self.base_position = 0
        self.is_held = False
        self.legs: dict[int, str] = {}
        self.next_leg = 1
        self.speaker: int | None = None
        self.transfers: dict[tuple[int, str], TransferState] = {}
        # The handoff.
        self.chosen: HandoffChosen | None = None
        self.round: int | None = None
        self.round_position = 0
        self.handoff_mode: Literal["one-shot", "catch-up"] | None = None
        self.handoff_rounds = 0
        self.eager_tokens = 0
        self.was_resumed = False
        # What went wrong.
        self.failures: list[Failure] = []
        self.last_failure = _NONE_LEFT
        self.failed: set[str] = set()
        self.unreachable: set[str] = set()
        self.has_prefilled = False
        self.fruitless_attempts = 0

    def check_invariants(self) -> None:
        """Raise ``InvariantError`` if the state is one that must not exist."""
        live = self.phase is not Phase.DONE
        held = {"open", "landed"} & set(self.transfers.values())
        awaited = bool(self.legs) or "open" in self.transfers.values()
        rules = {
            "an outcome exists exactly when done": (self.outcome is None) == live,
            "no leg outlives the request": live or not self.legs,
            "no transfer outlives the request": live or not held,
            "something is awaited": not live or self.phase in (Phase.RENDERING, Phase.PAUSED) or awaited,
            "nothing runs while paused": self.phase is not Phase.PAUSED or not (self.legs or held),
            "a speaker is an open leg": self.speaker is None or self.speaker in self.legs,
            "a round is an open leg": self.round is None or self.round in self.legs,
            "rounds run only while catching up": (self.round is not None)
            == (self.phase is Phase.CATCHING_UP),
            "never more tokens than asked for": len(self.tokens) <= self.plan.max_tokens,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise InvariantError(f"{'; '.join(broken)} (phase {self.phase}, {len(self.tokens)} tokens)")

    @property
    def speaking(self) -> Literal["relay", "main"]:
        """Who speaks after P."""
        return "relay" if self.phase in RELAY_SPEAKS else "main"

    @property
    def room(self) -> int:
        """How many more tokens the answer may have."""
        return self.plan.max_tokens - len(self.tokens)

    def first(self, engines: tuple[str, ...], *, reachable: bool = False) -> str | None:
        """The best of the engines that has not failed; if ``reachable``, one that KV still reaches."""
        for engine in engines:
            if engine not in self.failed and not (reachable and engine in self.unreachable):
                return engine
        return None

    # ---- legs

    def open_leg(self, engine: str) -> int:
        """The number of a new leg."""
        leg = self.next_leg
        self.next_leg += 1
        self.legs[leg] = engine
        return leg

    def close_leg(self, leg: int) -> None:
        """The leg has ended."""
        self.legs.pop(leg, None)
        if leg == self.speaker:
            self.speaker = None
        if leg == self.round:
            self.round = None

    def stop_legs(self) -> None:
        """No leg runs any more."""
        for leg in list(self.legs):
            self.effects.append(StopLeg(leg=leg))
            self.close_leg(leg)

    def start_decode(self, engine: str, role: Literal["relay", "main"], *, landed: bool) -> None:
        """The engine speaks from here on."""
        self.speaker = self.open_leg(engine)
        self.effects.append(
            StartDecode(leg=self.speaker, engine=engine, position=len(self.tokens), role=role, landed=landed)
        )

    # ---- transfers

    def transfer(self, peer: str | None) -> TransferState | None:
        """How the current attempt's transfer to the peer stands; None if there is none."""
        return None if peer is None else self.transfers.get((self.attempt, peer))

    def settle(self, attempt: int, peer: str) -> None:
        """Nothing of the attempt's transfer to the peer is held any more."""
        key = (attempt, peer)
        state = self.transfers.get(key)
        if state == "open":
            self.transfers[key] = "cancelled"
            self.effects.append(CancelTransfer(attempt=attempt, peer=peer))
        elif state == "landed":
            self.transfers[key] = "released"
            self.effects.append(ReleaseTransfer(attempt=attempt, peer=peer))

    def settle_all(self) -> None:
        """Nothing of any transfer is held any more."""
        for attempt, peer in list(self.transfers):
            self.settle(attempt, peer)

    # ---- tokens and ends

    def accept(
        self,
        tokens: tuple[Token, ...],
        role: Literal["prefill", "relay", "main"],
        finish: str | None,
        stop_reason: int | str | None,
    ) -> None:
        """Give tokens to the client, never more than asked for; with a finish, that was the end."""
        taken = tokens[: self.room]
        if len(taken) >= self.room and (finish is None or len(tokens) > self.room):
            finish = "length"
        if taken or finish:
            self.effects.append(
                Emit(
                    position=len(self.tokens),
                    tokens=taken,
                    role=role,
                    finish=finish,
                    stop_reason=stop_reason if finish == "stop" else None,
                )
            )
        self.tokens.extend([token.id for token in taken])
        if taken:
            self.fruitless_attempts = 0
        if finish is not None:
            self.complete(finish)

    def complete(self, finish: str) -> None:
        """The answer is whole."""
        self.end("complete")
        self.effects.append(Complete(finish=finish))

    def fail(self, failure: Failure) -> None:
        """The request has ended with an error."""
        self.end("error")
        self.effects.append(Fail(failure=failure))

    def end(self, outcome: Outcome) -> None:
        """Nothing runs and nothing is held any more."""
        self.stop_legs()
        self.settle_all()
        self.phase = Phase.DONE
        self.outcome = outcome
