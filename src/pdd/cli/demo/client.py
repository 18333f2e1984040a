"""An OpenAI client, as small as the demo needs it: streams one answer, and asks for the router's record."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from pdd.cli.demo.script import Message
from pdd.core.errors import EngineError

RECORD_TRIES = 20
RECORD_PAUSE_S = 0.25
"""The record of a request is complete a moment after its last byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer as it arrived. ``error`` is None if and only if it ended as an answer should."""

    text: str
    finish_reason: str | None
    error: str | None


class DemoClient:
    """Talks to one OpenAI endpoint.

    Args:
        session: Carries the requests.
        url: Of the endpoint, without ``/v1``.
        model: Name of the model.
    """

    def __init__(self, session: aiohttp.ClientSession, *, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def chat(
        self,
        messages: list[Message],
        *,
        max_tokens: int,
        request_id: str,
        on_text: Callable[[str], None] = lambda _: None,
    ) -> Answer:
        """The greedy answer to the messages; ``on_text`` has got each piece of it as it came."""
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        text, finish_reason = "", None
        try:
            async for chunk in self._events(body, request_id):
                for choice in chunk.get("choices", ()):
                    piece = choice.get("delta", {}).get("content") or ""
                    text += piece
                    on_text(piece)
                    finish_reason = choice.get("finish_reason") or finish_reason
        except (aiohttp.ClientError, EngineError, TimeoutError) as error:
            return Answer(text=text, finish_reason=finish_reason, error=str(error) or type(error).__name__)
        problem = None if finish_reason else "the stream ended without a finish_reason"
        return Answer(text=text, finish_reason=finish_reason, error=problem)

    async def record(self, request_id: str) -> dict[str, Any]:
        """What the router wrote down about a request; empty if it knows none."""
        record: dict[str, Any] = {}
        for _ in range(RECORD_TRIES):
            async with self._session.get(f"{self._url}/pdd/requests/{request_id}") as response:
                record = await response.json() if response.status == 200 else {}
            if record.get("outcome") is not None:
                break
            await asyncio.sleep(RECORD_PAUSE_S)
        return record

    async def _events(self, body: dict[str, Any], request_id: str) -> AsyncIterator[dict[str, Any]]:
        """The JSON of each server-sent event up to ``[DONE]``.

        Raises:
            EngineError: If the endpoint answers with an error, before or within the stream.
        """
        headers = {"X-Request-Id": request_id}
        async with self._session.post(
            f"{self._url}/v1/chat/completions", json=body, headers=headers
        ) as response:
            if response.status != 200:
                raise EngineError(response.status, f"HTTP {response.status}: {await response.text()}")
            async for raw in response.content:
                line = raw.decode().strip()
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                chunk: dict[str, Any] = json.loads(data)
                if "error" in chunk:
                    raise EngineError(500, str(chunk["error"].get("message", chunk["error"])))
                yield chunk
        raise EngineError(500, "the stream ended without [DONE]")
