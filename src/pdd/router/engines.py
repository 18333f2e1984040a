"""HTTP client of one vLLM engine: render, generate whole or streaming, models, health.

It translates every transport and HTTP error into the error tree and knows nothing of pipelines.

Source:
    vllm/entrypoints/scale_out/{render,token_in_token_out}@0.32.0 for the endpoints and bodies.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec

from pdd.core.errors import (
    ConnectError,
    ConnectionLostError,
    DeadlineError,
    EngineError,
    PddError,
    RemoteProtocolError,
    TransportError,
)
from pdd.router.http_client import HttpClient
from pdd.router.http_connection import Connection, Gate
from pdd.router.request.events import Token, TokenId
from pdd.router.sse import EventParser, TokenEvents


class WireTopLogprob(msgspec.Struct):
    """One candidate token at a position."""

    token_id: TokenId
    logprob: float
    rank: int | None = None


class WireLogprob(msgspec.Struct):
    """The sampled token's entry with its candidates."""

    token_id: TokenId
    logprob: float
    rank: int | None = None
    top_logprobs: list[WireTopLogprob] = []


class WireLogprobs(msgspec.Struct):
    """Entries of one chunk, one per token."""

    content: list[WireLogprob] | None = None


class WireChoice(msgspec.Struct):
    """The part of a choice the router reads."""

    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: WireLogprobs | None = None


class WirePromptDetails(msgspec.Struct):
    """Where prompt tokens came from."""

    cached_tokens: int | None = None


