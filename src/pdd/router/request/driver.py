"""Drives one answer: does what the state machine's effects say and feeds back what happens.

It owns the clock, the tasks and the order in which things happen.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from pdd.router.claims import Claim
from pdd.router.detokenize import Detokenizer
from pdd.router.engines import EngineEnd, GenerateChunk, WireUsage
from pdd.router.http_connection import Gate
from pdd.router.records import Record
from pdd.router.request.accounting import Accounting
from pdd.router.request.answer import Answer, Sink
from pdd.router.request.events import (
    CancelTransfer,
    ChooseHandoff,
    ClientGone,
    DeadlinePassed,
    Effect,
    Emit,
    EnginesNow,
    Event,
    Fail,
    Failure,
    HandoffChosen,
    LegFailed,
    Pause,
    PauseOver,
    Planned,
    ReleaseTransfer,
    ResumeTransfer,
    StartDecode,
    StartPrefill,
    StartRound,
    StopLeg,
    StopMatched,
    Tokens,
    TransferFailed,
    TransferStalled,
)
from pdd.router.request.failures import error_of
from pdd.router.request.job import Job
from pdd.router.request.lane import AnswerLane
from pdd.router.request.legs import Legs
from pdd.router.request.machine.table import RequestMachine
from pdd.router.request.orders import Orders
from pdd.router.request.planning import Planning, choose_handoff, engines_now
from pdd.router.request.services import Services
from pdd.router.request.transfers import TransferLog

log = logging.getLogger(__name__)

PAUSE_POLL_S = 0.25
"""How often a paused answer looks whether an engine is back; health checks come every second."""


class RequestDriver:
    """One answer in progress; ``run`` it once.

    Args:
        services: What every request shares.
        job: What is asked for.
        planning: Where it is to be computed.
        reservation: What it takes of its engines until it has begun; closed then.
        record: Written to.
        arrived_s: When it came, on the loop's clock.
    """

    def __init__(
        self,
        *,
        services: Services,
        job: Job,
        planning: Planning,
        reservation: Sequence[Claim],
        record: Record,
        arrived_s: float,
    ) -> None:
        self.machine = RequestMachine()
        self.record = record
        self.prompt_logprobs: list[Any] | None = None
        self._services = services
        self._job = job
        self._planning = planning
        self._reservation = reservation
        self._loop = asyncio.get_running_loop()
        self._arrived_s = arrived_s
        self._inbox: asyncio.Queue[Event | None] = asyncio.Queue()
        self._idle = False
        self._gate = Gate()
        self._failure: Failure | None = None
        self._decoded_by: str | None = None
        self._paused_s: float | None = None
        self._deadline_s = 0.0
        self._answer: Answer
        self._lane: AnswerLane
        self._timers: list[asyncio.TimerHandle] = []
        self._accounting = Accounting(record=record, metrics=services.metrics, arrived_s=arrived_s)
        self._orders = Orders(
            fleet=services.fleet, background=services.background, transfer_prefix=job.transfer_prefix
        )
        self._transfers = TransferLog(
            record=record,
            metrics=services.metrics,
            post=self._inbox.put_nowait,
            release=self._orders.release,
            is_wan=services.fleet.is_wan,
            now_s=partial(_since, self._loop, arrived_s),
            believed_missing=planning.believed_missing,
        )
        self._legs = Legs(
            job=job,
            fleet=services.fleet,
            post=self._post,
            sent=self._sent,
            pass_on=self._pass_on,
            on_steady=self._on_steady,
            gate=self._gate,
            note_usage=self._note_usage,
            note_prefill=self._note_prefill,
            held_tokens=planning.believed_held_tokens,
        )

    async def run(self, sink: Sink) -> None:
        """Compute the answer and give every piece of it to the sink.

        Raises:
            PddError: If the request ends without a whole answer; what was delivered until then is good.
        """
        text = self._job.text
        self._answer = Answer(
            text=Detokenizer(self._services.tokenizer, self._job.rendered.token_ids, text),
            accounting=self._accounting,
            sink=sink,
            has_stops=bool(text.stop),
        )
        self._lane = AnswerLane(
            fast_path=self._services.fast_path,
            machine=self.machine,
            answer=self._answer,
            prompt_ids=self._job.rendered.token_ids,
            metrics=self._services.metrics,
            is_idle=self._is_idle,
            wake=partial(self._inbox.put_nowait, None),
        )
        timeout_s = self._job.timeout_s - self._now_s()
        self._deadline_s = self._loop.time() + timeout_s
        self._timers.append(self._loop.call_later(timeout_s, self._inbox.put_nowait, DeadlinePassed()))
        self._services.metrics.in_flight.inc()
        try:
            await self._turn(Planned(plan=self._planning.plan))
            for claim in self._reservation:  # its legs and what they wait for count themselves by now
                claim.close()
            while self.machine.outcome is None:
                self._idle = True
                event = await self._inbox.get()
                self._idle = False
                await self._turn(event)
        finally:
            self._idle = False
            self._lane.take_back()
            # Reached with no outcome when the client leaves or cannot be written to.
            self._perform(self.machine.step(ClientGone()))
            while not self._inbox.empty():  # a landing that was not yet heard holds a lease
                if (late := self._inbox.get_nowait()) is not None:
                    self._perform(self.machine.step(late))
            self._finish()
            self._services.background(self._legs.close())
            # They know the driver: a cycle, and those are looked for seldom.
            del self._legs, self._answer, self._lane
        if self._failure is not None:
            raise error_of(self._failure)

    def _post(self, event: Event) -> None:
        """Take news from a leg; tokens with nothing before them go to the client without a task switch."""
        if type(event) is Tokens and self._is_idle():
            self._perform(self.machine.step(event))
            if not self._answer.hand_out() or self.machine.outcome is not None:
                self._inbox.put_nowait(None)  # ``run`` has to wait for the client, or to end
        else:
            self._inbox.put_nowait(event)

    def _is_idle(self) -> bool:
        return self._idle and self._inbox.empty()

    def _on_steady(self, leg: int, engine: EngineEnd) -> None:
        self._lane.offer(leg, engine)

    def _pass_on(self, leg: int, ids: list[int]) -> bool:
        """Give tokens that are nothing but more text straight to the client; false if they must be posted."""
        if not (
            ids and self._is_idle() and self._answer.text_only and len(ids) <= self.machine.room_for_more(leg)
        ):
            return False
        self.machine.take(ids)
        if not self._answer.pass_on(ids, self.machine.speaking, now_s=self._now_s()):
            self._inbox.put_nowait(None)
        return True

    async def _turn(self, event: Event | None) -> None:
        self._lane.take_back()
        if isinstance(event, LegFailed) and (engine := self.machine.legs.get(event.leg)) is not None:
            self._services.metrics.leg_failures.labels(engine=engine, kind=event.failure.kind).inc()
        if isinstance(event, LegFailed | TransferFailed | TransferStalled):
            self._perform(self.machine.step(self._engines_now()))
        if event is not None:
            self._perform(self.machine.step(event))
        if not self._answer.hand_out() or event is None:
            await self._wait_for_client()

    async def _wait_for_client(self) -> None:
        """Engines are not read from meanwhile, so that a slow client costs no memory."""
        self._gate.close()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                await self._answer.ready()
        except TimeoutError:
            self._perform(self.machine.step(DeadlinePassed()))
        finally:
            self._gate.open()

    # ---- effects

    def _perform(self, effects: Sequence[Effect]) -> None:
        """Do all effects; nothing is awaited, so that none is lost when the client leaves in between."""
        todo = list(effects)
        for effect in todo:
            todo.extend(self._perform_one(effect))

    def _perform_one(self, effect: Effect) -> Sequence[Effect]:
        match effect:
            case Emit():
                return self._emit(effect)
            case ChooseHandoff():
                return self._choose_handoff(effect)
            case StartPrefill():
                self._start_prefill(effect)
            case StartDecode():
                self._decoded_by = effect.engine
                self._orders.begins(effect.engine)
                self._accounting.on_decode(effect, self.machine, self._now_s())
                self._legs.start_decode(effect)
            case StartRound():
                self._legs.start_round(effect)
            case StopLeg():
                self._legs.stop(effect.leg)
            case CancelTransfer():
                self._orders.cancel(effect.attempt, effect.peer)
            case ResumeTransfer():
                self._orders.resume(effect.attempt)
            case ReleaseTransfer():
                self._orders.release(effect.attempt, effect.peer)
            case Pause():
                self._pause()
            case Fail():
                self._failure = effect.failure
            case _:
                pass
        return ()

    def _sent(self, position: int) -> list[int]:
        return list(self.machine.tokens[:position])

    def _start_prefill(self, effect: StartPrefill) -> None:
        listener = self._transfers.listener(effect.attempt, effect.engine, effect.targets)
        self._orders.note(effect, listener)
        if effect.attempt > 1:
            self._services.metrics.continuations.inc()
            log.warning(
                "request %s: attempt %d on %s from token %d: %s",
                self._job.request_id,
                effect.attempt,
                effect.engine,
                effect.position,
                self.machine.failures[-1].message if self.machine.failures else "transfer failed",
            )
        self._legs.start_prefill(
            effect,
            whole_on_main=self.machine.plan.whole_on_main and bool(effect.targets),
        )

    def _choose_handoff(self, effect: ChooseHandoff) -> Sequence[Effect]:
        relay = self._services.fleet.engines[effect.relay]
        decision = choose_handoff(
            self._services.config,
            self._services.decisions,
            request=self.record.id,
            relay=relay,
            gap_tokens=effect.gap_tokens,
        )
        if decision.auto_mode != relay.auto_handoff:
            self._services.metrics.auto_switches.labels(engine=effect.relay, mode=decision.auto_mode).inc()
        relay.auto_handoff = decision.auto_mode
        return self.machine.step(HandoffChosen(mode=decision.mode, catch_up=decision.catch_up))

    def _engines_now(self) -> EnginesNow:
        job = self._job
        return engines_now(
            self._services.fleet,
            self._planning.prompt.blocks,
            tokens=len(job.rendered.token_ids) + job.max_tokens,
            affinity_weight_ratio=self._services.config.policy.affinity_weight_ratio,
        )

    def _pause(self) -> None:
        now_s = self._now_s()
        if self._paused_s is None:
            self._paused_s = now_s
            self._services.metrics.pauses.inc()
            log.warning("request %s: no engine is left, waiting for one", self._job.request_id)
        over = now_s - self._paused_s >= self._services.config.router.recovery_timeout_s
        self._timers.append(self._loop.call_later(0 if over else PAUSE_POLL_S, self._look_again, over))

    def _look_again(self, over: bool) -> None:
        self._inbox.put_nowait(PauseOver() if over else self._engines_now())

    # ---- tokens

    def _emit(self, effect: Emit) -> Sequence[Effect]:
        """Give tokens to the client; a stop string in their text ends the answer."""
        self._paused_s = None
        finish = self._answer.give(
            effect.tokens, effect.role, effect.finish, effect.stop_reason, now_s=self._now_s()
        )
        if finish is not None:
            self.record.finish_reason = finish
        return self.machine.step(StopMatched()) if finish != effect.finish else ()

    # ---- news from engines

    def _note_prefill(self, chunk: GenerateChunk) -> None:
        if self.machine.attempt == 1 and chunk.usage is not None:
            self.record.cached_tokens = chunk.usage.cached_tokens or 0
            self._accounting.on_prefill_hit(self._orders.prefills[1], self._planning.believed_held_tokens)
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = chunk.prompt_logprobs
        attempt = self.machine.attempt
        if self._orders.targets.get(attempt):
            timeout_s = self._services.config.router.transfer_timeout_s
            self._timers.append(self._loop.call_later(timeout_s, self._transfer_timed_out, attempt))

    def _transfer_timed_out(self, attempt: int) -> None:
        for peer in self._orders.targets[attempt]:
            if self.machine.transfers.get((attempt, peer)) == "open":
                self._inbox.put_nowait(
                    TransferFailed(attempt=attempt, peer=peer, reason="timed_out", is_certain=False)
                )

    def _note_usage(self, role: str, engine: str, usage: WireUsage) -> None:
        chunk_tokens = self._services.config.kv.chunk_tokens
        block_tokens = self._services.config.kv.block_size_tokens
        landed = self._transfers.landed_tokens.get(engine, 0)
        # vLLM never takes the last token of a prompt from a cache: something must be computed.
        expected = min(landed, (usage.prompt_tokens - 1) // block_tokens * block_tokens)
        shortfall = self._accounting.on_usage(role, engine, usage, expected_tokens=expected)
        if shortfall:
            log.warning(
                "request %s: %s computed %d tokens again whose KV had landed (chunks of %d tokens)",
                self._job.request_id,
                engine,
                shortfall,
                chunk_tokens,
            )

    # ---- the end

    def _finish(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._transfers.close()
        self._orders.expect_none()
        self._services.metrics.in_flight.dec()
        self._learn_caches()
        self._accounting.on_end(
            self.machine, failure=self._failure, num_tokens=self._answer.num_tokens, now_s=self._now_s()
        )
        record = self.record
        log.info(
            "request %s: %s by %s (%s), %d + %d tokens, ttft %s, handoff %s, wan %d bytes",
            self._job.request_id,
            record.outcome,
            record.pipeline,
            record.reason,
            record.prompt_tokens,
            record.output_tokens,
            f"{record.ttft_s:.3f} s" if record.ttft_s is not None else "none",
            record.handoff_mode or "none",
            record.wan_bytes,
        )

    def _learn_caches(self) -> None:
        """What landed is there now, and so is the reply where MD decoded it: its tier stores replies too."""
        engines = self._services.fleet.engines
        prompt = self._planning.prompt
        for (_, peer), state in self.machine.transfers.items():
            if state == "released":
                engines[peer].belief.in_store(prompt.blocks.chunks)
        if self.machine.outcome == "complete":
            self._services.fleet.history.note(self._job.rendered.tenant, self._answer.num_tokens)
        if self.record.relay is not None and (itl_s := self._accounting.relay_itl_s) is not None:
            engines[self.record.relay].note_itl(itl_s)
        if self.machine.outcome == "complete" and self._decoded_by is not None:
            # The last token was sampled, but its KV was never computed.
            decoder = engines[self._decoded_by]
            if not decoder.events.next_seq:  # else the engine says itself what it stored of the reply
                decoder.belief.in_store(prompt.with_reply(self._sent(len(self.machine.tokens) - 1)).chunks)

    def _now_s(self) -> float:
        return _since(self._loop, self._arrived_s)


def _since(loop: asyncio.AbstractEventLoop, arrived_s: float) -> float:
    return loop.time() - arrived_s
