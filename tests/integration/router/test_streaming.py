"""The way of a token: slow clients, large bodies, connections that are used again, and what is sent along."""

import asyncio
import gc
import json
from collections.abc import Sequence
from typing import Any

import pytest
from tests.kit.bed import Bed, running_bed

from pdd.core.errors import ConnectError, ConnectionLostError, DeadlineError
from pdd.router import http_client
from pdd.router.api import stream as client_stream
from pdd.router.http_client import HttpClient
from pdd.router.http_connection import Gate
from pdd.router.request.driver import RequestDriver
from pdd.router.request.events import StartDecode
from pdd.router.request.job import Rendered
from pdd.router.request.planning import PromptKeys

USER = [{"role": "user", "content": "At length, please."}]
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def stream_body(**fields: Any) -> bytes:
    """A streaming chat request."""
    return json.dumps({"model": "fake", "messages": USER, "stream": True, **fields}).encode()


async def open_slow_client(bed: Bed, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has sent its request and reads next to nothing."""
    port = int(bed.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await reader.readline()
    return reader, writer


# ---- slow clients


async def test_a_slow_client_holds_the_engine_back_and_gets_every_token_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_stream, "MAX_UNSENT_BYTES", 8192)
    tokens = 4000
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        bed.md0.itl_s = 0.0
        # Log probabilities make each event large, so that the kernel's buffers fill up as well.
        body = stream_body(max_tokens=tokens, logprobs=True, top_logprobs=20, ignore_eos=True)
        reader, writer = await open_slow_client(bed, body)
        seen = -1
        while bed.md0.tokens_streamed > seen:  # until nothing moves any more
            seen = bed.md0.tokens_streamed
            await asyncio.sleep(0.5)
        assert seen < tokens, "nothing held the engine back"
        text = (await read_to_end(reader)).decode()
        writer.close()
        assert text.count('"logprob":-0.5,"bytes"') >= tokens
        assert "data: [DONE]" in text


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """The whole answer."""
    data = b""
    while b"\r\n0\r\n\r\n" not in data[-20:]:
        data += await reader.read(65536)
    return data


async def test_a_client_that_takes_nothing_until_the_deadline_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_stream, "MAX_UNSENT_BYTES", 8192)
    async with running_bed(router={"pipeline": "p-md", "request_timeout_s": 4.0}) as bed:
        bed.md0.itl_s = 0.0
        body = stream_body(max_tokens=4000, logprobs=True, top_logprobs=20, ignore_eos=True)
        _, writer = await open_slow_client(bed, body)
        await bed.until(lambda: bool(bed.md0.running))
        await bed.until_free()
        async with asyncio.timeout(60.0):
            while (record := await bed.last_record())["outcome"] is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (record["outcome"], record["error"]) == ("error", "deadline")
        writer.close()


# ---- what is sent along


async def test_request_id_and_trace_go_to_every_engine() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        headers = {"X-Request-Id": "mine", "traceparent": TRACE, "tracestate": "a=b"}
        answer = await bed.post("/v1/chat/completions", messages=USER, max_tokens=30, headers=headers)
        assert answer.headers["X-Request-Id"] == "mine"
        for engine in bed.engines.values():
            for got in engine.headers:
                assert got["X-Request-Id"].startswith("mine")
                assert (got["traceparent"], got["tracestate"]) == (TRACE, "a=b")


async def test_http_1_0_clients_get_a_stream_without_chunks() -> None:
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(bed.url.rpartition(":")[2]))
        body = stream_body(max_tokens=5)
        head = f"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        text = (await reader.read()).decode()
        assert text.endswith("}\n\ndata: [DONE]\n\n")
        events = text.partition("\r\n\r\n")[2].strip().split("\n\n")
        assert all(event.startswith("data: ") for event in events)
        writer.close()


@pytest.mark.parametrize("size_bytes", [33 * 2**10, 129 * 2**10, 2 * 2**20, 16 * 2**20])
async def test_large_bodies_pass(size_bytes: int) -> None:
    async with running_bed() as bed:
        prompt = "x" * (size_bytes // 4) if size_bytes > 2**20 else "x" * size_bytes
        ids = [65] * (size_bytes // 4)
        fields = {"prompt": prompt} if size_bytes < 2**20 else {"prompt": ids}
        answer = await bed.post("/v1/completions", max_tokens=1, **fields)
        # The router has learned the limit of 4096 tokens: what matters is that the body came through whole.
        assert answer.status == 400
        assert "context length" in (await answer.json())["error"]["message"]


# ---- memory


@pytest.mark.parametrize("pipeline", ["p-md", "p-rld-md"])
async def test_what_an_answer_took_is_free_at_its_end_without_a_search_for_cycles(pipeline: str) -> None:
    async with running_bed(router={"pipeline": pipeline, "handoff": "one-shot"}) as bed:
        if pipeline == "p-rld-md":
            bed.agents["p0"].lands_after["md0"] = (bed.rld0, 3)
            bed.rld0.itl_s = 0.02
        fields = {"stream": True, "max_tokens": 10, "ignore_eos": True}
        gc.collect()
        others = of_requests()  # of tests before, if one of them failed
        gc.disable()
        try:
            answer = await bed.post("/v1/chat/completions", messages=USER, **fields)
            assert "[DONE]" in await answer.text()
            assert (await bed.last_record())["handoff_mode"] == ("one-shot" if "rld" in pipeline else None)
            await bed.until_free()
            await bed.until(lambda: not of_requests(but=others))
        finally:
            gc.enable()


TWO_MAINS = {"p0": ("prefill", "a"), "rld0": ("relay", "a"), "md0": ("main", "b"), "md1": ("main", "c")}


@pytest.mark.parametrize("fault", ["kill_stream_after", "garble_stream_after", "stall_stream_after"])
async def test_an_answer_that_lost_an_engine_is_as_free_at_its_end(fault: str) -> None:
    settings = {"pipeline": "p-md", "engine_idle_timeout_s": 0.5}
    async with running_bed(roles=TWO_MAINS, router=settings) as bed:
        for main in (bed.md0, bed.md1):
            setattr(main, fault, 5)
        gc.collect()
        others = of_requests()  # of tests before, if one of them failed
        gc.disable()
        try:
            fields = {"stream": True, "max_tokens": 8, "ignore_eos": True}
            answer = await bed.post("/v1/chat/completions", messages=USER, **fields)
            assert "[DONE]" in await answer.text()
            assert (await bed.last_record())["failures"]
            await bed.until_free()
            await bed.until(lambda: not of_requests(but=others))
        finally:
            gc.enable()


def of_requests(*, but: Sequence[Any] = ()) -> list[Any]:
    """The objects that a request in progress needs, and nothing else does."""
    kinds = (RequestDriver, Rendered, PromptKeys, StartDecode)
    others = {id(item) for item in but}
    return [item for item in gc.get_objects() if type(item) in kinds and id(item) not in others]


# ---- the client of engines


async def test_connections_are_used_again_after_whole_and_streamed_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "POOL_IDLE_S", 1000.0)
    async with running_bed() as bed:
        client = HttpClient(bed.p0.url, {}, connect_timeout_s=3.0)
        connections = set()
        for _ in range(3):
            async with client.exchange("GET", "/v1/models") as answer:
                await answer.end()
                assert json.loads(answer.body)["data"]
                connections.add(answer)
        assert len(connections) == 1
        await client.close()


async def test_a_stalled_answer_is_given_up_but_not_while_its_reader_is_held_back() -> None:
    async with running_bed() as bed:
        bed.md0.stall_stream_after = 1
        client, gate = HttpClient(bed.md0.url, {}, connect_timeout_s=3.0), Gate()
        body = json.dumps(
            {"token_ids": [1, 2], "stream": True, "sampling_params": {"max_tokens": 5}}
        ).encode()
        async with client.exchange(
            "POST", "/inference/v1/generate", body=lambda: body, on_bytes=lambda _: False
        ) as answer:
            gate.add(answer)
            gate.close()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.4):
                    await answer.end(idle_timeout_s=0.1)
            gate.open()
            with pytest.raises(DeadlineError):
                await answer.end(idle_timeout_s=0.1)
        await client.close()


async def test_nobody_at_the_address_and_a_cut_answer_are_told_apart() -> None:
    async with running_bed() as bed:
        client = HttpClient(bed.p0.url, {}, connect_timeout_s=3.0)
        bed.p0.drop_whole = 1
        body = json.dumps({"token_ids": [1], "sampling_params": {"max_tokens": 1}}).encode()
        with pytest.raises(ConnectionLostError):
            async with client.exchange("POST", "/inference/v1/generate", body=lambda: body) as answer:
                await answer.end()
        await bed.p0.stop()
        with pytest.raises(ConnectError):
            async with client.exchange("GET", "/health"):
                pass
        await client.close()
