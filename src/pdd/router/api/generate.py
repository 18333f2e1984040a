"""The two generating endpoints: check, render, plan, run every choice, write the answer."""

import asyncio
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from aiohttp import web

from pdd.core.errors import DeadlineError, NoEndpointError, PddError, TransportError
from pdd.policy.placement import place
from pdd.policy.relayable import RelayDecision, decide_relayable
from pdd.router.api.body import (
    ChatBody,
    CompletionBody,
    forwarded,
    parse_json,
    read_chat,
    read_completion,
    stops,
)
from pdd.router.api.errors import BadRequestError, NotFoundError, TooLargeError
from pdd.router.api.logprobs import LogprobFormat
from pdd.router.api.shapes import Choice, Shape
from pdd.router.api.stream import ClientStream
from pdd.router.detokenize import TextOptions
from pdd.router.records import Record, RecordRing
from pdd.router.request.driver import Piece, RequestDriver, Services, Sink
from pdd.router.request.job import Job, Rendered, read_rendered
from pdd.router.request.planning import Planner, Planning, block_hasher, choose_prefill, prompt_keys
from pdd.router.sse import frame

_encode = msgspec.json.encode
REQUEST_ID = web.RequestKey("request_id", str)
ARRIVED_S = web.RequestKey("arrived_s", float)
COMPLETION_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for ``/v1/completions``."""
TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds from its arrival after which the client does not want the answer any more."""
_TRACE_HEADERS = ("traceparent", "tracestate")
_TRANSFER_ID_CHARS = 40

