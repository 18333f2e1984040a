"""Outliers end on RLD and leave the WAN to the others, over a line that has a rate."""

import asyncio
from typing import Any

from tests.kit.bed import CHUNK_TOKENS, Bed, running_bed
from tests.kit.fake_control import CHUNK_BYTES
from tests.kit.fake_line import FakeLine

RATE_BYTES_PER_S = 150_000


def with_line(bed: Bed) -> FakeLine:
    """The WAN from P to MD has a rate, and P's agent has measured it."""
    line = FakeLine(RATE_BYTES_PER_S)
    bed.agents["p0"].lines["md0"] = line
    bed.router.fleet.engines["p0"].agent.links["md0"] = {
        "state": "up",
        "rate_bytes_per_s": RATE_BYTES_PER_S,
        "rtt_s": 0.03,
    }
    return line


async def ask(bed: Bed, prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A whole, right answer's record."""
    answer = await bed.post(
        "/v1/completions", prompt=prompt, max_tokens=max_tokens, return_token_ids=True, **fields
    )
    body = await answer.json()
    assert answer.status == 200, body
    assert body["choices"][0]["token_ids"] == bed.model.generate(prompt, max_tokens)
    return await bed.record(body["id"])


async def test_outliers_of_a_mixed_run_end_on_the_relay_with_hardly_a_byte_on_the_wan() -> None:
    async with running_bed(policy={"second_token_slo_s": 0.02}) as bed:
        line = with_line(bed)
        num_outliers = 4
        prompts = [[97 + n % 20, 98 + n // 20, *([99] * 127)] for n in range(100)]
        for n in range(num_outliers):
            prompts[25 * n + 10] = [n] * 100 * CHUNK_TOKENS
        records: list[dict[str, Any]] = []
        for start in range(0, len(prompts), 5):
            batch = prompts[start : start + 5]
            records += await asyncio.gather(*(ask(bed, p, 4 if len(p) > 1000 else 90) for p in batch))
        await bed.until_free()
        outliers = [r for r in records if r["prompt_tokens"] > 1000]
        assert [r["outlier"] for r in outliers] == [True] * num_outliers
        for record in outliers:
            assert record["eager_tokens"] == 3
            assert record["handoff_mode"] is None
            full_bytes = record["prompt_tokens"] // CHUNK_TOKENS * CHUNK_BYTES
            assert record["wan_bytes"] < full_bytes / 10
        assert not any(r["outlier"] for r in records if r not in outliers)
        assert sum(r["handoff_mode"] is not None for r in records) > 80
        cancelled = {transfer for transfer, peer in bed.agents["p0"].cancelled if peer == "md0"}
        assert len(cancelled) >= num_outliers
        assert line.num_bytes < 100 * 5 * CHUNK_BYTES


async def test_the_second_turn_of_a_conversation_fills_mains_cache_however_short_its_answer() -> None:
    async with running_bed(policy={"second_token_slo_s": 0.02}) as bed:
        with_line(bed)
        prompt = [7] * 100 * CHUNK_TOKENS
        assert (await ask(bed, prompt, 4))["outlier"]
        second = await ask(bed, [*prompt, *[8] * CHUNK_TOKENS], 4)
        assert (second["reason"], second["outlier"]) == ("wan_beyond_slo", False)


async def test_an_answer_that_outgrows_its_tenants_history_is_sent_after_all() -> None:
    async with running_bed(policy={"second_token_slo_s": 0.02}) as bed:
        with_line(bed)
        bed.rld0.itl_s = 0.01
        for _ in range(20):
            bed.router.fleet.history.note("", 10)
        record = await ask(bed, [7] * 60 * CHUNK_TOKENS, 200)
        assert record["outlier"]
        assert record["handoff_mode"] is not None
        assert record["eager_tokens"] >= 10
        samples = bed.router.metrics.outliers.collect()[0].samples
        assert {s.labels["result"] for s in samples} == {"resumed"}


async def test_an_outlier_that_loses_its_relay_goes_on_at_main() -> None:
    async with running_bed(policy={"second_token_slo_s": 0.02}) as bed:
        with_line(bed)
        bed.rld0.kill_stream_after = 2
        record = await ask(bed, [7] * 40 * CHUNK_TOKENS, 8)
        assert record["outlier"]
        assert (record["main"], record["wan_landed_s"] is not None) == ("md0", True)
