"""Answers whose parse process fails, with a stand-in for the parsers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.bed import Bed, running_bed

from pdd.core.errors import ConfigurationError
from pdd.parse.main import refuse_to_share
from pdd.parse.service import ParseConnection

TOOLS = [{"type": "function", "function": {"name": "f"}}]


class Echo:
    """An answer that says what it hears, until it hears ``stumble_at`` pieces; a whole one, ``says``."""

    reasoning_tokens = 0

    def __init__(self, parsers: "Parsers") -> None:
        self._parsers = parsers
        self._left = parsers.stumble_at

    def feed(self, text: str, ids: list[int], *, finished: bool) -> dict[str, object] | None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise ValueError("stumbled")
        return {"content": text}

    def whole(self, text: str, ids: list[int]) -> dict[str, object]:
        said = dict(self.feed(text, ids, finished=True) or {})
        return said | ({"content": self._parsers.says} if self._parsers.says is not None else {})


class Mute(ParseConnection):
    """A process that hangs."""

    def data_received(self, data: bytes) -> None:
        pass


class Parsers:
    """Makes answers; knobs may be turned at any time."""

    def __init__(self) -> None:
        self.hangs = False
        self.stumble_at: int | None = None
        self.says: object = None
        self.connections: list[ParseConnection] = []

    def open(self, request: dict[str, object], prompt_ids: list[int]) -> Echo:
        if self.stumble_at == -1:
            raise ValueError("no such request")
        return Echo(self)

    def connect(self) -> ParseConnection:
        self.connections.append(Mute(self) if self.hangs else ParseConnection(self))
        return self.connections[-1]

    def cut(self) -> None:
        for connection in self.connections:
            if (transport := getattr(connection, "_transport", None)) is not None:  # else not made yet
                transport.abort()


@contextlib.asynccontextmanager
async def echoing_bed(folder: Path, **sections: Any) -> AsyncIterator[tuple[Bed, Parsers]]:
    parsers = Parsers()
    server = await asyncio.get_running_loop().create_unix_server(
        parsers.connect, str(folder / "parser-8000.sock")
    )
    given: dict[str, Any] = {"run_dir": str(folder), "parsers": {"tool_call_parser": "x"}, **sections}
    async with server, running_bed(**given) as bed:
        yield bed, parsers
        parsers.cut()


async def ask(
    bed: Bed, *, stream: bool = True, headers: dict[str, str] | None = None
) -> tuple[int, list[Any]]:
    """The status and the events, or the one body."""
    fields = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 40}
    answer = await bed.post("/v1/chat/completions", headers=headers, stream=stream, **fields)
    if not stream or answer.status != 200:
        return answer.status, [await answer.json()]
    lines = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: ")]
    return 200, [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_pieces_come_back_in_order(tmp_path: Path) -> None:
    async with echoing_bed(tmp_path) as (bed, _):
        status, events = await ask(bed)
        assert (status, events[-1]) == (200, "[DONE]")
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events[:-1])
        assert text == bed.reference("hi", 40)
        assert (await ask(bed, stream=False))[1][0]["choices"][0]["message"]["content"] == text


async def test_what_cannot_be_parsed_ends_in_an_error_and_frees_the_engines(tmp_path: Path) -> None:
    async with echoing_bed(tmp_path) as (bed, parsers):
        for parsers.stumble_at in (-1, 0, 5):
            _, events = await ask(bed)
            assert "cannot be parsed: ValueError" in events[-1]["error"]["message"]
            await bed.until_free()
        status, events = await ask(bed, stream=False)
        assert status == 200  # its text is parsed in one piece
        parsers.stumble_at = -1
        assert (await ask(bed, stream=False))[0] == 500


async def test_a_number_that_no_message_can_hold_is_the_clients_error(tmp_path: Path) -> None:
    async with echoing_bed(tmp_path) as (bed, _):
        parameters = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 10**20}}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        answer = await bed.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], tools=tools, max_tokens=5
        )
        error = (await answer.json())["error"]
        assert (answer.status, error["type"]) == (400, "BadRequestError")
        assert error["param"] == "tools[0].function.parameters.properties.x.maximum"


async def test_what_a_parser_says_that_no_message_can_hold_ends_its_answer_alone(tmp_path: Path) -> None:
    async with echoing_bed(tmp_path) as (bed, parsers):
        bed.md0.itl_s = bed.rld0.itl_s = 0.01
        running = asyncio.create_task(ask(bed))
        await bed.until(lambda: bed.md0.tokens_streamed + bed.rld0.tokens_streamed > 3)
        parsers.says = 2**70
        status, (body,) = await ask(bed, stream=False)
        parsers.says = None
        assert status == 500
        assert "cannot be parsed: OverflowError" in body["error"]["message"]
        assert (await running)[1][-1] == "[DONE]"


async def test_a_lost_process_ends_its_answers_and_serves_the_next_ones(tmp_path: Path) -> None:
    async with echoing_bed(tmp_path) as (bed, parsers):
        bed.md0.itl_s = bed.rld0.itl_s = 0.02
        running = asyncio.create_task(ask(bed))
        await bed.until(lambda: bed.md0.tokens_streamed + bed.rld0.tokens_streamed > 3)
        parsers.cut()
        _, events = await running
        assert "the parsers were lost" in events[-1]["error"]["message"]
        await bed.until_free()
        assert (await ask(bed))[1][-1] == "[DONE]"


async def test_a_process_that_hangs_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    async with echoing_bed(tmp_path) as (bed, parsers):
        parsers.hangs = True
        limit = {"X-Request-Timeout": "1"}  # not of the last request, which ends well
        status, (body,) = await ask(bed, stream=False, headers=limit)
        assert (status, body["error"]["message"][:32]) == (504, "the request did not finish in ti")
        _, events = await ask(bed, headers=limit)
        assert "did not finish in time" in events[-1]["error"]["message"]
        await bed.until_free()
        parsers.hangs = False
        parsers.cut()
        assert (await ask(bed))[1][-1] == "[DONE]"


async def test_ready_says_that_the_parse_process_is_missing(tmp_path: Path) -> None:
    async def ready(bed: Bed) -> tuple[int, list[str]]:
        async with bed.client.get(f"{bed.url}/ready") as answer:
            return answer.status, (await answer.json())["missing"]

    async with echoing_bed(tmp_path) as (bed, _):
        assert await ready(bed) == (200, [])
    async with running_bed(run_dir=str(tmp_path), parsers={"tool_call_parser": "x"}) as bed:
        (tmp_path / "parser-8000.sock").unlink(missing_ok=True)
        status, missing = await ready(bed)
        why = f"the parsers are not ready at {tmp_path}/parser-8000.sock: No such file or directory"
        assert (status, missing) == (503, [why])


async def test_a_socket_that_others_listen_at_is_not_taken_from_them(tmp_path: Path) -> None:
    path = tmp_path / "parser-8000.sock"
    refuse_to_share(path)
    async with echoing_bed(tmp_path):
        with pytest.raises(ConfigurationError, match=r"parser-8000.sock is in use: .* router.port each"):
            await asyncio.to_thread(refuse_to_share, path)
    refuse_to_share(path)  # what is left of it


async def test_what_is_refused_before_it_runs_leaves_no_record_that_never_ends(tmp_path: Path) -> None:
    async with running_bed(run_dir=str(tmp_path), parsers={"tool_call_parser": "x"}) as bed:
        status, (body,) = await ask(bed, stream=False)
        assert (status, body["error"]["message"][:25]) == (503, "the parsers are not ready")
        answer = await bed.post("/v1/completions", prompt=["short", "long " * 1200], max_tokens=5)
        assert answer.status == 400
        assert bed.router.records.all() == []
