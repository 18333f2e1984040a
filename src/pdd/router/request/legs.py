"""The engine requests of one answer: each leg is a task that turns an engine's answer into events."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from pdd.core.errors import ConnectError, EngineError, PddError
from pdd.router.engines import EngineEnd, GenerateChunk, WireUsage
from pdd.router.fleet import EngineState, Fleet
from pdd.router.http_connection import Gate
from pdd.router.request.events import (
    Event,
    Failure,
    LegFailed,
    Prefilled,
    RoundDone,
    StartDecode,
    StartPrefill,
    StartRound,
    Tokens,
)
from pdd.router.request.failures import failure_of
from pdd.router.request.job import Job

log = logging.getLogger(__name__)

GOOD_ENDS = frozenset({"stop", "length", "repetition"})
"""Any other finish reason (``abort``, ``error``) is an engine that gave up, never the end of an answer."""
USAGE_TIMEOUT_S = 1.0
"""The usage event comes with the last token; an engine that holds it back does not delay the answer."""

Work = Callable[[EngineState], Coroutine[Any, Any, None]]


class Legs:
    """Runs the legs of one answer.

    Args:
        job: What is asked for.
        fleet: Where the engines are.
        post: Takes the events.
        note_usage: Told what a decode engine says about its prompt: role, engine, usage.
        note_prefill: Told P's whole answer.
        sent: The first so many tokens of the answer.
        pass_on: Offered the IDs of tokens that come with nothing else, before they are posted as events.
        on_steady: Told when a leg's events differ in nothing but token IDs.
        gate: Closed while the client takes nothing.
        held_tokens: Tokens of the prompt that each P is believed to hold.
    """

    def __init__(
        self,
        *,
        job: Job,
        fleet: Fleet,
        post: Callable[[Event], None],
        note_usage: Callable[[str, str, WireUsage], None],
        note_prefill: Callable[[GenerateChunk], None],
        sent: Callable[[int], list[int]],
        pass_on: Callable[[int, list[int]], bool],
        on_steady: Callable[[int, EngineEnd], None],
        gate: Gate,
        held_tokens: Mapping[str, int],
    ) -> None:
        self._job = job
        self._held_tokens = held_tokens
        self._fleet = fleet
        self._post = post
        self._note_usage = note_usage
        self._note_prefill = note_prefill
        self._sent = sent
        self._pass_on = pass_on
        self._on_steady = on_steady
        self._gate = gate
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def start_prefill(self, effect: StartPrefill, *, whole_on_main: bool) -> None:
        """Begin a prefill leg."""
        body = self._job.prefill_body(
            effect.leg,
            self._sent(effect.position),
            transfer=self._job.transfer_id(effect.attempt),
            targets=effect.targets,
            whole_on_main=whole_on_main,
            held=effect.held,
        )
        missing = len(body["token_ids"]) - self._held_tokens.get(effect.engine, 0)
        self._start(
            effect.leg,
            effect.engine,
            lambda state: self._prefill(effect.leg, state, body),
            computes_tokens=max(0, missing),
        )

    def start_decode(self, effect: StartDecode) -> None:
        """Begin a streaming leg."""
        self._start(effect.leg, effect.engine, lambda state: self._decode(effect, state))

    def start_round(self, effect: StartRound) -> None:
        """Begin a catch-up round."""
        body = self._job.round_body(effect.leg, self._sent(effect.position))
        self._start(effect.leg, effect.engine, lambda state: self._round(effect, state, body))

    def stop(self, leg: int) -> None:
        """Close the leg's connection, which aborts it in the engine."""
        if (task := self._tasks.pop(leg, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop all legs and wait until their connections are closed."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, leg: int, engine: str, work: Work, *, computes_tokens: int = 0) -> None:
        state = self._fleet.engines[engine]

        def on_down() -> None:
            message = f"{state.config.id} does not answer its health check"
            self._post(LegFailed(leg=leg, failure=Failure(kind="engine_lost", message=message, status=502)))
            task.cancel()

        # From this moment on, not from when the task runs: others are placed in between.
        claim = state.claims.open(computes_tokens=computes_tokens, on_down=on_down)

        def on_done(done: asyncio.Task[None]) -> None:
            claim.close()
            self._report_bug(leg, done)

        task = asyncio.create_task(self._run(leg, state, work), name=self._job.hop_id(leg))
        task.add_done_callback(on_done)
        self._tasks[leg] = task

    def _report_bug(self, leg: int, task: asyncio.Task[None]) -> None:
        """An error outside the tree is a bug of ours; the request must end with it, not wait for ever."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("request %s: leg %d failed", self._job.request_id, leg, exc_info=error)
        message = f"internal error: {type(error).__name__}"
        failure = Failure(kind="internal", message=message, status=500, retryable=False)
        self._post(LegFailed(leg=leg, failure=failure))

    async def _run(
        self, leg: int, state: EngineState, work: Callable[[EngineState], Coroutine[Any, Any, None]]
    ) -> None:
        try:
            await work(state)
            state.note_success()
        except PddError as error:
            if isinstance(error, ConnectError):
                state.suspect()
            failure = failure_of(error)
            if failure.retryable:
                state.note_failure()
            self._post(LegFailed(leg=leg, failure=failure))
        finally:
            self._tasks.pop(leg, None)

    async def _prefill(self, leg: int, state: EngineState, body: dict[str, Any]) -> None:
        chunk = await state.client.generate(body, self._job.engine_headers(leg))
        if not chunk.tokens or chunk.finish not in GOOD_ENDS:
            raise EngineError(502, f"{state.config.id} ended the prefill with {chunk.finish!r}")
        self._post(
            Prefilled(leg=leg, token=chunk.tokens[0], finish=chunk.finish, stop_reason=chunk.stop_reason)
        )
        self._note_prefill(chunk)

    async def _round(self, effect: StartRound, state: EngineState, body: dict[str, Any]) -> None:
        chunk = await state.client.generate(body, self._job.engine_headers(effect.leg))
        if chunk.finish not in GOOD_ENDS:
            raise EngineError(502, f"{state.config.id} ended a catch-up round with {chunk.finish!r}")
        if chunk.usage is not None:
            self._note_usage("main", effect.engine, chunk.usage)
        self._post(RoundDone(leg=effect.leg))

    async def _decode(self, effect: StartDecode, state: EngineState) -> None:
        """Post every token the moment it comes; the last one waits for the usage event behind it."""
        last: GenerateChunk | None = None
        patience: asyncio.Timeout | None = None
        loop = asyncio.get_running_loop()

        def on_chunk(chunk: GenerateChunk) -> None:
            nonlocal last
            if last is not None:
                if chunk.usage is not None:
                    self._note_usage(effect.role, effect.engine, chunk.usage)
            elif chunk.finish is None:
                if chunk.tokens:
                    self._post(Tokens(leg=effect.leg, tokens=chunk.tokens))
            else:
                last = chunk
                wait_s = USAGE_TIMEOUT_S if chunk.finish in GOOD_ENDS else 0.0
                assert patience is not None
                patience.reschedule(loop.time() + wait_s)

        def on_ids(ids: list[int]) -> bool:
            return last is None and self._pass_on(effect.leg, ids)

        def body() -> dict[str, Any]:
            return self._job.decode_body(effect.leg, self._sent(effect.position))

        headers = self._job.engine_headers(effect.leg)
        try:
            async with (patience := asyncio.timeout(None)):
                on_steady = partial(self._on_steady, effect.leg)
                await state.client.stream(
                    body, headers, on_chunk, on_ids=on_ids, on_steady=on_steady, gate=self._gate
                )
        except (TimeoutError, PddError):
            if last is None:
                raise
        finally:
            patience = None  # it knows this task, which would know this frame if it was cancelled: a cycle
        finish = None if last is None else last.finish
        if last is None or finish not in GOOD_ENDS:
            raise EngineError(502, f"{state.config.id} ended the stream with {finish!r}")
        self._post(Tokens(leg=effect.leg, tokens=last.tokens, finish=finish, stop_reason=last.stop_reason))
