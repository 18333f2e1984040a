"""Answers by the native fast path are those by the event loop, whatever comes between."""

import asyncio
import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.integration.router.test_streaming import open_slow_client, stream_body
from tests.kit.bed import Bed, running_bed
from tests.kit.scripted import ScriptedModel

from pdd.router.fastpath import library

ROLES = {"p0": ("prefill", "a"), "rld0": ("relay", "a"), "md0": ("main", "b"), "md1": ("main", "c")}
SAID = (
    'She said "no\\yes"\n\t€ and 😀 and é, then <think>you</think> 你好, and so on to the very end of it. '
    * 3
)
CONTENT = "At length, please."
MESSAGES = [{"role": "user", "content": CONTENT}]


ON_UVLOOP = pytest.mark.asyncio(loop_factories=["uvloop"])
"""Where the transports do not matter."""


def total(bed: Bed, name: str) -> float:
    """The sum of a counter of the fast path: ``tokens`` or ``lanes``."""
    if bed.router.services.fast_path is not None:
        bed.router.services.fast_path.refresh()
    counter = getattr(bed.router.metrics, f"fast_path_{name}")
    samples = [sample for metric in counter.collect() for sample in metric.samples]
    return float(sum(sample.value for sample in samples if sample.name.endswith("_total")))


