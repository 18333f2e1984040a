"""How the end-to-end tests talk to a fleet: to its routers, its engines, its line and one plain engine."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from tokenizers import Tokenizer

from pdd.core.errors import EngineError
from pdd.router.detokenize import Detokenizer, TextOptions

VOCABULARY = range(100, 49_000)
"""Token IDs of the test tokenizer that are ordinary text, clear of the special ones."""


HANDED_OVER_TOKENS = 160
"""An answer so long that MD takes it over on a busy machine, too, before RLD has said all of it."""


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    """``num_tokens`` token IDs that no other seed shares a prefix with."""
    return random.Random(f"{seed}/{num_tokens}").choices(VOCABULARY, k=num_tokens)


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of an answer, token by token; how it comes about with any cuts is tested elsewhere."""
    text = Detokenizer(tokenizer, prompt, TextOptions())
    return "".join([text.more([token]) for token in tokens]) + text.take(finished=True)


@dataclass(kw_only=True)
class Answer:
    """One streamed answer and the router's record of how it was made.

    ``tokens`` is empty if it was asked for without token IDs; ``arrival_times_s`` has its events then.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    arrival_times_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)


class RouterClient:
    """Sends token IDs to one router and collects the answer token by token."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        on_token: Callable[[int], None] | None = None,
        into: Answer | None = None,
        **sampling: Any,
    ) -> Answer:
        """The answer to a greedy completion; ``on_token`` is told the number of tokens, or events, so far.

        What came of an answer that does not end is in ``into``.
        """
        body = {
            "model": "pdd", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, **sampling,
        }  # fmt: skip
        answer = Answer() if into is None else into
        async with self._session.post(f"{self.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise EngineError(response.status, await response.text())
            answer.headers = response.headers
            async for line in response.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    self._take(answer, msgspec.json.decode(line[6:]), on_token)
        request_id = answer.headers["X-Request-Id"]
        async with self._session.get(f"{self.url}/pdd/requests/{request_id}") as response:
            answer.record = await response.json()
        return answer

    def _take(self, answer: Answer, chunk: dict[str, Any], on_token: Callable[[int], None] | None) -> None:
        if "error" in chunk:
            raise EngineError(chunk["error"]["code"], chunk["error"]["message"])
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk["choices"]:
            answer.text += choice["text"]
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason
            tokens = choice.get("token_ids")
            answer.tokens += tokens or ()
            for _ in (None,) if tokens is None else tokens:
                answer.arrival_times_s.append(time.monotonic())
                if on_token is not None:
                    on_token(len(answer.arrival_times_s))

    async def fast_path_tokens(self) -> int:
        """How many tokens the router's fast path gave to clients so far."""
        async with self._session.get(f"{self.url}/metrics") as response:
            [line] = [
                line
                for line in (await response.text()).splitlines()
                if line.startswith("pdd_fast_path_tokens_total ")
            ]
        return int(float(line.split()[1]))


class PlainEngine:
    """One engine without PDD, asked for the same tokens: what every answer is compared with."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def complete(self, prompt: Sequence[int], *, max_tokens: int, **sampling: Any) -> list[int]:
        """The greedy continuation."""
        body = {
            "token_ids": list(prompt),
            "sampling_params": {"max_tokens": max_tokens, "temperature": 0, **sampling},
        }
        async with self._session.post(f"{self._url}/inference/v1/generate", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise EngineError(response.status, str(answer))
        return list(answer["choices"][0]["token_ids"])


class Line:
    """The control port of the emulated line."""

    def __init__(self, session: aiohttp.ClientSession, url: str, kv_forward: str) -> None:
        self._session = session
        self._url = url
        self._kv_forward = kv_forward

    async def hold(self) -> None:
        """No KV byte arrives any more; requests and tokens still pass."""
        await self._post("/hold", {"forward": self._kv_forward})

    async def resume(self) -> None:
        """KV flows again."""
        await self._post("/resume", {"forward": self._kv_forward})

    async def cut(self, forward: str) -> None:
        """Every connection over one forward ends now; new ones are taken."""
        await self._post("/cut", {"forward": forward})

    async def set(self, **changes: str) -> None:
        """Change ``rate`` or ``delay``."""
        await self._post("/set", changes)

    async def _post(self, path: str, body: dict[str, str]) -> None:
        async with self._session.post(self._url + path, json=body) as response:
            response.raise_for_status()


async def wait_until(condition: Callable[[], Any], *, what: str, timeout_s: float = 60.0) -> None:
    """Return once ``await condition()`` is true.

    Raises:
        TimeoutError: Naming ``what``, if it never was.
    """
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what} did not happen within {timeout_s:.0f} s")
        await asyncio.sleep(0.05)
