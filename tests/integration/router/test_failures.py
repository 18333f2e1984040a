"""Whatever fails, a client gets each token once, or one clear error; and nothing is left behind."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from tests.kit.bed import Bed, running_bed

from pdd.router import http_client

CONTENT = "Please explain how a lighthouse works, at length."
TWO_MAINS = {"p0": ("prefill", "a"), "rld0": ("relay", "a"), "md0": ("main", "b"), "md1": ("main", "c")}
TWO_PREFILLS = {"p0": ("prefill", "a"), "p1": ("prefill", "a"), "rld0": ("relay", "a"), "md0": ("main", "b")}
MESSAGES = [{"role": "user", "content": CONTENT}]
STRUCTURED: dict[str, Any] = {"response_format": {"type": "json_object"}}


async def check_whole(bed: Bed, *, max_tokens: int = 60, **fields: Any) -> dict[str, Any]:
    """An answer that equals one plain engine's; returns its record."""
    body = await bed.chat(CONTENT, max_tokens=max_tokens, **fields)
    assert body["choices"][0]["message"]["content"] == bed.reference(CONTENT, max_tokens)
    assert body["usage"]["completion_tokens"] == max_tokens
    record = await bed.record(body["id"])
    assert record["outcome"] == "complete"
    await bed.until_free()
    return record


def strike(bed: Bed, engine_id: str, how: str, when: int) -> None:
    """The engine fails so after so many tokens; only of this one is silence soon taken for its end.

    After a stall of the event loop, which the fakes share, all timers are due before any fake has said more:
    a short limit would give up the healthy ones, too.
    """
    setattr(bed.engines[engine_id], how, when)
    bed.router.fleet.engines[engine_id].client._idle_timeout_s = 1.0


# ---- engines


@pytest.mark.parametrize(
    "how", ["kill_stream_after", "garble_stream_after", "abort_stream_after", "stall_stream_after"]
)
@pytest.mark.parametrize("when", [0, 5])
async def test_relay_lost_before_handoff_waits_for_main(how: str, when: int) -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.agents["p0"].hold("md0")
        strike(bed, "rld0", how, when)
        check = asyncio.create_task(check_whole(bed))
        await bed.until(lambda: bool(bed.rld0.aborted or bed.rld0.finished))
        bed.agents["p0"].let_land("md0")
        record = await check
        assert record["failures"]
        assert record["main"] == "md0"


@pytest.mark.parametrize(
    "how", ["kill_stream_after", "garble_stream_after", "abort_stream_after", "stall_stream_after"]
)
@pytest.mark.parametrize("when", [0, 5])
async def test_main_lost_after_handoff_is_continued_elsewhere(how: str, when: int) -> None:
    async with running_bed(roles=TWO_MAINS, router={"pipeline": "p-md"}) as bed:
        strike(bed, "md0", how, when)
        record = await check_whole(bed)
        assert (record["attempts"], record["main"]) == (2, "md1")


@pytest.mark.parametrize("number", [10**20, -1, 2**31])
async def test_a_token_that_cannot_be_one_is_an_engines_failure_like_others(number: int) -> None:
    async with running_bed(roles=TWO_MAINS, router={"pipeline": "p-md"}) as bed:
        bed.md0.garble_stream_after = 5
        bed.md0.garbage = b'{"choices": [{"token_ids": [%d]}]}' % number
        record = await check_whole(bed)
        assert (record["attempts"], record["main"]) == (2, "md1")


async def test_the_only_main_lost_after_handoff_is_continued_by_the_relay() -> None:
    async with running_bed(router={"pipeline": "p-rld-md", "handoff": "one-shot"}) as bed:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 6)
        bed.md0.kill_stream_after = 3
        record = await check_whole(bed)
        assert record["attempts"] == 2
        assert bed.rld0.seen[-1]["stream"]


async def test_main_gone_before_the_handoff_lets_the_relay_finish() -> None:
    async with running_bed(router={"pipeline": "p-rld-md", "handoff": "catch-up"}) as bed:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 6)
        await bed.md0.stop()
        record = await check_whole(bed, max_tokens=100)
        assert record["eager_tokens"] == 99


async def test_prefill_engine_that_fails_is_replaced_by_another() -> None:
    async with running_bed(roles=TWO_PREFILLS) as bed:
        bed.p0.reply_status = 500
        await check_whole(bed)
        await bed.p0.stop()
        await check_whole(bed)


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_prefill_failure_is_an_http_error_at_once_and_main_does_not_prefill_instead(
    status: int,
) -> None:
    async with running_bed() as bed:
        bed.p0.reply_status = status
        for stream in (False, True):
            async with asyncio.timeout(20):  # no recovery is waited for, which would take 30 s
                answer = await bed.post(
                    "/v1/chat/completions", messages=MESSAGES, max_tokens=5, stream=stream
                )
                assert answer.status == status
                assert (await answer.json())["error"]["code"] == status
        assert bed.md0.seen == bed.rld0.seen == []


