"""The state machine of one request: ``step(event) -> effects``, pure.

It owns which engine may speak to the client, at which token position, and what happens when one fails.
It knows no clock, socket or engine API; the driver does what the effects say and feeds back what happens.

Every failure has the same answer: the token IDs sent so far are enough to continue anywhere, so the
pipeline begins again after them, with the engines that can be used at that moment. When none is left, an
answer that has begun pauses until one is back.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import ClassVar, Literal

from pdd.core.errors import InvariantError
from pdd.policy.handoff import catch_up_ends
from pdd.router.request.events import (
    CancelTransfer,
    ChooseHandoff,
    ClientGone,
    Complete,
    DeadlinePassed,
    Effect,
    Emit,
    EnginesNow,
    Event,
    Fail,
    Failure,
    HandoffChosen,
    Landed,
    LegFailed,
    Pause,
    PauseOver,
    Plan,
    Planned,
    Prefilled,
    ReleaseTransfer,
    ResumeTransfer,
    RoundDone,
    StartDecode,
    StartPrefill,
    StartRound,
    StopLeg,
    StopMatched,
    Token,
    Tokens,
    TransferFailed,
    TransferStalled,
)

MAX_ATTEMPTS = 6
"""Bound on runs of the pipeline without a new token: more would only hide that nothing works."""

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
    JOINING = "joining"
    DECODING = "decoding"
    PAUSED = "paused"
    DONE = "done"

    __hash__ = str.__hash__  # the enum's own is Python code, and the table is asked for every token


STARTED = tuple(phase for phase in Phase if phase not in (Phase.RENDERING, Phase.DONE))


class RequestMachine:
    """One request's state; see the module."""

    def __init__(self) -> None:
        self.phase = Phase.RENDERING
        self.tokens = array("i")  # an answer may be long, and a list takes nine times as much
        self.attempt = 0
        self.outcome: Outcome | None = None
        self.handoff_mode: Literal["one-shot", "catch-up"] | None = None
        self.handoff_rounds = 0
        self.eager_tokens = 0
        self.failures: list[Failure] = []
        self.legs: dict[int, str] = {}
        self.transfers: dict[tuple[int, str], TransferState] = {}
        self._plan: Plan | None = None
        self._effects: list[Effect] = []
        self._next_leg = 1
        self._speaker: int | None = None
        self._round: int | None = None
        self._prefill: str | None = None
        self._relay: str | None = None
        self._main: str | None = None
        self._base_position = 0
        self._round_position = 0
        self._chosen: HandoffChosen | None = None
        self._failed: set[str] = set()
        self._unreachable: set[str] = set()
        self._prefilled_once = False
        self._is_held = False
        self.was_resumed = False
        self._fruitless_attempts = 0
        self._last_failure = Failure(kind="no_engine_left", message="no engine is left", status=503)

    # ---- the interface

    def step(self, event: Event) -> list[Effect]:
        """What to do now that ``event`` happened; late events change nothing."""
        handler = TABLE.get((self.phase, type(event)))
        if handler is None:
            return []
        self._effects = []
        handler(self, event)
        return self._effects

    def pass_on(self, leg: int, ids: list[int]) -> bool:
        """Take tokens that change nothing but the length of the answer; false if ``step`` has to judge them.

        Nearly every token of every answer is such a one. For it, ``step`` would return nothing but an
        ``Emit`` of all tokens by the main engine.
        """
        if (
            self.phase is not Phase.DECODING
            or leg != self._speaker
            or self._plan is None
            or len(self.tokens) + len(ids) >= self._plan.max_tokens
        ):
            return False
        self.tokens.extend(ids)
        return True

    @property
    def plan(self) -> Plan:
        """The plan; only once there is one."""
        if self._plan is None:
            raise InvariantError("no plan yet")
        return self._plan

    @property
    def main(self) -> str | None:
        """The main decode engine of the current attempt."""
        return self._main

    @property
    def relay(self) -> str | None:
        """The relay of the current attempt."""
        return self._relay

    def check_invariants(self) -> None:
        """Raise ``InvariantError`` if the state is one that must not exist."""
        live = self.phase is not Phase.DONE
        held = {"open", "landed"} & set(self.transfers.values())
        rules = {
            "an outcome exists exactly when done": (self.outcome is None) == live,
            "no leg outlives the request": live or not self.legs,
            "no transfer outlives the request": live or not held,
            "something is awaited": not live
            or self.phase in (Phase.RENDERING, Phase.PAUSED)
            or self._awaits_something(),
            "nothing runs while paused": self.phase is not Phase.PAUSED or not (self.legs or held),
            "a speaker is an open leg": self._speaker is None or self._speaker in self.legs,
            "a round is an open leg": self._round is None or self._round in self.legs,
            "rounds run only while catching up": (self._round is not None)
            == (self.phase is Phase.CATCHING_UP),
            "never more tokens than asked for": self._plan is None
            or len(self.tokens) <= self._plan.max_tokens,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise InvariantError(f"{'; '.join(broken)} (phase {self.phase}, {len(self.tokens)} tokens)")

    def _awaits_something(self) -> bool:
        return bool(self.legs) or "open" in self.transfers.values()

    # ---- beginning

    def _planned(self, event: Planned) -> None:
        self._plan = event.plan
        self._begin_attempt(relayed=event.plan.pipeline == "p-rld-md")

    def _begin_attempt(self, *, relayed: bool) -> None:
        """Run the pipeline from the first token that is not yet sent."""
        self.attempt += 1
        self._fruitless_attempts += 1
        position = len(self.tokens)
        self._base_position = position
        self._prefill = self._first(self.plan.prefills)
        self._main = self._first(self.plan.mains, reachable=True)
        wants_relay = relayed or self._main is None
        self._relay = self._first(self.plan.relays, reachable=True) if wants_relay else None
        if self._prefill is None:
            self._fail(
                Failure(kind="no_prefill_engine", message="no prefill engine is reachable", status=503)
            )
            return
        follows = self.plan.max_tokens - position > 1
        targets = tuple(peer for peer in (self._relay, self._main) if peer is not None) if follows else ()
        if follows and not targets:
            self._decode_directly()
            return
        for peer in targets:
            self.transfers[self.attempt, peer] = "open"
        self._is_held = bool(self.plan.hold_tokens and self._relay and self._main)
        leg = self._open_leg(self._prefill)
        self._speaker = leg
        self.phase = Phase.PREFILLING
        self._effects.append(
            StartPrefill(
                leg=leg,
                attempt=self.attempt,
                engine=self._prefill,
                position=position,
                targets=targets,
                held=(self._main,) if self._is_held and self._main else (),
            )
        )

    def _first(self, engines: tuple[str, ...], *, reachable: bool = False) -> str | None:
        for engine in engines:
            if engine not in self._failed and not (reachable and engine in self._unreachable):
                return engine
        return None

    # ---- prefill

    def _prefilled(self, event: Prefilled) -> None:
        if event.leg != self._speaker:
            return
        self._close_leg(event.leg)
        self._prefilled_once = True
        if self.plan.max_tokens - len(self.tokens) > 1 and self.plan.whole_on_main:
            self._continue_after_prefill()
            return
        # P was told to stop after one token; that is no reason for the answer to end.
        finish = None if event.finish == "length" else event.finish
        if not self._accept((event.token,), "prefill", finish, event.stop_reason):
            self._continue_after_prefill()

    def _continue_after_prefill(self) -> None:
        """Go where the KV is, or wait for it."""
        relay, main = self._transfer(self._relay), self._transfer(self._main)
        if main == "landed":
            self._join()
        elif relay == "landed":
            self._start_relay()
        elif relay == "open":
            self.phase = Phase.WAITING_RELAY
        elif main == "open":
            self.phase = Phase.WAITING_MAIN
            self._resume_main()
        else:
            self._recover(Failure(kind="transfer_failed", message="the prompt's KV reached no decode engine"))

    def _transfer(self, peer: str | None) -> TransferState | None:
        return None if peer is None else self.transfers.get((self.attempt, peer))

    # ---- transfers

    def _landed(self, event: Landed) -> None:
        """Note it; a lease on what is not wanted any more ends at once."""
        key = (event.attempt, event.peer)
        state = self.transfers.get(key)
        if state == "open" and self.phase is not Phase.DONE:
            self.transfers[key] = "landed"
            if event.attempt == self.attempt:
                self._react_to_landed(event.peer)
        elif state in ("cancelled", "failed", "released"):  # the last: an order that was given twice
            self.transfers[key] = "released"
            self._effects.append(ReleaseTransfer(attempt=event.attempt, peer=event.peer))

    def _react_to_landed(self, peer: str) -> None:
        if self.phase in (Phase.WAITING_RELAY, Phase.WAITING_MAIN):
            self._continue_after_prefill()
        elif self.phase is Phase.RELAYING and peer == self._main and self._relay is not None:
            gap = len(self.tokens) - self._base_position
            self._effects.append(ChooseHandoff(relay=self._relay, gap_tokens=gap))

    def _transfer_failed(self, event: TransferFailed) -> None:
        key = (event.attempt, event.peer)
        if self.transfers.get(key) != "open":
            return
        if not event.is_certain:
            self._settle(*key)
        self.transfers[key] = "failed"
        self._unreachable.add(event.peer)
        if event.attempt == self.attempt and self.phase in (Phase.WAITING_RELAY, Phase.WAITING_MAIN):
            self._continue_after_prefill()

    def _transfer_stalled(self, event: TransferStalled) -> None:
        """Nobody speaks and the WAN stands still: a relay covers the time, if there is one."""
        if (event.attempt, event.peer) != (self.attempt, self._main) or self._transfer(self._main) != "open":
            return
        message = f"the KV for {event.peer} does not move"
        if self._first(self.plan.relays, reachable=True) is not None:
            self._recover(Failure(kind="transfer_stalled", message=message))

    def _settle(self, attempt: int, peer: str) -> None:
        """End what the attempt's transfer to the peer still holds."""
        key = (attempt, peer)
        state = self.transfers.get(key)
        if state == "open":
            self.transfers[key] = "cancelled"
            self._effects.append(CancelTransfer(attempt=attempt, peer=peer))
        elif state == "landed":
            self.transfers[key] = "released"
            self._effects.append(ReleaseTransfer(attempt=attempt, peer=peer))

    def _settle_all(self) -> None:
        for attempt, peer in list(self.transfers):
            self._settle(attempt, peer)

    # ---- relay and handoff

    def _start_relay(self) -> None:
        assert self._relay is not None
        self.phase = Phase.RELAYING
        self._start_decode(self._relay, "relay", landed=True)

    def _relay_tokens(self, event: Tokens) -> None:
        if event.leg != self._speaker:
            return
        if event.finish is not None:
            self._close_leg(event.leg)
        assert self._relay is not None
        self._settle(self.attempt, self._relay)
        before = len(self.tokens)
        self._accept(event.tokens, "relay", event.finish, event.stop_reason)
        self.eager_tokens += len(self.tokens) - before
        if self.phase is not Phase.DONE and self.eager_tokens >= self.plan.hold_tokens:
            self._resume_main()

    def _resume_main(self) -> None:
        """MD is needed after all."""
        if self._is_held and self._main is not None:
            self._is_held = False
            self.was_resumed = True
            self._effects.append(ResumeTransfer(attempt=self.attempt, peer=self._main))

    def _handoff_chosen(self, event: HandoffChosen) -> None:
        if self._main is None or self._transfer(self._main) != "landed":
            return
        self._chosen = event
        self.handoff_mode = event.mode
        if event.mode == "one-shot":
            self._hand_over()
        else:
            self._start_round()

    def _start_round(self) -> None:
        assert self._main is not None
        self.handoff_rounds += 1
        self._round_position = len(self.tokens)
        self._round = self._open_leg(self._main)
        self.phase = Phase.CATCHING_UP
        self._effects.append(StartRound(leg=self._round, engine=self._main, position=self._round_position))

    def _round_done(self, event: RoundDone) -> None:
        if event.leg != self._round or self._chosen is None:
            return
        self._close_leg(event.leg)
        if catch_up_ends(
            gap_tokens=len(self.tokens) - self._round_position,
            rounds=self.handoff_rounds,
            stop_gap_tokens=self._chosen.stop_gap_tokens,
            max_rounds=self._chosen.max_rounds,
        ):
            self._hand_over()
        else:
            self._start_round()

    def _hand_over(self) -> None:
        """RLD falls silent at this position and MD goes on from it."""
        self._stop_legs()
        self._join()

    def _join(self) -> None:
        assert self._main is not None
        if self._relay is not None:
            self._settle(self.attempt, self._relay)
        self.phase = Phase.JOINING
        self._start_decode(self._main, "main", landed=self._transfer(self._main) == "landed")

    def _main_tokens(self, event: Tokens) -> None:
        if event.leg != self._speaker:
            return
        if event.finish is not None:
            self._close_leg(event.leg)
        if self.phase is not Phase.DECODING:  # this runs for every token
            if self._main is not None:
                self._settle(self.attempt, self._main)
            self.phase = Phase.DECODING
        self._accept(event.tokens, "main", event.finish, event.stop_reason)

    # ---- failures

    def _leg_failed(self, event: LegFailed) -> None:
        if event.leg not in self.legs:
            return
        engine = self.legs[event.leg]
        is_round = event.leg == self._round
        self._close_leg(event.leg)
        self.failures.append(event.failure)
        if not event.failure.retryable:
            self._fail(event.failure)
            return
        self._failed.add(engine)
        if is_round:
            # MD is lost before it said a word: RLD simply goes on to the end.
            self._settle(self.attempt, engine)
            self.phase = Phase.RELAYING
        elif (
            self.phase is Phase.RELAYING
            and self._transfer(self._main) == "open"
            and self._first(self.plan.relays, reachable=True) is None
        ):
            self.phase = Phase.WAITING_MAIN
            self._resume_main()
        elif self.phase in (Phase.RELAYING, Phase.CATCHING_UP) and self._transfer(self._main) == "landed":
            if self._main in self._failed:
                self._recover(event.failure)
            else:
                self._hand_over()
        else:
            self._recover(event.failure)

    def _recover(self, failure: Failure) -> None:
        """Continue after the last sent token with the engines that are left."""
        self._stop_legs()
        self._settle_all()
        self._chosen = None
        self._last_failure = failure
        if self.plan.whole_on_main and self.tokens:
            message = f"{failure.message}; this answer cannot be continued exactly by another engine"
            self._fail(Failure(kind="not_resumable", message=message, status=502))
        elif self._fruitless_attempts >= MAX_ATTEMPTS:
            self._fail(failure)
        elif self._first(self.plan.prefills) is None and not self._prefilled_once:
            # Decode engines are not asked to prefill instead: that would only spread the overload.
            self._pause(may_wait=failure.kind == "engine_lost" and bool(self.plan.prefills))
        elif self._first(self.plan.relays) is None and self._first(self.plan.mains) is None:
            self._pause()
        elif self._first(self.plan.prefills) is None:
            self._decode_directly()
        else:
            self._begin_attempt(relayed=True)

    def _decode_directly(self) -> None:
        """Continue without any transfer, on an engine that recomputes what it lacks.

        A relay comes first: it is near P and most likely holds the prompt already.
        """
        self.attempt += 1
        self._fruitless_attempts += 1
        relay, main = self._first(self.plan.relays), self._first(self.plan.mains)
        self._relay, self._main = None, None
        engine = relay or main
        if engine is None:
            self._pause()
            return
        self.phase = Phase.JOINING
        self._start_decode(engine, "relay" if relay else "main", landed=False)

    def _pause(self, *, may_wait: bool = False) -> None:
        """An answer that has begun waits for an engine to come back; one that has not ends with an error.

        Args:
            may_wait: Wait in any case: an engine that was lost to this request seems to be back.
        """
        if not self.tokens and not may_wait:
            self._fail(self._last_failure)
            return
        self.phase = Phase.PAUSED
        self._effects.append(Pause())

    def _engines_now(self, event: EnginesNow) -> None:
        relays = event.relays if self.plan.relays_allowed else ()
        self._plan = replace(self.plan, prefills=event.prefills, relays=relays, mains=event.mains)
        if self.phase is Phase.PAUSED:
            # What failed before may be another process by now; the bound on attempts without a token holds.
            self._failed.clear()
            self._unreachable.clear()
            self._recover(self._last_failure)

    def _pause_over(self, _event: PauseOver) -> None:
        self._fail(self._last_failure)

    def _start_decode(self, engine: str, role: Literal["relay", "main"], *, landed: bool) -> None:
        leg = self._open_leg(engine)
        self._speaker = leg
        self._effects.append(
            StartDecode(leg=leg, engine=engine, position=len(self.tokens), role=role, landed=landed)
        )

    # ---- tokens and ends

    def _accept(
        self,
        tokens: tuple[Token, ...],
        role: Literal["prefill", "relay", "main"],
        finish: str | None,
        stop_reason: int | str | None,
    ) -> bool:
        """Give tokens to the client, never more than asked for; true if that was the end."""
        room = self.plan.max_tokens - len(self.tokens)
        taken = tokens[:room]
        if len(self.tokens) + len(taken) >= self.plan.max_tokens and (finish is None or len(tokens) > room):
            finish = "length"
        if taken or finish:
            self._effects.append(
                Emit(
                    position=len(self.tokens),
                    tokens=taken,
                    role=role,
                    finish=finish,
                    stop_reason=stop_reason if finish == "stop" else None,
                )
            )
        self.tokens.extend(token.id for token in taken)
        if taken:
            self._fruitless_attempts = 0
        if finish is None:
            return False
        self._end("complete")
        self._effects.append(Complete(finish=finish))
        return True

    def _stop_matched(self, _event: StopMatched) -> None:
        self._end("complete")
        self._effects.append(Complete(finish="stop"))

    def _client_gone(self, _event: ClientGone) -> None:
        self._end("cancelled")

    def _deadline(self, _event: DeadlinePassed) -> None:
        self._fail(
            Failure(
                kind="deadline",
                message=f"the request did not finish in time (it was {self.phase})",
                status=504,
                retryable=False,
            )
        )

    def _fail(self, failure: Failure) -> None:
        self._end("error")
        self._effects.append(Fail(failure=failure))

    def _end(self, outcome: Outcome) -> None:
        self._stop_legs()
        self._settle_all()
        self.phase = Phase.DONE
        self.outcome = outcome

    # ---- legs

    def _open_leg(self, engine: str) -> int:
        leg = self._next_leg
        self._next_leg += 1
        self.legs[leg] = engine
        return leg

    def _close_leg(self, leg: int) -> None:
        self.legs.pop(leg, None)
        if leg == self._speaker:
            self._speaker = None
        if leg == self._round:
            self._round = None

    def _stop_legs(self) -> None:
        for leg in list(self.legs):
            self._effects.append(StopLeg(leg=leg))
            self._close_leg(leg)

    # ---- the table: every (phase, event) that means something; all others are late and change nothing

    ROWS: ClassVar[tuple[tuple[tuple[Phase, ...], type, Callable[..., None]], ...]] = (
        ((Phase.RENDERING,), Planned, _planned),
        ((Phase.PREFILLING,), Prefilled, _prefilled),
        ((*STARTED, Phase.DONE), Landed, _landed),
        ((*STARTED, Phase.DONE), TransferFailed, _transfer_failed),
        ((Phase.RELAYING, Phase.CATCHING_UP), Tokens, _relay_tokens),
        ((Phase.JOINING, Phase.DECODING), Tokens, _main_tokens),
        ((Phase.RELAYING,), HandoffChosen, _handoff_chosen),
        ((Phase.CATCHING_UP,), RoundDone, _round_done),
        ((Phase.WAITING_MAIN,), TransferStalled, _transfer_stalled),
        (STARTED, EnginesNow, _engines_now),
        ((Phase.PAUSED,), PauseOver, _pause_over),
        (STARTED, LegFailed, _leg_failed),
        (STARTED, StopMatched, _stop_matched),
        ((Phase.RENDERING, *STARTED), ClientGone, _client_gone),
        ((Phase.RENDERING, *STARTED), DeadlinePassed, _deadline),
    )


TABLE: Mapping[tuple[Phase, type], Callable[..., None]] = {
    (phase, event): handler for phases, event, handler in RequestMachine.ROWS for phase in phases
}