async def stream(bed: Bed, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed chat answer."""
    answer = await bed.post("/v1/chat/completions", messages=MESSAGES, stream=True, **fields)
    assert answer.status == 200, await answer.text()
    return events_of(await answer.text())


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a well-formed stream, without comments; ``[DONE]`` or an error ends it."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks), blocks
    payloads = [block.removeprefix("data: ") for block in blocks]
    events = [json.loads(payload) for payload in payloads if payload != "[DONE]"]
    if payloads[-1] == "[DONE]":
        del payloads[-1]
    else:
        assert "error" in events[-1]
    assert "[DONE]" not in payloads
    return events


def essence(events: list[dict[str, Any]]) -> list[Any]:
    """What does not differ from one answer to the same request to the next."""
    return [{k: v for k, v in event.items() if k not in ("id", "created")} for event in events]


def text_of(events: list[dict[str, Any]]) -> str:
    """The text of a chat answer."""
    choices = [choice for event in events for choice in event.get("choices", [])]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def num_open_files() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def until_lent(bed: Bed, tokens: int = 1) -> None:
    """Wait until the fast path has given so many tokens."""
    await bed.until(lambda: total(bed, "tokens") >= tokens)


# ---- the same answers


@pytest.mark.parametrize("per_event", [1, 3])
@pytest.mark.parametrize("pipeline", ["p-md", "p-rld-md"])
async def test_the_client_gets_what_it_gets_without(pipeline: str, per_event: int) -> None:
    model, got = ScriptedModel(), []
    model.say(MESSAGES, SAID)
    for fast_path in (False, True):
        async with running_bed(model=model, router={"pipeline": pipeline, "fast_path": fast_path}) as bed:
            if pipeline == "p-rld-md":
                bed.agents["p0"].lands_after["md0"] = (bed.rld0, 60)
            for engine in (bed.rld0, bed.md0):
                engine.tokens_per_event = per_event
            events = await stream(bed, stream_options={"include_usage": True}, max_tokens=2000)
            got.append(essence(events))
            assert (total(bed, "tokens") > 30) == fast_path
            record = await bed.last_record()
            assert record["output_tokens"] == len(model.script) + 1
            assert (record["handoff_mode"] is None) == (pipeline == "p-md")
            await bed.until_free()
    assert "".join(str(e["choices"]) for e in got[0][-1:]) == "[]"
    assert got[0][-1]["usage"] == got[1][-1]["usage"]
    if pipeline == "p-md":
        assert got[0] == got[1]
    assert text_of(got[0]) == text_of(got[1]) == SAID


@pytest.mark.parametrize("mode", ["one-shot", "catch-up"])
async def test_kv_that_lands_while_the_relays_lane_runs_is_joined_exactly(mode: str) -> None:
    async with running_bed(router={"pipeline": "p-rld-md", "handoff": mode}) as bed:
        bed.agents["p0"].hold("md0")
        answer = asyncio.create_task(stream(bed, max_tokens=400))
        await until_lent(bed, 20)
        bed.agents["p0"].let_land("md0")
        assert text_of(await answer).rstrip("\ufffd") == bed.reference(CONTENT, 400)
        record = await bed.last_record()
        assert record["handoff_mode"] == mode
        assert record["eager_tokens"] >= 20
        await bed.until_free()


# ---- engines in trouble


@pytest.mark.parametrize("fault", ["kill_stream_after", "garble_stream_after", "abort_stream_after"])
async def test_an_engine_that_fails_in_a_lane_is_replaced_exactly(
    fault: str, request: pytest.FixtureRequest
) -> None:
    async with running_bed(roles=ROLES, router={"pipeline": "p-md"}) as bed:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, uvloop.Loop) == ("uvloop" in request.node.name)
        answer = asyncio.create_task(stream(bed, max_tokens=300))
        await until_lent(bed, 20)
        victim = next(main for main in (bed.md0, bed.md1) if main.running)
        setattr(victim, fault, 0)
        assert text_of(await answer).rstrip("\ufffd") == bed.reference(CONTENT, 300)
        assert len((await bed.last_record())["failures"]) >= 1
        await bed.until_free()


async def test_an_engine_that_is_silent_in_a_lane_is_replaced_exactly() -> None:
    settings = {"pipeline": "p-md", "engine_idle_timeout_s": 0.5}
    async with running_bed(roles=ROLES, router=settings) as bed:
        answer = asyncio.create_task(stream(bed, max_tokens=300))
        await until_lent(bed, 20)
        victim = next(main for main in (bed.md0, bed.md1) if main.running)
        victim.stall_stream_after = 0
        assert text_of(await answer).rstrip("\ufffd") == bed.reference(CONTENT, 300)
        (failure,) = (await bed.last_record())["failures"]
        assert "nothing was heard" in failure
        await bed.until_free()


async def test_an_engine_that_is_declared_down_while_lent_is_replaced_exactly() -> None:
    async with running_bed(roles=ROLES, router={"pipeline": "p-md"}) as bed:
        answer = asyncio.create_task(stream(bed, max_tokens=300))
        await until_lent(bed, 20)
        victim = next(main for main in (bed.md0, bed.md1) if main.running)
        await victim.stop()
        assert text_of(await answer).rstrip("\ufffd") == bed.reference(CONTENT, 300)
        assert (await bed.last_record())["attempts"] == 2
        await bed.until_free()


# ---- clients


async def test_a_client_that_leaves_a_lane_leaves_nothing() -> None:
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        await stream(bed, max_tokens=5)  # what is opened once is open
        num_fds = num_open_files()
        for linger in (struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)):  # by RST, and in order
            given = total(bed, "tokens")
            _, writer = await open_slow_client(bed, stream_body(max_tokens=3000))
            await until_lent(bed, int(given) + 10)
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()
            await bed.until_free()
            assert (await bed.last_record())["outcome"] == "cancelled"
        assert len(bed.md0.aborted) == 2
        await bed.until(lambda: num_open_files() <= num_fds)


async def test_a_client_that_reads_slowly_gets_everything_and_its_engine_is_not_blamed() -> None:
    settings = {"pipeline": "p-md", "engine_idle_timeout_s": 0.3}
    async with running_bed(router=settings) as bed:
        bed.md0.itl_s, tokens = 0.0, 3500
        reader, writer = await open_slow_client(bed, stream_body(max_tokens=tokens, ignore_eos=True))
        sock: socket.socket = writer.get_extra_info("socket")
        assert sock.fileno() >= 0
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until_lent(bed, 100)
        await asyncio.sleep(1.0)  # three times what an engine may be silent
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        data = b""
        while b"\r\n0\r\n\r\n" not in data[-20:]:
            data += await reader.read(65536)
        writer.close()
        assert b"data: [DONE]" in data
        record = await bed.last_record()
        assert (record["failures"], record["output_tokens"]) == ([], tokens)


async def test_the_deadline_ends_a_lane_with_an_error_event() -> None:
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        bed.md0.itl_s = 0.01
        events = events_of(
            await (
                await bed.post(
                    "/v1/chat/completions",
                    messages=MESSAGES,
                    stream=True,
                    max_tokens=3000,
                    headers={"X-Request-Timeout": "1.0"},
                )
            ).text()
        )
        assert "did not finish in time" in events[-1]["error"]["message"]
        text = text_of(events[:-1]).rstrip("\ufffd")
        assert bed.reference(CONTENT, 1000).startswith(text)
        assert total(bed, "tokens") > 5
        assert (await bed.last_record())["error"] == "deadline"
        await bed.until_free()


async def test_silence_in_a_lane_is_filled_with_comments_and_flow_is_not() -> None:
    async with running_bed(router={"pipeline": "p-md", "keep_alive_interval_s": 0.3}) as bed:
        answer = await bed.post("/v1/chat/completions", messages=MESSAGES, stream=True, max_tokens=300)
        await until_lent(bed, 20)
        bed.md0.flows.clear()
        data = b""
        while b": keep-alive" not in data:
            data += await answer.content.readany()
        bed.md0.flows.set()
        text = (data + await answer.content.read()).decode()
        assert text_of(events_of(text)).rstrip("\ufffd") == bed.reference(CONTENT, 300)
        assert total(bed, "lanes") >= 2


async def test_a_clients_connection_serves_the_next_request_after_a_lane() -> None:
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        for _ in range(3):
            given = total(bed, "tokens")
            events = await stream(bed, max_tokens=120)
            assert text_of(events).rstrip("\ufffd") == bed.reference(CONTENT, 120)
            assert total(bed, "tokens") > given
        assert len(bed.client.connector._conns) == 1  # type: ignore[union-attr]


# ---- what is not lent


@ON_UVLOOP
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": True},
        {"return_token_ids": True},
        {"stop": ["\x00never"]},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream": False},
    ],
)
async def test_what_needs_more_than_text_goes_the_long_way(fields: dict[str, Any]) -> None:
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        answer = await bed.post(
            "/v1/chat/completions", messages=MESSAGES, max_tokens=80, **{"stream": True, **fields}
        )
        expected = bed.reference(CONTENT, 80)
        if fields.get("stream", True):
            events = events_of(await answer.text())
            first = [e for e in events if all(choice["index"] == 0 for choice in e["choices"])]
            assert text_of(first).rstrip("\ufffd") == expected
        else:
            assert (await answer.json())["choices"][0]["message"]["content"] == expected
        assert total(bed, "lanes") == 0


@ON_UVLOOP
async def test_a_client_of_http_1_0_is_not_lent() -> None:
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(bed.url.rpartition(":")[2]))
        body = stream_body(max_tokens=80)
        head = f"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        text = (await reader.read()).decode().partition("\r\n\r\n")[2]
        assert text_of(events_of(text)).rstrip("\ufffd") == bed.reference(CONTENT, 80)
        assert total(bed, "lanes") == 0
        writer.close()


@ON_UVLOOP
async def test_without_the_library_everything_goes_the_long_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "none.so")
    library.load.cache_clear()
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        assert bed.router.services.fast_path is None
        assert text_of(await stream(bed, max_tokens=80)).rstrip("\ufffd") == bed.reference(CONTENT, 80)
    assert sum("no fast path" in record.message for record in caplog.records) == 1


# ---- what is told


@ON_UVLOOP
async def test_tokens_are_told_while_the_lane_runs() -> None:
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        answer = asyncio.create_task(stream(bed, max_tokens=400))
        await until_lent(bed, 20)
        bed.md0.flows.clear()
        told = (await bed.last_record())["output_tokens"]
        assert 20 < told < 400
        async with bed.client.get(bed.url + "/metrics") as page:
            lines = (await page.text()).splitlines()
        (value,) = [
            float(line.split()[1]) for line in lines if line.startswith("pdd_fast_path_tokens_total ")
        ]
        assert value >= 20
        bed.md0.flows.set()
        await answer


@ON_UVLOOP
@pytest.mark.parametrize("fast_path", [False, True])
async def test_the_times_of_a_paced_answer_are_those_of_its_engines(fast_path: bool) -> None:
    async with running_bed(router={"pipeline": "p-rld-md", "fast_path": fast_path}) as bed:
        bed.agents["p0"].hold("md0")
        bed.rld0.itl_s = bed.md0.itl_s = 0.02
        answer = asyncio.create_task(stream(bed, max_tokens=80))
        await bed.until(lambda: bed.rld0.tokens_streamed >= 40)
        bed.agents["p0"].let_land("md0")
        await answer
        record = await bed.last_record()
        assert (total(bed, "tokens") > 0) == fast_path
        assert 0.015 <= record["median_itl_s"] <= record["max_itl_s"]
        assert record["max_itl_s"] < record["finished_s"]
        assert record["output_tokens"] == 80
        itl_s = bed.router.fleet.engines["rld0"].itl_s
        assert itl_s is not None
        assert itl_s >= 0.015


async def test_a_router_that_stops_ends_its_lanes() -> None:
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        _, writer = await open_slow_client(bed, stream_body(max_tokens=3000))
        await until_lent(bed, 10)
        fast_path, records = bed.router.services.fast_path, bed.router.records
        assert fast_path is not None
        assert len(fast_path._lanes) == 1
    assert fast_path._lanes == {}
    assert [record.outcome for record in records.all()] == ["cancelled"]
    writer.close()