async def test_no_engine_is_503_with_retry_after_and_heals_alone() -> None:
    async with running_bed() as bed:
        await bed.p0.stop()
        answer = await bed.post("/v1/chat/completions", messages=MESSAGES, max_tokens=5)
        assert answer.status in (502, 503)
        answer = await bed.post("/v1/chat/completions", messages=MESSAGES, max_tokens=5)
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
        await bed.p0.start()
        await bed.until(lambda: not bed.router.fleet.missing_for_ready())
        await check_whole(bed)


async def test_an_answer_that_cannot_be_continued_exactly_ends_in_an_error_event() -> None:
    async with running_bed(roles=TWO_MAINS) as bed:
        bed.md0.kill_stream_after = 3
        answer = await bed.post(
            "/v1/chat/completions", messages=MESSAGES, max_tokens=20, stream=True, **STRUCTURED
        )
        lines = [line for line in (await answer.text()).splitlines() if line.startswith("data: ")]
        last = json.loads(lines[-1].removeprefix("data: "))
        assert last["error"]["code"] == 502
        assert "[DONE]" not in lines[-1]
        await bed.until_free()


async def test_an_answer_bound_to_one_engine_starts_anew_elsewhere_before_its_first_token() -> None:
    async with running_bed(roles=TWO_MAINS) as bed:
        bed.md0.kill_stream_after = 0
        await check_whole(bed, **STRUCTURED)


async def test_a_pooled_connection_the_engine_closed_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "POOL_IDLE_S", 1000.0)
    async with running_bed() as bed:
        bed.p0.drop_whole = 1
        record = await check_whole(bed)
        assert record["failures"] == []


async def test_events_split_over_many_segments_are_whole() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.rld0.split_events = bed.md0.split_events = True
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 6)
        await check_whole(bed)


async def test_deadline_is_an_error_of_its_own() -> None:
    async with running_bed(router={"request_timeout_s": 3}) as bed:
        bed.rld0.itl_s = bed.md0.itl_s = 0.2
        begun = await bed.post("/v1/chat/completions", messages=MESSAGES, max_tokens=50, stream=True)
        assert b"data: " in await begun.content.readline()
        bed.p0.prefill_s = 30
        answer = await bed.post("/v1/chat/completions", messages=MESSAGES, max_tokens=5)
        assert answer.status == 504
        assert "prefilling" in (await answer.json())["error"]["message"]
        last = (await begun.text()).splitlines()[-2]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "TimeoutError"
        await bed.until_free()


# ---- transfers


async def test_wan_lost_lets_the_relay_finish() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.agents["p0"].fail_with["md0"] = "peer_down"
        record = await check_whole(bed)
        assert record["handoff_mode"] is None
        assert bed.md0.seen == []


async def test_p_md_without_wan_is_relayed_after_all() -> None:
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        bed.agents["p0"].fail_with["md0"] = "peer_down"
        record = await check_whole(bed)
        assert record["relay"] == "rld0"


async def test_fast_link_lost_waits_for_main() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.agents["p0"].fail_with["rld0"] = "peer_down"
        bed.agents["p0"].landing_s["md0"] = 0.1
        record = await check_whole(bed)
        assert record["eager_tokens"] == 0


async def test_no_link_at_all_is_computed_where_it_can_be() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.agents["p0"].fail_with.update({"rld0": "peer_down", "md0": "peer_down"})
        await check_whole(bed)


async def test_kv_that_never_lands_is_given_up() -> None:
    async with running_bed(router={"pipeline": "p-rld-md", "transfer_timeout_s": 0.1}) as bed:
        bed.agents["p0"].hold("md0")
        bed.rld0.itl_s = 0.005
        await check_whole(bed)
        assert "md0" in {peer for _, peer in bed.agents["p0"].cancelled}


async def test_landed_kv_that_main_does_not_find_is_counted() -> None:
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        bed.md0.receive = lambda tokens: None  # type: ignore[method-assign]  # landed, and evicted at once
        record = await check_whole(bed)
        prompt = record["prompt_tokens"]
        assert record["shortfall_tokens"] == prompt // 32 * 32
        async with bed.client.get(f"{bed.url}/metrics") as page:
            text = await page.text()
        assert f'pdd_handoff_shortfall_tokens_total{{engine="md0"}} {float(prompt // 32 * 32)}' in text


async def test_agent_that_restarts_takes_its_transfers_with_it() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        await check_whole(bed)  # so that the old agent's sequence is ahead of the new one's
        agent = bed.agents["p0"]
        agent.hold("md0")
        bed.rld0.itl_s = 0.02
        task = asyncio.create_task(bed.chat(CONTENT, max_tokens=60))
        await bed.until(lambda: bool(bed.rld0.running))
        await agent.stop(forget=True)
        await agent.start()
        body = await task
        assert body["choices"][0]["message"]["content"] == bed.reference(CONTENT, 60)


