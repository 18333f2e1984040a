"""Faults that users of neighbouring systems reported, tried here; ``docs/reference/cases.md`` names each."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from tests.kit.bed import Bed, running_bed
from tests.kit.fake_model import FakeModel

from pdd.router import scrape

CONTENT = "Please say something about light houses."
FOUR_PREFILLS = {
    **{f"p{n}": ("prefill", "a") for n in range(4)},
    "rld0": ("relay", "a"),
    "md0": ("main", "b"),
}
TWO_PREFILLS = {"p0": ("prefill", "a"), "p1": ("prefill", "a"), "rld0": ("relay", "a"), "md0": ("main", "b")}
TWO_MAINS = {"p0": ("prefill", "a"), "rld0": ("relay", "a"), "md0": ("main", "b"), "md1": ("main", "c")}


def prompt_length(model: FakeModel) -> int:
    """Tokens of the chat prompt of ``CONTENT``."""
    return len(model.chat_prompt([{"role": "user", "content": CONTENT}]))


def model_that_ends_after(num_tokens: int) -> FakeModel:
    """A model whose answer to ``CONTENT`` has EOS as its next token after so many."""
    return FakeModel(eos_lengths=frozenset({prompt_length(FakeModel()) + num_tokens}))


async def ask(bed: Bed, number: int, max_tokens: int = 20) -> dict[str, Any]:
    """A whole, right answer to a question of its own; returns its record."""
    content = f"{CONTENT} {number}"
    body = await bed.chat(content, max_tokens=max_tokens)
    assert body["choices"][0]["message"]["content"] == bed.reference(content, max_tokens)
    return await bed.record(body["id"])


# ---- handoff and sampling


@pytest.mark.parametrize("handoff", ["one-shot", "catch-up"])
async def test_ten_tokens_are_ten_after_a_handoff_at_four(handoff: str) -> None:
    async with running_bed(router={"pipeline": "p-rld-md", "handoff": handoff}) as bed:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 3)
        bed.rld0.itl_s = 0.02
        body = await bed.chat(CONTENT, max_tokens=10)
        assert body["usage"]["completion_tokens"] == 10
        assert body["choices"][0]["finish_reason"] == "length"
        record = await bed.record(body["id"])
        assert record["handoff_mode"] is not None
        assert body["choices"][0]["message"]["content"] == bed.reference(CONTENT, 10)


@pytest.mark.parametrize("after", [0, 1, 5, 30])
async def test_ignored_eos_does_not_end_the_answer_on_any_leg(after: int) -> None:
    router = {"pipeline": "p-rld-md"}
    async with running_bed(router=router, model=model_that_ends_after(after)) as bed:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 6)
        body = await bed.chat(CONTENT, max_tokens=64, ignore_eos=True)
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (64, "length")


@pytest.mark.parametrize("after", [0, 1, 5, 9])
async def test_min_tokens_counts_over_all_legs(after: int) -> None:
    router = {"pipeline": "p-rld-md"}
    async with running_bed(router=router, model=model_that_ends_after(after)) as bed:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 4)
        body = await bed.chat(CONTENT, max_tokens=64, min_tokens=10)
        assert body["usage"]["completion_tokens"] >= 10


async def test_more_min_tokens_than_a_prefill_makes_are_no_error() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 6)
        body = await bed.chat(CONTENT, max_tokens=500, min_tokens=100)
        assert body["usage"]["completion_tokens"] >= 100


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"echo": True}])
async def test_prompt_logprobs_and_echo_have_values_or_are_refused_and_harm_no_engine(
    stream: bool, fields: dict[str, Any]
) -> None:
    async with running_bed() as bed:
        answer = await bed.post("/v1/completions", prompt="a prompt", max_tokens=5, stream=stream, **fields)
        text = await answer.text()
        assert answer.status in (200, 400), text
        if answer.status == 200:
            assert ("a prompt" if "echo" in fields else "prompt_logprobs") in text
        await ask(bed, 1)
        await bed.until_free()


# ---- crash, restart, reconnect


async def test_without_any_main_then_any_relay_the_rest_serves_and_heals_alone() -> None:
    async with running_bed() as bed:
        fleet = bed.router.fleet
        await bed.md0.stop()
        record = await ask(bed, 1)
        assert record["handoff_mode"] is None
        assert record["eager_tokens"] > 0
        await bed.rld0.stop()
        await bed.until(lambda: not any(fleet.engines[e].healthy for e in ("md0", "rld0")))
        answer = await bed.post("/v1/completions", prompt="x", max_tokens=5)
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
        await bed.md0.start()
        await bed.rld0.start()
        await bed.until(lambda: all(s.view.healthy for s in fleet.engines.values()))
        assert (await ask(bed, 2))["main"] == "md0"


@pytest.mark.parametrize("dark_s", [0.1, 7.0])
async def test_a_far_site_that_is_cut_off_for_a_while_is_done_without_and_taken_back(dark_s: float) -> None:
    router = {"pipeline": "p-rld-md", "handoff": "one-shot"}
    async with running_bed(router=router) as bed:
        for engine in bed.engines.values():
            engine.itl_s = 0.005
        bed.agents["p0"].cut.add("md0")
        await bed.agents["md0"].stop()
        dark = asyncio.create_task(asyncio.sleep(dark_s))
        number = 0
        while not dark.done():
            await ask(bed, number := number + 1)
        bed.agents["p0"].cut.clear()
        await bed.agents["md0"].start()
        state = bed.router.fleet.engines["md0"]
        await bed.until(lambda: state.view.healthy and state.view.kv_ready)
        assert (await ask(bed, 0, max_tokens=200))["handoff_mode"] == "one-shot"
        await bed.until_free()


async def test_killing_one_of_two_prefill_engines_under_load_costs_no_answer() -> None:
    async with running_bed(roles=TWO_PREFILLS) as bed:
        bed.p0.prefill_s = bed.p1.prefill_s = 0.02

        async def client(first: int) -> None:
            for number in range(first, first + 10):
                await ask(bed, number)

        async with asyncio.TaskGroup() as clients:
            for n in range(4):
                clients.create_task(client(100 * n))
            await bed.until(lambda: bool(bed.p0.running))
            await bed.p0.stop()
        assert len(bed.p1.seen) > 30


async def test_transfers_of_a_prefill_engine_that_is_stopped_go_on_from_its_agent() -> None:
    async with running_bed(router={"pipeline": "p-rld-md", "handoff": "one-shot"}) as bed:
        bed.agents["p0"].hold("md0")
        bed.rld0.itl_s = 0.02
        tasks = [asyncio.create_task(ask(bed, number, max_tokens=100)) for number in range(5)]
        await bed.until(lambda: len(bed.rld0.running) == 5)
        await bed.p0.stop()
        bed.agents["p0"].let_land("md0")
        records = await asyncio.gather(*tasks)
        assert [r["handoff_mode"] for r in records] == ["one-shot"] * 5
        assert [r["attempts"] for r in records] == [1] * 5


# ---- reasons


async def test_a_failed_transfer_is_not_reported_as_a_cancelled_one() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.agents["p0"].fail_with["md0"] = "store_full"
        await ask(bed, 1)
        page = bed.router.metrics.text().decode()
        assert 'pdd_transfers_total{dst="md0",result="store_full",src="p0"} 1.0' in page
        assert 'dst="md0",result="cancelled"' not in page
        bed.agents["p0"].fail_with.clear()
        bed.agents["p0"].hold("md0")
        await ask(bed, 2)
        cancelled = 'pdd_transfers_total{dst="md0",result="cancelled",src="p0"} 1.0'
        await bed.until(lambda: cancelled in bed.router.metrics.text().decode())


# ---- balance


async def test_slow_prefills_are_spread_over_all_prefill_engines() -> None:
    async with running_bed(roles=FOUR_PREFILLS) as bed:
        for n in range(4):
            bed.engines[f"p{n}"].prefill_s = 0.1
        prompt = list(range(40, 100)) * 50
        questions = [bed.post("/v1/completions", prompt=prompt, max_tokens=1) for _ in range(24)]
        answers = await asyncio.gather(*questions)
        assert {answer.status for answer in answers} == {200}
        shares = [len(bed.engines[f"p{n}"].seen) for n in range(4)]
        assert max(shares) / min(shares) <= 1.5


async def test_equal_prompts_starve_no_prefill_engine_and_no_history_counts() -> None:
    async with running_bed(roles=TWO_PREFILLS) as bed:
        for number in range(10):  # one after the other: these all go to p0, and must not count later
            await ask(bed, number)
        bed.p0.prefill_s = bed.p1.prefill_s = 0.05
        await asyncio.gather(*(bed.chat(CONTENT, max_tokens=2) for _ in range(40)))
        assert min(len(bed.p0.seen) - 10, len(bed.p1.seen)) >= 10


async def test_a_main_engine_whose_cache_is_nearly_full_gets_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "TIMEOUT_S", 60.0)  # what comes later than that counts as an empty cache
    async with running_bed(roles=TWO_MAINS, router={"pipeline": "p-md"}) as bed:
        bed.md0.kv_usage_ratio = 0.9
        state = bed.router.fleet.engines["md0"]
        await bed.until(lambda: state.view.kv_usage_ratio == 0.9)
        bed.md0.itl_s = bed.md1.itl_s = 0.01
        records = await asyncio.gather(*(ask(bed, number) for number in range(7)))
        shares = Counter(record["main"] for record in records)
        assert shares["md0"] < 7 / 2 / 2


# ---- metrics


async def test_times_of_a_record_are_in_the_order_of_its_phases() -> None:
    async with running_bed(router={"pipeline": "p-rld-md", "handoff": "one-shot"}) as bed:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 12)
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        answer = await bed.post("/v1/completions", prompt=CONTENT, max_tokens=60, stream=True)
        await answer.content.readuntil(b"\n\n")
        client_ttft_s = loop.time() - asked_s
        await answer.read()
        record = await bed.last_record()
        names = ("ttft_s", "second_token_s", "wan_landed_s", "handoff_s", "finished_s")
        times = [record[name] for name in names]
        assert times == sorted(times)
        assert 0 < record["rld_landed_s"] <= record["second_token_s"]
        assert record["ttft_s"] <= client_ttft_s


async def test_kv_that_was_moved_for_a_request_is_not_a_cache_hit_of_it() -> None:
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        long = CONTENT * 10
        first, second = [await bed.chat(long, max_tokens=20) for _ in range(2)]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        record = await bed.record(first["id"])
        assert record["md_cached_tokens"] > 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