class WireUsage(msgspec.Struct):
    """Token counts of one engine request."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: WirePromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens whose KV was found; None if the engine does not say."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class WireChunk(msgspec.Struct):
    """One event of a generate stream, or a whole answer."""

    choices: list[WireChoice] = []
    usage: WireUsage | None = None
    prompt_logprobs: list[Any] | None = None
    error: dict[str, Any] | None = None


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True):
    """What one event of a generate stream said; one per token, and a dataclass takes four times as long."""

    tokens: tuple[Token, ...]
    finish: str | None
    stop_reason: int | str | None = None
    usage: WireUsage | None = None
    prompt_logprobs: list[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnd:
    """A stream whose events differ in nothing but token IDs, and what is around those."""

    connection: Connection
    around: tuple[bytes, bytes]


_decode = msgspec.json.Decoder(WireChunk).decode
_encode = msgspec.json.encode
_KNOWN_STATUS = frozenset(HTTPStatus)
_OF_CONNECTION = (ConnectError, ConnectionLostError, DeadlineError)
GENERATE = "/inference/v1/generate"
STEADY_EVENTS = 4
"""So many events alike in a row let more be expected; to lend a stream costs as much as some of them."""


class EngineClient:
    """One engine's API; close it with ``close``.

    Args:
        engine_id: For error messages.
        url: Base URL.
        idle_timeout_s: Longest silence of an answer in progress.
        connect_timeout_s: An engine that takes no connection within this is down.
        api_key: Sent as bearer token if the engines want one.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        url: str,
        idle_timeout_s: float,
        connect_timeout_s: float,
        api_key: str | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.url = url.rstrip("/")
        self._idle_timeout_s = idle_timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = HttpClient(self.url, headers, connect_timeout_s=connect_timeout_s)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def healthy(self, *, timeout_s: float) -> bool:
        """Whether ``/health`` answers 200 within the time, over a connection of its own."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.exchange("GET", "/health", pooled=False) as answer,
            ):
                return answer.status == 200
        except (PddError, TimeoutError):
            return False

    async def models(self, *, timeout_s: float) -> list[dict[str, Any]]:
        """The models the engine serves, as ``/v1/models`` lists them."""
        async with asyncio.timeout(timeout_s):
            body = _json_object(await self._whole("GET", "/v1/models"))
        return [model for model in body.get("data", []) if isinstance(model, dict)]

    async def render(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], *, timeout_s: float
    ) -> Any:
        """The engine's rendering of a client's request: token IDs and sampling parameters.

        Raises:
            EngineError: With the engine's status and words, if it refuses the request.
            TransportError: If the engine cannot be reached, or does not answer in this time or its own.
        """
        timeout_s = min(timeout_s, self._idle_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return _json(await self._whole("POST", path, body, headers))
        except TimeoutError:
            raise DeadlineError(f"{self.engine_id} did not answer within {timeout_s:g} s") from None

    async def generate(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> GenerateChunk:
        """The whole answer to a non-streaming generate request.

        Raises:
            EngineError: If the engine refuses or fails.
            TransportError: If the engine cannot be reached or goes away.
        """
        return _said(self._decoded(await self._whole("POST", GENERATE, body, headers)))

    async def stream(
        self,
        body: Callable[[], Mapping[str, Any]],
        headers: Mapping[str, str],
        on_chunk: Callable[[GenerateChunk], None],
        *,
        on_ids: Callable[[list[int]], bool],
        on_steady: Callable[[EngineEnd], None],
        gate: Gate,
    ) -> None:
        """Every event of a streaming generate request was given to ``on_chunk`` as it came, up to ``[DONE]``.

        Cancelling aborts the request in the engine.

        Args:
            body: Makes the request when it is sent; it is as long as the prompt, and the stream outlives it.
            headers: Sent with it.
            on_chunk: Called straight from the event loop, once per event; what it raises ends the stream.
            on_ids: Offered the IDs of an event that holds nothing else, which is nearly every one; if it says
                false, the event goes to ``on_chunk``.
            on_steady: Told after so many events in a row that differed in nothing but IDs, again and again.
            gate: Holds the engine's answer back while it is closed.

        Raises:
            EngineError: If the engine refuses or reports an error in the stream.
            ConnectionLostError: If the stream ends without ``[DONE]``.
            DeadlineError: If nothing arrives for too long.
        """
        parser, tokens = EventParser(), TokenEvents()
        connection: Connection | None = None
        steady_events = 0

        def on_bytes(data: bytes) -> bool:
            nonlocal steady_events
            if parser.between_events and (ids := tokens.read(data)) and on_ids(ids):
                steady_events += 1
            else:
                for payload in parser.feed(data):
                    if payload == b"[DONE]":
                        return True
                    steady_events = steady_events + 1 if take(payload) else 0
            if steady_events >= STEADY_EVENTS and tokens.known and connection is not None:
                steady_events = 0
                on_steady(EngineEnd(connection=connection, around=tokens.around))
            return False

        def take(payload: bytes) -> bool:
            chunk = self._decoded(payload)
            if (only := _only_ids(chunk)) is not None:
                tokens.learn(payload)
                if on_ids(only):
                    return True
            on_chunk(_said(chunk))
            return False

        with self._named():
            async with self._http.exchange(
                "POST", GENERATE, body=lambda: _encode(body()), headers=headers, on_bytes=on_bytes
            ) as answer:
                if answer.status != 200:
                    await answer.end(idle_timeout_s=self._idle_timeout_s)
                    raise self._refusal(answer)
                connection = answer
                gate.add(answer)
                try:
                    await answer.end(idle_timeout_s=self._idle_timeout_s)
                finally:
                    gate.discard(answer)
                    connection = None  # it knows ``on_bytes``: a cycle
                if not answer.satisfied:
                    raise ConnectionLostError("the stream ended without [DONE]")

    def _decoded(self, payload: bytes) -> WireChunk:
        try:
            return _decode(payload)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(
                f"{self.engine_id} sent an event that is not of the schema: {error}"
            ) from error

    async def _whole(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The body of an answer with status 200; anything else is raised in the error tree."""
        sent = bytes if body is None else partial(_encode, body)
        try:
            answer = await self._http.begin(method, path, body=sent, headers=headers)
            try:
                await answer.end()
            finally:
                answer.release()
        except _OF_CONNECTION as error:
            raise self._named_error(error) from error
        if answer.status != 200:
            raise self._refusal(answer)
        return answer.body

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the connection say which engine it was."""
        try:
            yield
        except _OF_CONNECTION as error:
            raise self._named_error(error) from error

    def _named_error(self, error: TransportError) -> TransportError:
        if isinstance(error, ConnectError):
            return ConnectError(f"{self.engine_id} does not answer at {self.url}: {error}")
        return type(error)(f"{self.engine_id}: {error}")

    def _refusal(self, answer: Connection) -> EngineError:
        try:
            body = msgspec.json.decode(answer.body)
        except msgspec.DecodeError:
            phrase = HTTPStatus(answer.status).phrase if answer.status in _KNOWN_STATUS else ""
            return EngineError(answer.status, f"{self.engine_id} answered {answer.status} {phrase}".rstrip())
        error = body.get("error", body) if isinstance(body, dict) else {}
        return _engine_error(answer.status, error if isinstance(error, dict) else {"message": str(error)})


def _only_ids(chunk: WireChunk) -> list[int] | None:
    """The token IDs of an event in the middle of an answer that holds nothing else; None if it is another."""
    if len(chunk.choices) != 1 or chunk.usage is not None or chunk.error is not None:
        return None
    choice = chunk.choices[0]
    return choice.token_ids if choice.finish_reason is None and choice.logprobs is None else None


def _said(chunk: WireChunk) -> GenerateChunk:
    """What an event says.

    Raises:
        EngineError: If that is an error.
    """
    if chunk.error is not None:
        raise _engine_error(500, chunk.error)
    if not chunk.choices:
        return GenerateChunk(tokens=(), finish=None, usage=chunk.usage)
    choice = chunk.choices[0]
    ids = choice.token_ids or []
    content = choice.logprobs.content if choice.logprobs else None
    entries: Sequence[WireLogprob | None] = content or [None] * len(ids)
    return GenerateChunk(
        tokens=tuple([Token(id=i, logprobs=e) for i, e in zip(ids, entries, strict=False)]),
        finish=choice.finish_reason,
        stop_reason=choice.stop_reason,
        usage=chunk.usage,
        prompt_logprobs=chunk.prompt_logprobs,
    )


def _json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"an engine's answer is not JSON: {error}") from error


def _json_object(data: bytes) -> dict[str, Any]:
    body = _json(data)
    return body if isinstance(body, dict) else {}


def _engine_error(status: int, error: Mapping[str, Any]) -> EngineError:
    code = error.get("code")
    param = error.get("param")
    return EngineError(
        code if isinstance(code, int) and 400 <= code <= 599 else status,
        str(error.get("message") or f"the engine failed with status {status}"),
        kind=str(error.get("type") or ""),
        param=param if isinstance(param, str) else None,
    )
