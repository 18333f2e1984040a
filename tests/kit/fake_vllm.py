"""A fake vLLM engine: its HTTP API, a deterministic model, delays and failures on demand."""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from tests.kit.fake_events import CLEARED, FakePublisher, removed, stored
from tests.kit.fake_model import FakeModel

from pdd.core.block_hash import BlockHasher

DEFAULT_MAX_MODEL_LEN = 4096
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_KNOWN_PARAMS = frozenset(
    [
        "n",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "prompt_logprobs",
        "bad_words",
        "logit_bias",
        "include_stop_str_in_output",
        "skip_special_tokens",
    ]
)


class FakeEngine:
    """One engine; knobs may be turned at any time.

    ``aborted`` and ``finished`` hold request ids, ``seen`` every generate body, ``headers`` their headers.
    ``kill_stream_after`` and its siblings strike the next streams after so many tokens of that stream; while
    ``flows`` is clear, every stream stands still before its next token.
    """

    def __init__(
        self,
        engine_id: str,
        *,
        model: FakeModel,
        chunk_tokens: int,
        model_name: str = "fake",
        max_model_len: int = DEFAULT_MAX_MODEL_LEN,
    ) -> None:
        self.id = engine_id
        self.model = model
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.chunk_tokens = chunk_tokens
        self.cached_chunks: set[int] = set()
        self.events: FakePublisher | None = None
        self.hasher = BlockHasher(algo="sha256_cbor", seed="0", block_tokens=chunk_tokens)
        self.on_transfer: Callable[[dict[str, Any], list[int]], None] | None = None
        self.prefill_s = 0.0
        self.itl_s = 0.002
        self.first_token_delay_s = 0.0
        self.reply_status: int | None = None
        self.api_key: str | None = None
        self.num_refused = 0
        self.computed_tokens = 0
        self.kv_usage_ratio = 0.0
        self.kill_stream_after: int | None = None
        self.stall_stream_after: int | None = None
        self.garble_stream_after: int | None = None
        self.garbage = b'{"choices": [{"token_ids": "no'
        self.abort_stream_after: int | None = None
        self.drop_whole = 0
        self.drop_renders = 0
        self.split_events = False
        self.tokens_per_event = 1
        self.flows = asyncio.Event()
        self.flows.set()
        self.tokens_streamed = 0
        self.running: set[str] = set()
        self.seen: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.port = 0
        self._runner: web.AppRunner | None = None

    # ---- life

    async def start(self) -> None:
        """Serve; on the same port as before if it was up already."""
        app = web.Application(client_max_size=64 * 2**20, middlewares=[self._authenticate])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post("/v1/chat/completions/render", self._render_chat),
                web.post("/v1/completions/render", self._render_completion),
                web.post("/inference/v1/generate", self._generate),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Be gone at once, as after kill -9: open connections are cut."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        cut_connections(runner)
        await runner.cleanup()
        self.running.clear()

    @property
    def is_down(self) -> bool:
        """Whether nobody answers at the port."""
        return self._runner is None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every page wants the key, as behind a proxy; vLLM itself leaves its probes open."""
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            self.num_refused += 1
            return _error(401, "Unauthorized", kind="AuthenticationError")
        return await handler(request)

    # ---- pages

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=f'vllm:kv_cache_usage_perc{{engine="0"}} {self.kv_usage_ratio}\n')

    async def _models(self, _request: web.Request) -> web.Response:
        card = {"id": self.model_name, "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _render_chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.drop_renders:
            self.drop_renders -= 1
            _cut(request)
        for message in body["messages"]:
            message["content"] = _joined(message.get("content"))
            if not isinstance(message.get("content"), str) or not isinstance(message.get("role"), str):
                return _error(400, "1 validation error: messages", param="messages")
        prompt = self.model.chat_prompt(body["messages"])
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        body["logprobs"] = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
        rendered = self._rendered(body, prompt, asked, "chatcmpl")
        return rendered if isinstance(rendered, web.Response) else web.json_response(rendered)

    async def _render_completion(self, request: web.Request) -> web.Response:
        body = await request.json()
        given = body["prompt"]
        many = isinstance(given, list) and given and isinstance(given[0], list | str)
        out = []
        for prompt in given if many else [given]:
            ids = self.model.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
            rendered = self._rendered(body, ids, body.get("max_tokens") or 16, "cmpl")
            if isinstance(rendered, web.Response):
                return rendered
            out.append(rendered)
        return web.json_response(out)

    def _rendered(
        self, body: dict[str, Any], prompt: list[int], asked: int | None, prefix: str
    ) -> dict[str, Any] | web.Response:
        temperature = body.get("temperature")
        if temperature is not None and not isinstance(temperature, int | float):
            return _error(400, "temperature: Input should be a valid number", param="temperature")
        if len(prompt) + (asked or 1) > self.max_model_len:
            return _error(400, f"This model's maximum context length is {self.max_model_len} tokens.")
        if body.get("stream") and body.get("prompt_logprobs"):
            return _error(400, "`prompt_logprobs` are not available when `stream=True`.")
        if asked is not None and (body.get("min_tokens") or 0) > asked:
            return _error(400, "min_tokens must be less than or equal to max_tokens", param="min_tokens")
        params = {k: v for k, v in body.items() if k in _KNOWN_PARAMS and v not in (None, [])}
        params["max_tokens"] = min(asked or self.max_model_len, self.max_model_len - len(prompt))
        if params["max_tokens"] == 16:
            del params["max_tokens"]  # vLLM leaves out defaults
        if body.get("response_format"):
            params["structured_outputs"] = {"json_object": True, "_backend": None}
        return {
            "request_id": f"{prefix}-{uuid.uuid4().hex}",
            "token_ids": prompt,
            "sampling_params": params,
            "model": body.get("model"),
            "stream": bool(body.get("stream")),
            "cache_salt": body.get("cache_salt"),
            "priority": body.get("priority") or 0,
            "features": None,
        }

    # ---- generate

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        request_id = f"generate-tokens-{request.headers.get('X-Request-Id')}-{uuid.uuid4().hex[:8]}"
        params = body["sampling_params"]
        if params.get("min_tokens", 0) > params.get("max_tokens", 16):
            return _error(400, "min_tokens must be less than or equal to max_tokens", param="min_tokens")
        self.seen.append(body)
        self.headers.append(request.headers.copy())
        if self.reply_status is not None:
            return _error(self.reply_status, "the engine refuses", kind="InternalServerError")
        self.running.add(request_id)
        try:
            answer = await (self._stream if body.get("stream") else self._whole)(request, body, request_id)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted.append(request_id)
            raise
        finally:
            self.running.discard(request_id)
        self.finished.append(request_id)
        return answer

    async def _whole(self, request: web.Request, body: dict[str, Any], request_id: str) -> web.StreamResponse:
        cached = self._cached(body["token_ids"])
        order = (body.get("kv_transfer_params") or {}).get("pdd")
        if order is not None and self.on_transfer is not None:
            self.on_transfer(order, body["token_ids"])
        if self.drop_whole:
            self.drop_whole -= 1
            _cut(request)
        self.computed_tokens += len(body["token_ids"]) - cached
        await asyncio.sleep(self.prefill_s)
        tokens, finish = self._tokens(body, [])
        while finish is None:
            more, finish = self._tokens(body, tokens)
            tokens += more
        await self._remember(body["token_ids"], body.get("cache_salt"))
        choice = {"index": 0, "finish_reason": finish, "stop_reason": None, "token_ids": tokens}
        choice["logprobs"] = self._logprobs(body, tokens)
        usage = self._usage(body, len(tokens), cached)
        wanted = body["sampling_params"].get("prompt_logprobs") is not None
        answer = {"request_id": request_id, "choices": [choice], "usage": usage}
        return web.json_response({**answer, "prompt_logprobs": [None] if wanted else None})

    async def _stream(
        self, request: web.Request, body: dict[str, Any], request_id: str
    ) -> web.StreamResponse:
        cached = self._cached(body["token_ids"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(self.first_token_delay_s)
        tokens: list[int] = []
        finish: str | None = None
        while finish is None:
            await self.flows.wait()
            await self._strike(request, response, len(tokens))
            new, finish = self._tokens(body, tokens)
            while finish is None and len(new) < self.tokens_per_event:
                more, finish = self._tokens(body, tokens + new)
                new += more
            tokens += new
            self.tokens_streamed += len(new)
            if self.abort_stream_after is not None and len(tokens) > self.abort_stream_after:
                finish = "abort"
            choice = {"index": 0, "finish_reason": finish, "token_ids": new, "stop_reason": None}
            choice["logprobs"] = self._logprobs(body, new)
            await self._send(response, {"request_id": request_id, "choices": [choice], "usage": None})
            await asyncio.sleep(self.itl_s)
        await self._remember(body["token_ids"] + tokens, body.get("cache_salt"))
        if (body.get("stream_options") or {}).get("include_usage"):
            await self._send(response, {"choices": [], "usage": self._usage(body, len(tokens), cached)})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, payload: dict[str, Any]) -> None:
        data = f"data: {json.dumps(payload, separators=(',', ':'))}\n\n".encode()  # as vLLM writes it
        step = 7 if self.split_events else len(data)
        for start in range(0, len(data), step):  # split: one event in many TCP segments
            await response.write(data[start : start + step])

    async def _strike(self, request: web.Request, response: web.StreamResponse, num_tokens: int) -> None:
        if self.kill_stream_after is not None and num_tokens >= self.kill_stream_after:
            _cut(request)
        if self.stall_stream_after is not None and num_tokens >= self.stall_stream_after:
            await asyncio.sleep(3600)
        if self.garble_stream_after is not None and num_tokens >= self.garble_stream_after:
            await response.write(b"data: " + self.garbage + b"\n\n")

    def _tokens(self, body: dict[str, Any], before: list[int]) -> tuple[list[int], str | None]:
        params = body["sampling_params"]
        history = body["token_ids"] + before
        may_end = len(before) >= params.get("min_tokens", 0)
        token = self.model.next_token(history, may_end=may_end and not params.get("ignore_eos"))
        if may_end and token in (self.model.eos, *params.get("stop_token_ids", [])):
            return [token], "stop"
        return [token], "length" if len(before) + 1 >= params.get("max_tokens", 16) else None

    def _logprobs(self, body: dict[str, Any], tokens: list[int]) -> dict[str, Any] | None:
        num = body["sampling_params"].get("logprobs")
        if num is None:
            return None
        content = []
        for token in tokens:
            ranks = range(max(num, 1))
            top = [{"token_id": (token + i) % 256, "logprob": -0.5 - i, "rank": i + 1} for i in ranks]
            content.append({"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": top})
        return {"content": content}

    # ---- cache

    def _chunks(self, tokens: list[int]) -> list[int]:
        """The identity of each full chunk, chained over all before it."""
        keys: list[int] = []
        for start in range(0, len(tokens) - self.chunk_tokens + 1, self.chunk_tokens):
            previous = keys[-1] if keys else 0
            keys.append(hash((previous, tuple(tokens[start : start + self.chunk_tokens]))))
        return keys

    def _cached(self, prompt: list[int]) -> int:
        hits = 0
        for key in self._chunks(prompt):
            if key not in self.cached_chunks:
                break
            hits += 1
        # As in vLLM, the last token of a prompt is always computed.
        most = (len(prompt) - 1) // self.chunk_tokens
        return min(hits, most) * self.chunk_tokens

    def missing(self, tokens: list[int]) -> list[int]:
        """Chunks of the tokens that are not here."""
        return [chunk for chunk in self._chunks(tokens) if chunk not in self.cached_chunks]

    def receive(self, tokens: list[int]) -> None:
        """KV of the tokens has landed."""
        self.cached_chunks.update(self._chunks(tokens))

    async def evict(self, tokens: list[int], *, first: int = 0) -> None:
        """The chunks of the tokens from one on have left device and store."""
        self.cached_chunks.difference_update(self._chunks(tokens)[first:])
        if self.events is not None:
            await self.events.publish(removed(tokens, self.hasher, first=first))

    async def reset(self) -> None:
        """The device cache is empty, and so is the store."""
        self.cached_chunks.clear()
        if self.events is not None:
            await self.events.publish(CLEARED)

    async def _remember(self, tokens: list[int], salt: str | None) -> None:
        self.cached_chunks.update(self._chunks(tokens))
        if self.events is not None and len(tokens) >= self.chunk_tokens:
            device = stored(tokens, self.hasher, salt=salt)
            await self.events.publish(device, {**device, "medium": "CPU"})

    def _usage(self, body: dict[str, Any], num_tokens: int, cached: int) -> dict[str, Any]:
        prompt = len(body["token_ids"])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": num_tokens,
            "total_tokens": prompt + num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _joined(content: Any) -> Any:
    """The text of a message's content that is a list of text parts; anything else as it is."""
    if not isinstance(content, list) or any(part.get("type") != "text" for part in content):
        return content
    return "".join(part["text"] for part in content)


def cut_connections(runner: web.AppRunner) -> None:
    """Every open connection of the server ends as if its process had been killed."""
    assert runner.server is not None
    for connection in list(runner.server.connections):
        if connection.transport is not None:
            connection.transport.abort()


def _cut(request: web.Request) -> None:
    """End the request's connection as if the process had been killed."""
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError("struck")


def _error(
    status: int, message: str, *, kind: str = "BadRequestError", param: str | None = None
) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return web.json_response(body, status=status)
