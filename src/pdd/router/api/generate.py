"""The two generating endpoints: check, render, plan, run every choice, write the answer."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

from aiohttp import web

from pdd.core.errors import ConnectionLostError, DeadlineError, NoEndpointError, PddError, TransportError
from pdd.router.api.body import ChatBody, forwarded, parse_json, read_chat, read_completion
from pdd.router.api.errors import BadRequestError, NotFoundError, TooLargeError
from pdd.router.api.logprobs import LogprobFormat
from pdd.router.api.runs import Asked, Body, RunFactory
from pdd.router.api.shapes import Shape
from pdd.router.api.sinks import Collected, ParsedSink, Run, Streamed, run_all
from pdd.router.api.stream import ClientStream
from pdd.router.parsing import ParsedStream
from pdd.router.records import Record, RecordRing
from pdd.router.request.job import Rendered, read_rendered
from pdd.router.request.planning import prefill_order
from pdd.router.request.services import Services
from pdd.router.sse import frame

REQUEST_ID = web.RequestKey("request_id", str)
ARRIVED_S = web.RequestKey("arrived_s", float)
TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds from its arrival after which the client does not want the answer any more."""
_TRACE_HEADERS = ("traceparent", "tracestate")

Api = Literal["chat", "completion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """How one request is answered.

    ``parsed`` has the choices' answers at the parse process, in order; it is empty if none needs parsing.
    """

    body: Body
    shape: Shape
    runs: list[Run]
    parsed: list[ParsedStream]
    headers: dict[str, str]

    @property
    def hides_reasoning(self) -> bool:
        """Whether tokens must not be shown, since some of them may be reasoning nobody asked for."""
        return bool(self.parsed) and isinstance(self.body, ChatBody) and self.body.include_reasoning is False

    @property
    def text_only(self) -> bool:
        """Whether nothing but text is told of tokens."""
        return not self.parsed and self.shape.logprobs is None and not self.shape.token_ids


class GenerateHandler:
    """Serves ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, services: Services, records: RecordRing) -> None:
        self._services = services
        self._config = services.config
        self._factory = RunFactory(services, records)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        values = parse_json(await _read(request, self._config.router.max_body_bytes))
        body = read_chat(values, takes_tools=self._config.model.tool_call_parser is not None)
        return await self._admit(request, "chat", values, body)

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
        if body.request_id and "X-Request-Id" not in request.headers:
            request[REQUEST_ID] = body.request_id
        self._check_model(body)
        asked = Asked(
            id=request[REQUEST_ID],
            body=body,
            arrived_s=request[ARRIVED_S],
            timeout_s=self._timeout_s(request),
            engine_headers={n: request.headers[n] for n in _TRACE_HEADERS if n in request.headers},
        )
        rendered = await self._render(asked, api, values)
        shape = Shape(
            api=api,
            id=f"{'chatcmpl' if api == 'chat' else 'cmpl'}-{asked.id}",
            model=body.model or self._config.model.name,
            logprobs=self._logprobs(body),
            token_ids=bool(body.return_token_ids),
        )
        if not self._is_parsed(body):
            return await self._run(request, asked, shape, rendered, [])
        async with AsyncExitStack() as stack:
            answer = partial(self._services.parser.answer, values, deadline_s=asked.deadline_s)
            parsed = [
                await stack.enter_async_context(answer(list(prompt.token_ids)))
                for prompt in rendered
                for _ in range(body.n or 1)
            ]
            return await self._run(request, asked, shape, rendered, parsed)

    # ---- before the first token

    def _check_model(self, body: Body) -> None:
        if body.model is not None and body.model != self._config.model.name:
            raise NotFoundError(
                f"the model {body.model!r} does not exist; this router serves {self._config.model.name!r}",
                param="model",
            )

    async def _render(self, asked: Asked, api: Api, values: dict[str, Any]) -> list[Rendered]:
        """The prompts as a P engine renders them; another one is asked if the first cannot be reached.

        A connection that is lost says little of its engine, which may be the only one: it is asked once more.

        Raises:
            DeadlineError: If the request's time ends meanwhile.
        """
        path = "/v1/chat/completions/render" if api == "chat" else "/v1/completions/render"
        sent = forwarded(values, self._config.model.name)
        loop = asyncio.get_running_loop()
        last: PddError = NoEndpointError("no prefill engine is ready")
        again: list[str] = []
        for engine in chain(prefill_order(self._services.fleet), again):
            client = self._services.fleet.engines[engine].client
            left_s = asked.deadline_s - loop.time()
            try:
                answer = await client.render(path, sent, {"X-Request-Id": asked.id}, timeout_s=left_s)
            except TransportError as error:
                if loop.time() >= asked.deadline_s:
                    message = "the request did not finish in time (it was rendering)"
                    raise DeadlineError(message) from error
                last = error
                if isinstance(error, ConnectionLostError) and engine not in again:
                    again.append(engine)
                else:
                    self._services.fleet.engines[engine].suspect()
                continue
            return [read_rendered(item) for item in (answer if isinstance(answer, list) else [answer])]
        raise last

    def _is_parsed(self, body: Body) -> bool:
        """Whether an answer may hold more than content: reasoning, or calls of the tools it was given."""
        if not isinstance(body, ChatBody):
            return False
        return self._config.model.reasoning_parser is not None or bool(body.tools)

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

    async def _run(
        self,
        request: web.Request,
        asked: Asked,
        shape: Shape,
        rendered: list[Rendered],
        parsed: list[ParsedStream],
    ) -> web.StreamResponse:
        with self._factory.planned(asked, rendered) as runs:
            record = runs[0].driver.record
            headers = {"x-pdd-pipeline": record.pipeline or "", "x-pdd-reason": _reason_header(record)}
            reply = Reply(body=asked.body, shape=shape, runs=runs, parsed=parsed, headers=headers)
            return await (self._stream(request, reply) if asked.body.stream else self._whole(reply))

    async def _whole(self, reply: Reply) -> web.Response:
        await run_all([(run, Collected(run, text_only=reply.text_only)) for run in reply.runs])
        for run in reply.runs:
            run.choice.prompt_logprobs = run.driver.prompt_logprobs
        for run, parsed in zip(reply.runs, reply.parsed, strict=False):
            choice = run.choice
            said = await parsed.whole(choice.text, [token.id for token in choice.tokens])
            choice.take_parsed(said.fields or {}, said.reasoning_tokens, _tool_choice(reply.body))
            if reply.hides_reasoning:
                choice.tokens.clear()
        choices = [run.choice for run in reply.runs]
        return web.json_response(reply.shape.whole(choices), headers=reply.headers)

    async def _stream(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        stream = ClientStream(
            request, reply.headers, keep_alive_interval_s=self._config.router.keep_alive_interval_s
        )
        options = reply.body.stream_options
        include_usage = bool(options and options.include_usage)
        continuous = include_usage and bool(options and options.continuous_usage_stats)
        sinks = [Streamed(run, stream, reply.shape, continuous=continuous) for run in reply.runs]
        if len(sinks) == 1:
            sinks[0].have_alone()
        try:
            with stream.kept_alive():
                if reply.parsed:
                    await _run_parsed(reply, sinks)
                else:
                    await run_all(list(zip(reply.runs, sinks, strict=True)))
                if include_usage:
                    stream.write(frame(reply.shape.usage_chunk([run.choice for run in reply.runs])))
                    await stream.ready()
        except PddError as error:
            if not stream.begun:
                raise
            return await stream.fail(error)
        return await stream.finish()


async def _run_parsed(reply: Reply, inner: list[Streamed]) -> None:
    named = isinstance(_tool_choice(reply.body), dict)
    parts = zip(reply.runs, inner, reply.parsed, strict=True)
    sinks = [ParsedSink(r, s, p, named_tool=named, bare=reply.hides_reasoning) for r, s, p in parts]
    await run_all(list(zip(reply.runs, sinks, strict=True)))
    for sink in sinks:
        await sink.finish()


def _tool_choice(body: Body) -> Any:
    return body.tool_choice if isinstance(body, ChatBody) else None


def _priority(body: Body) -> int:
    """As vLLM's: lower is more urgent; what is no number is refused by the engine that renders."""
    return body.priority if isinstance(body.priority, int) else 0


def _reason_header(record: Record) -> str:
    return f"{record.reason}:{record.reason_detail}" if record.reason_detail else str(record.reason)


async def _read(request: web.Request, limit_bytes: int) -> bytes:
    try:
        if (request.content_length or 0) <= limit_bytes:
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        pass  # it did not say how long it is
    raise TooLargeError(f"the body is larger than {limit_bytes} bytes")