Body = ChatBody | CompletionBody
Api = Literal["chat", "completion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One choice and what computes it."""

    choice: Choice
    driver: RequestDriver


class GenerateHandler:
    """Serves ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, services: Services, records: RecordRing) -> None:
        self._services = services
        self._records = records
        self._config = services.config
        self._hasher = block_hasher(services.config)
        self._planner = Planner(config=services.config, fleet=services.fleet, decisions=services.decisions)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        values = parse_json(await _read(request, self._config.router.max_body_bytes))
        return await self._admit(request, "chat", values, read_chat(values))

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        values = parse_json(await _read(request, self._config.router.max_body_bytes))
        return await self._admit(request, "completion", values, read_completion(values))

    async def _admit(
        self, request: web.Request, api: Api, values: dict[str, Any], body: Body
    ) -> web.StreamResponse:
        deadline_s = request[ARRIVED_S] + self._timeout_s(request)
        door = self._services.door
        async with door.entered(request[REQUEST_ID], priority=_priority(body), deadline_s=deadline_s):
            return await self._serve(request, api, values, body)

    def _timeout_s(self, request: web.Request) -> float:
        """The request's deadline after its arrival: the router's own, or less if the client says so.

        Raises:
            BadRequestError: If the client's is no positive number of seconds.
        """
        limit_s = self._config.router.request_timeout_s
        if (given := request.headers.get(TIMEOUT_HEADER)) is None:
            return limit_s
        try:
            asked_s = float(given)
        except ValueError:
            asked_s = -1.0
        if not 0 < asked_s < float("inf"):
            raise BadRequestError(f"{TIMEOUT_HEADER} must be a positive number of seconds, got {given!r}")
        return min(limit_s, asked_s)

    async def _serve(
        self, request: web.Request, api: Api, values: dict[str, Any], body: Body
    ) -> web.StreamResponse:
        arrived_s = request[ARRIVED_S]
        if body.request_id and "X-Request-Id" not in request.headers:
            request[REQUEST_ID] = body.request_id
        request_id = request[REQUEST_ID]
        self._check_model(body)
        try:
            async with asyncio.timeout_at(arrived_s + self._timeout_s(request)):
                rendered = await self._render(request, api, values)
        except TimeoutError:
            raise DeadlineError("the request did not finish in time (it was rendering)") from None
        runs = self._plan_runs(request, body, rendered, arrived_s)
        shape = Shape(
            api=api,
            id=f"{'chatcmpl' if api == 'chat' else 'cmpl'}-{request_id}",
            model=body.model or self._config.model.name,
            logprobs=self._logprobs(body),
            token_ids=bool(body.return_token_ids),
        )
        record = runs[0].driver.record
        headers = {"x-pdd-pipeline": record.pipeline or "", "x-pdd-reason": _reason_header(record)}
        if body.stream:
            return await self._stream(request, body, shape, runs, headers)
        return await self._whole(shape, runs, headers)

    # ---- before the first token

    def _check_model(self, body: Body) -> None:
        if body.model is not None and body.model != self._config.model.name:
            raise NotFoundError(
                f"the model {body.model!r} does not exist; this router serves {self._config.model.name!r}",
                param="model",
            )

    async def _render(self, request: web.Request, api: Api, values: dict[str, Any]) -> list[Rendered]:
        """The prompts as a P engine renders them; another one is asked if the first cannot be reached."""
        path = "/v1/chat/completions/render" if api == "chat" else "/v1/completions/render"
        sent = forwarded(values, self._config.model.name)
        choose_prefill(self._services.fleet)
        last: PddError = NoEndpointError("no prefill engine is ready")
        for engine in place(self._services.fleet.views("prefill")).order:
            client = self._services.fleet.engines[engine].client
            try:
                answer = await client.render(path, sent, {"X-Request-Id": request[REQUEST_ID]})
            except TransportError as error:
                self._services.fleet.engines[engine].suspect()
                last = error
                continue
            return [read_rendered(item) for item in (answer if isinstance(answer, list) else [answer])]
        raise last

    def _plan_runs(
        self, request: web.Request, body: Body, prompts: Sequence[Rendered], arrived_s: float
    ) -> list[Run]:
        runs: list[Run] = []
        for rendered in prompts:
            relayable = self._relayable(body, rendered)
            keys = prompt_keys(self._hasher, rendered)
            for copy in range(body.n or 1):
                index = len(runs)
                max_tokens = max(1, rendered.max_tokens)
                planning = self._planner.plan(
                    request[REQUEST_ID], keys, max_tokens=max_tokens, relayable=relayable
                )
                max_tokens = self._check_length(body, rendered, planning, max_tokens)
                record = self._record(request[REQUEST_ID], index, rendered, planning, arrived_s)
                job = self._job(request, index, _with_seed(rendered, copy), body, max_tokens)
                driver = RequestDriver(
                    services=self._services, job=job, planning=planning, record=record, arrived_s=arrived_s
                )
                choice = Choice(
                    index=index, prompt_ids=rendered.token_ids, echo_text=self._echo(body, rendered)
                )
                runs.append(Run(choice=choice, driver=driver))
        return runs

    def _relayable(self, body: Body, rendered: Rendered) -> RelayDecision:
        words = body.bad_words or []
        # A word counts with and without a leading space, as the engine bans both.
        encoded = [
            self._services.tokenizer.encode(p + w, add_special_tokens=False) for w in words for p in ("", " ")
        ]
        return decide_relayable(
            rendered.sampling_params,
            multimodal=rendered.multimodal,
            echo=bool(body.echo),
            multi_token_bad_words=any(len(encoding.ids) > 1 for encoding in encoded),
            sampler_state_carried=self._config.carries_sampler_state,
        )

    def _check_length(self, body: Body, rendered: Rendered, planning: Planning, max_tokens: int) -> int:
        """The most tokens every planned engine has room for.

        Raises:
            BadRequestError: If the prompt, or prompt and wanted answer together, exceed what one takes.
        """
        plan = planning.plan
        states = self._services.fleet.engines
        limits = [states[e].max_model_len for e in (*plan.prefills, *plan.relays, *plan.mains)]
        limit = min((limit for limit in limits if limit is not None), default=None)
        if limit is None:
            return max_tokens
        asked = _asked_tokens(body)
        prompt = len(rendered.token_ids)
        if prompt + (asked or 1) > limit:
            raise BadRequestError(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{asked or 1} output tokens and your prompt contains {prompt} input tokens.",
                param="max_tokens" if prompt < limit else "prompt",
            )
        return min(max_tokens, limit - prompt)

    def _record(
        self, request_id: str, index: int, rendered: Rendered, planning: Planning, arrived_s: float
    ) -> Record:
        decision, plan = planning.pipeline, planning.plan
        record = Record(
            id=request_id if index == 0 else f"{request_id}-{index}",
            arrived_s=arrived_s,
            pipeline=decision.pipeline,
            reason=decision.reason,
            reason_detail=decision.detail or None,
            prefill=plan.prefills[0],
            relay=plan.relays[0] if plan.relays and decision.pipeline == "p-rld-md" else None,
            main=plan.mains[0] if plan.mains else None,
            prompt_tokens=len(rendered.token_ids),
            outlier=planning.outlier.is_outlier,
            predicted_wan_s=decision.predicted_wan_s if decision.predicted_wan_s != float("inf") else None,
        )
        self._records.add(record)
        metrics = self._services.metrics
        metrics.decisions.labels(path=decision.pipeline, reason=decision.reason).inc()
        if planning.relayable.reason is not None:
            metrics.not_relayable.labels(what=planning.relayable.reason).inc()
        return record

    def _job(self, request: web.Request, index: int, rendered: Rendered, body: Body, max_tokens: int) -> Job:
        request_id: str = request[REQUEST_ID]
        safe = re.sub(r"[^A-Za-z0-9_.-]", "_", request_id)[:_TRANSFER_ID_CHARS]
        return Job(
            request_id=request_id,
            transfer_prefix=f"{safe}-{index}-{uuid.uuid4().hex[:12]}",
            rendered=rendered,
            text=TextOptions(
                stop=stops(body),
                include_stop=body.include_stop_str_in_output,
                min_tokens=body.min_tokens or 0,
                skip_special_tokens=body.skip_special_tokens,
            ),
            max_tokens=max_tokens,
            timeout_s=self._timeout_s(request),
            headers={name: request.headers[name] for name in _TRACE_HEADERS if name in request.headers},
        )

    def _echo(self, body: Body, rendered: Rendered) -> str:
        if not body.echo:
            return ""
        return self._services.tokenizer.decode(
            rendered.token_ids, skip_special_tokens=body.skip_special_tokens
        )

    def _logprobs(self, body: Body) -> LogprobFormat | None:
        if isinstance(body, ChatBody):
            wanted, num_top = bool(body.logprobs), body.top_logprobs or 0
        else:
            wanted, num_top = body.logprobs is not None, body.logprobs or 0
        if not wanted:
            return None
        return LogprobFormat(
            self._services.tokenizer, num_top=num_top, as_ids=bool(body.return_tokens_as_token_ids)
        )

    # ---- the answer

    async def _whole(self, shape: Shape, runs: list[Run], headers: dict[str, str]) -> web.Response:
        text_only = shape.logprobs is None and not shape.token_ids
        await _run_all([(run, _Collected(run, text_only=text_only)) for run in runs])
        for run in runs:
            run.choice.prompt_logprobs = run.driver.prompt_logprobs
        return web.json_response(shape.whole([run.choice for run in runs]), headers=headers)

    async def _stream(
        self, request: web.Request, body: Body, shape: Shape, runs: list[Run], headers: dict[str, str]
    ) -> web.StreamResponse:
        stream = ClientStream(
            request, headers, keep_alive_interval_s=self._config.router.keep_alive_interval_s
        )
        options = body.stream_options
        include_usage = bool(options and options.include_usage)
        continuous = include_usage and bool(options and options.continuous_usage_stats)
        try:
            async with stream.kept_alive():
                await _run_all([(run, _Streamed(run, stream, shape, continuous=continuous)) for run in runs])
                if include_usage:
                    stream.write(frame(shape.usage_chunk([run.choice for run in runs])))
                    await stream.ready()
        except PddError as error:
            if not stream.begun:
                raise
            return await stream.fail(error)
        return await stream.finish()


class _Collected:
    """Sink of an answer that is sent as a whole."""

    def __init__(self, run: Run, *, text_only: bool) -> None:
        self._run = run
        self.text_only = text_only

    def put(self, piece: Piece) -> bool:
        """Keep the piece."""
        self._run.choice.text += piece.text
        self._run.choice.tokens.extend(piece.tokens)
        _note(self._run, piece)
        return True

    def put_text(self, text: str, num_tokens: int) -> bool:
        """Keep the text."""
        self._run.choice.text += text
        self._run.choice.num_tokens = num_tokens
        return True

    async def ready(self) -> None:
        """Always."""


class _Streamed:
    """Sink of one choice of a streamed answer."""

    def __init__(self, run: Run, stream: ClientStream, shape: Shape, *, continuous: bool) -> None:
        self._run = run
        self._choice = run.choice
        self._stream = stream
        self._shape = shape
        self._continuous = continuous
        around = None if continuous else shape.around_text(run.choice)
        self.text_only = around is not None
        self._before, self._after = around or (b"", b"")
        self.ready = stream.ready

    def put(self, piece: Piece) -> bool:
        """Write the piece's event."""
        choice = self._choice
        if not choice.begun:
            choice.begun = True
            if (first := self._shape.first_chunk(choice)) is not None:
                self._stream.write(self._frame(first))
            choice.text_chars = len(choice.echo_text)
        _note(self._run, piece)
        data = self._frame(self._shape.chunk(choice, piece))
        choice.text_chars += len(piece.text)
        return self._stream.write(data)

    def put_text(self, text: str, num_tokens: int) -> bool:
        """Write the event of a piece of text; something was put before it."""
        self._choice.num_tokens = num_tokens
        return self._stream.write(self._before + _encode(text) + self._after)

    def _frame(self, payload: dict[str, Any]) -> bytes:
        if self._continuous:
            payload["usage"] = self._shape.usage([self._run.choice], details=False)
        return frame(payload)


def _note(run: Run, piece: Piece) -> None:
    run.choice.num_tokens = piece.num_tokens
    run.choice.cached_tokens = run.driver.record.cached_tokens
    if piece.finish is not None:
        run.choice.finish, run.choice.stop_reason = piece.finish, piece.stop_reason


async def _run_all(runs: Sequence[tuple[Run, Sink]]) -> None:
    """Run every choice; the first that fails ends the others."""
    if len(runs) == 1:
        run, sink = runs[0]
        await run.driver.run(sink)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for run, sink in runs:
                group.create_task(run.driver.run(sink))
    except* PddError as errors:
        raise errors.exceptions[0] from None


def _priority(body: Body) -> int:
    """As vLLM's: lower is more urgent; what is no number is refused by the engine that renders."""
    return body.priority if isinstance(body.priority, int) else 0


def _asked_tokens(body: Body) -> int | None:
    if isinstance(body, ChatBody):
        return body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return body.max_tokens if body.max_tokens is not None else COMPLETION_DEFAULT_MAX_TOKENS


def _with_seed(rendered: Rendered, copy: int) -> Rendered:
    """Copies of one prompt draw from different seeds, as vLLM's do."""
    seed = rendered.sampling_params.get("seed")
    if not copy or not isinstance(seed, int):
        return rendered
    params = {**rendered.sampling_params, "seed": seed + copy}
    return Rendered(token_ids=rendered.token_ids, sampling_params=params, carried=rendered.carried)


def _reason_header(record: Record) -> str:
    return f"{record.reason}:{record.reason_detail}" if record.reason_detail else str(record.reason)


async def _read(request: web.Request, limit_bytes: int) -> bytes:
    too_large = TooLargeError(f"the body is larger than {limit_bytes} bytes")
    if request.content_length is not None and request.content_length > limit_bytes:
        raise too_large
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
