"""Every metric of the router moves when what it counts happens."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families
from tests.kit.bed import Bed, running_bed

ROLES = {"p0": ("prefill", "a"), "rld0": ("relay", "a"), "md0": ("main", "b"), "md1": ("main", "c")}


async def values(bed: Bed) -> dict[str, float]:
    """The sum of each metric's samples; of a histogram, how often it was observed."""
    async with bed.client.get(f"{bed.url}/metrics") as page:
        text = await page.text()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        suffix = {"counter": "_total", "histogram": "_count"}.get(family.type, "")
        samples = [sample.value for sample in family.samples if sample.name == family.name + suffix]
        sums[family.name] = sum(samples)
    return sums


async def test_every_metric_moves() -> None:
    async with running_bed(
        roles=ROLES, router={"handoff": "catch-up"}, policy={"second_token_slo_s": 0.0}
    ) as bed:
        assert (await values(bed))["pdd_requests_in_flight"] == 0
        agent = bed.agents["p0"]
        agent.lands_after.update({"md0": (bed.rld0, 12), "md1": (bed.rld0, 12)})
        receive = bed.md0.receive
        bed.md0.receive = lambda tokens: None  # type: ignore[method-assign]  # evicted at once
        await bed.chat("a handoff with a shortfall", max_tokens=60)
        bed.md0.receive = receive  # type: ignore[method-assign]
        await bed.chat("a handoff with a shortfall", max_tokens=60)
        agent.lands_after.clear()
        await bed.chat("sampled", max_tokens=5, seed=1, temperature=1.0)
        bed.md0.kill_stream_after = 3
        await bed.chat("lost in the middle", max_tokens=60)
        await bed.post("/v1/completions", prompt="", max_tokens=5)
        bed.p0.prefill_s = 5.0
        running = asyncio.create_task(bed.chat("still running", max_tokens=5))
        await bed.until(lambda: bool(bed.p0.running))
        await agent.say("link", peer="md1", state="incompatible", reason="dtype: a != b")
        await bed.until(lambda: bool(bed.router.fleet.incompatible()))
        assert {name for name, value in (await values(bed)).items() if not value} == set()
        running.cancel()