async def test_event_stream_that_breaks_for_a_moment_loses_nothing() -> None:
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        agent = bed.agents["p0"]
        agent.landing_s["md0"] = 0.1
        task = asyncio.create_task(bed.chat(CONTENT, max_tokens=20))
        await bed.until(lambda: bool(agent.transfers))
        await agent.stop()
        await asyncio.sleep(0.2)  # it lands meanwhile
        await agent.start()
        body = await task
        assert body["choices"][0]["message"]["content"] == bed.reference(CONTENT, 20)


async def test_wan_transfer_of_an_answer_that_relay_finished_is_cancelled() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.agents["p0"].hold("md0")
        record = await check_whole(bed, max_tokens=5)
        assert record["eager_tokens"] == 4
        await bed.until(lambda: [peer for _, peer in bed.agents["p0"].cancelled] == ["md0"])
        record = await bed.last_record()
        assert record["wan_bytes"] < record["prompt_tokens"] // 32 * 1000
        assert record["wan_bytes_without_drc"] == record["wan_bytes"]


# ---- clients that leave


def in_prefill(bed: Bed) -> bool:
    """P works."""
    return bool(bed.p0.running)


def in_relay(bed: Bed) -> bool:
    """RLD works."""
    return bool(bed.rld0.running)


def in_main(bed: Bed) -> bool:
    """MD works."""
    return bool(bed.md0.running)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", [in_prefill, in_relay, in_main])
async def test_a_client_that_leaves_frees_every_engine_before_its_answer_would_have_ended(
    stream: bool, moment: Callable[[Bed], bool]
) -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.p0.prefill_s = 30.0 if moment is in_prefill else 0.0
        bed.agents["p0"].landing_s["md0"] = 0.02 if moment is in_main else 30.0
        bed.rld0.itl_s = bed.md0.itl_s = 0.05
        async with aiohttp.ClientSession() as session:
            body = {"model": "fake", "messages": MESSAGES, "max_tokens": 500, "stream": stream}

            async def ask() -> None:
                async with session.post(f"{bed.url}/v1/chat/completions", json=body) as answer:
                    await answer.read()

            task = asyncio.create_task(ask())
            await bed.until(lambda: moment(bed))
            task.cancel()
        await bed.until_free(timeout_s=10.0)  # nothing ends by itself in that time
        record = await bed.last_record()
        assert record["outcome"] == "cancelled"


# ---- exactly once, at random


@pytest.mark.parametrize("seed", range(3))
async def test_random_kills_lose_and_repeat_no_token(seed: int) -> None:
    import random

    rng = random.Random(seed)
    roles = {**TWO_MAINS, "p1": ("prefill", "a"), "rld1": ("relay", "a")}
    async with running_bed(roles=roles, router={"pipeline": "p-rld-md"}) as bed:
        for engine in bed.engines.values():
            engine.itl_s = 0.004
        for prefill in ("p0", "p1"):
            bed.agents[prefill].landing_s.update({"md0": 0.08, "md1": 0.15})
        stop = asyncio.Event()

        async def trouble() -> None:
            while not stop.is_set():
                await asyncio.sleep(rng.uniform(0.05, 0.15))
                victim = bed.engines[rng.choice(["rld0", "rld1", "md0", "md1"])]
                await victim.stop()
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                await victim.start()

        async def ask(number: int) -> str:
            content = f"question {number} {CONTENT}"
            answer = await bed.post(
                "/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=80
            )
            body = await answer.json()
            if answer.status != 200:
                assert set(body) == {"error"}
                return "error"
            assert body["choices"][0]["message"]["content"] == bed.reference(content, 80)
            assert body["usage"]["completion_tokens"] == 80
            return "complete"

        troubles = asyncio.create_task(trouble())
        outcomes = [o for n in range(4) for o in await asyncio.gather(*(ask(10 * n + i) for i in range(5)))]
        stop.set()
        await troubles
        assert outcomes.count("complete") >= len(outcomes) // 2
        await bed.until_free()


async def test_a_render_whose_connection_is_cut_is_asked_for_again_also_of_the_only_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "POOL_IDLE_S", 1000.0)
    async with running_bed() as bed:
        await bed.chat("there is a pooled connection now", max_tokens=3)
        bed.p0.drop_renders = 2  # the pooled connection, which is tried anew anyhow, and the new one
        body = await bed.chat("cut while it was rendered", max_tokens=20)
        assert body["choices"][0]["message"]["content"] == bed.reference("cut while it was rendered", 20)
        bed.p0.drop_renders = 9
        answer = await bed.post("/v1/chat/completions", messages=[{"role": "user", "content": "again"}])
        assert answer.status == 502
