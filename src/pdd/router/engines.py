"""HTTP client of one vLLM engine: render, generate whole or streaming, models, health.

It translates every transport and HTTP error into the error tree and knows nothing of pipelines.

Source:
    vllm/entrypoints/scale_out/{render,token_in_token_out}@0.32.0 for the endpoints and bodies.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from pdd.core.errors import ConnectError, ConnectionLostError, DeadlineError, EngineError, RemoteProtocolError
from pdd.router.request.events import Token
from pdd.router.sse import EventParser

CONNECT_TIMEOUT_S = 3.0
"""A handshake across the WAN takes 0.1 s; what takes longer than this is down."""
POOL_IDLE_S = 3.0
"""uvicorn closes idle connections after 5 s; ours must be gone before."""


class WireTopLogprob(msgspec.Struct):
    """One candidate token at a position."""

    token_id: int
    logprob: float
    rank: int | None = None


class WireLogprob(msgspec.Struct):
    """The sampled token's entry with its candidates."""

    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list[WireTopLogprob] = []


class WireLogprobs(msgspec.Struct):
    """Entries of one chunk, one per token."""

    content: list[WireLogprob] | None = None


class WireChoice(msgspec.Struct):
    """The part of a choice the router reads."""

    token_ids: list[int] | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateChunk:
    """What one event of a generate stream said."""

    tokens: tuple[Token, ...]
    finish: str | None
    stop_reason: int | str | None
    usage: WireUsage | None
    prompt_logprobs: list[Any] | None = None


_decoder = msgspec.json.Decoder(WireChunk)


class EngineClient:
    """One engine's API; close it with ``close``.

    Args:
        engine_id: For error messages.
        url: Base URL.
        idle_timeout_s: Longest silence of an answer in progress.
        api_key: Sent as bearer token if the engines want one.
    """

    def __init__(
        self, *, engine_id: str, url: str, idle_timeout_s: float, api_key: str | None = None
    ) -> None:
        self.engine_id = engine_id
        self.url = url.rstrip("/")
        self._idle_timeout_s = idle_timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._pooled = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_IDLE_S),
            timeout=timeout,
            headers=headers,
        )
        self._fresh = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout, headers=headers
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._pooled.close()
        await self._fresh.close()

    async def healthy(self, *, timeout_s: float) -> bool:
        """Whether ``/health`` answers 200 within the time."""
        try:
            async with asyncio.timeout(timeout_s), self._fresh.get(f"{self.url}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def models(self, *, timeout_s: float) -> list[dict[str, Any]]:
        """The models the engine serves, as ``/v1/models`` lists them."""
        async with asyncio.timeout(timeout_s), self._request("GET", "/v1/models", None, {}) as answer:
            body = await answer.json()
        return [model for model in body.get("data", []) if isinstance(model, dict)]

    async def render(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        """The engine's rendering of a client's request: token IDs and sampling parameters.

        Raises:
            EngineError: With the engine's status and words, if it refuses the request.
            TransportError: If the engine cannot be reached.
        """
        async with self._timed(), self._request("POST", path, body, headers) as answer:
            return await answer.json()

    async def generate(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> GenerateChunk:
        """The whole answer to a non-streaming generate request.

        Raises:
            EngineError: If the engine refuses or fails.
            TransportError: If the engine cannot be reached or goes away.
        """
        try:
            async with self._request("POST", "/inference/v1/generate", body, headers) as answer:
                return self._chunk(await answer.read())
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLostError(f"{self.engine_id} closed the connection: {error}") from error

    async def stream(
        self, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[GenerateChunk, None]:
        """The events of a streaming generate request; closing the iterator aborts it in the engine.

        Raises:
            EngineError: If the engine refuses or reports an error in the stream.
            ConnectionLostError: If the stream ends without ``[DONE]``.
            DeadlineError: If nothing arrives for too long.
        """
        parser = EventParser()
        async with self._request("POST", "/inference/v1/generate", body, headers) as answer:
            while True:
                for payload in parser.feed(await self._read(answer)):
                    if payload == b"[DONE]":
                        return
                    yield self._chunk(payload)

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                data = await answer.content.readany()
        except TimeoutError:
            raise DeadlineError(f"{self.engine_id} said nothing for {self._idle_timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLostError(f"{self.engine_id} closed the stream: {error}") from error
        if not data:
            raise ConnectionLostError(f"{self.engine_id} ended the stream without [DONE]")
        return data

    def _chunk(self, payload: bytes) -> GenerateChunk:
        try:
            chunk = _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(
                f"{self.engine_id} sent an event that is not of the schema: {error}"
            ) from error
        if chunk.error is not None:
            raise _engine_error(500, chunk.error)
        if not chunk.choices:
            return GenerateChunk(tokens=(), finish=None, stop_reason=None, usage=chunk.usage)
        choice = chunk.choices[0]
        ids = choice.token_ids or []
        content = choice.logprobs.content if choice.logprobs else None
        entries: Sequence[WireLogprob | None] = content or [None] * len(ids)
        return GenerateChunk(
            tokens=tuple(Token(id=i, logprobs=e) for i, e in zip(ids, entries, strict=False)),
            finish=choice.finish_reason,
            stop_reason=choice.stop_reason,
            usage=chunk.usage,
            prompt_logprobs=chunk.prompt_logprobs,
        )

    @asynccontextmanager
    async def _timed(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                yield
        except TimeoutError:
            raise DeadlineError(
                f"{self.engine_id} did not answer within {self._idle_timeout_s:g} s"
            ) from None

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200; anything else is raised in the error tree."""
        answer = await self._send(method, path, body, headers)
        try:
            if answer.status != 200:
                raise await self._refusal(answer)
            yield answer
        finally:
            # An unread rest means that we abort: the connection is closed, not returned to the pool.
            if not answer.content.at_eof():
                answer.close()
            answer.release()

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        data = None if body is None else msgspec.json.encode(body)
        sent = {**headers, "Content-Type": "application/json"}
        try:
            try:
                return await self._pooled.request(method, self.url + path, data=data, headers=sent)
            except (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError):
                # Most likely a pooled connection the engine had just closed; not a byte of an answer came.
                return await self._fresh.request(method, self.url + path, data=data, headers=sent)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ConnectError(f"{self.engine_id} does not answer at {self.url}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLostError(f"{self.engine_id} closed the connection: {error}") from error

    async def _refusal(self, answer: aiohttp.ClientResponse) -> EngineError:
        try:
            text = await answer.text()
            body = json.loads(text)
        except (ValueError, aiohttp.ClientError, OSError):
            return EngineError(answer.status, f"{self.engine_id} answered {answer.status} {answer.reason}")
        error = body.get("error", body) if isinstance(body, dict) else {}
        return _engine_error(answer.status, error if isinstance(error, dict) else {"message": str(error)})


def _engine_error(status: int, error: Mapping[str, Any]) -> EngineError:
    code = error.get("code")
    param = error.get("param")
    return EngineError(
        code if isinstance(code, int) and 400 <= code <= 599 else status,
        str(error.get("message") or f"the engine failed with status {status}"),
        kind=str(error.get("type") or ""),
        param=param if isinstance(param, str) else None,
    )
