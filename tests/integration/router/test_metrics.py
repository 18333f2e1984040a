"""Every metric of the router moves when what it counts happens."""

import asyncio
from contextlib import ExitStack

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
        roles=ROLES,
        router={"handoff": "catch-up", "max_concurrent_requests": 2, "queue_size": 1},
        policy={"second_token_slo_s": 0.0},
        kv_events=True,
    ) as bed:
        assert (await values(bed))["pdd_requests_in_flight"] == 0
        agent = bed.agents["p0"]
        agent.lands_after.update({"md0": (bed.rld0, 12), "md1": (bed.rld0, 12)})
        receive = bed.md0.receive
        bed.md0.receive = lambda tokens: None  # type: ignore[method-assign]  # evicted at once
        await bed.chat("a handoff with a shortfall", max_tokens=60)
        bed.md0.receive = receive  # type: ignore[method-assign]
        await bed.chat("a handoff with a shortfall", max_tokens=60)
        relay = bed.router.fleet.engines["rld0"]
        with ExitStack() as others:
            for _ in range(7):
                others.enter_context(relay.claims.open())
            await bed.chat("a handoff of a busy relay", max_tokens=60)
        await bed.chat("a handoff of an idle relay", max_tokens=60)
        agent.lands_after.clear()
        streamed = [{"role": "user", "content": "by the fast path"}]
        await (await bed.post("/v1/chat/completions", messages=streamed, stream=True, max_tokens=60)).text()
        await bed.chat("structured", max_tokens=5, response_format={"type": "json_object"})
        bed.router.fleet.engines["p0"].agent.links["md0"]["rate_bytes_per_s"] = 100.0
        bed.router.fleet.engines["p0"].agent.links["md1"]["rate_bytes_per_s"] = 100.0
        await bed.chat("an outlier, sent over a line of a hundred bytes a second", max_tokens=2)
        bed.md0.kill_stream_after = 3
        await bed.chat("lost in the middle", max_tokens=60)
        await bed.post("/v1/completions", prompt="", max_tokens=5)
        pausing = asyncio.create_task(bed.chat("nobody is left", max_tokens=500))
        await bed.until(lambda: bool(bed.rld0.running))
        for engine in (bed.rld0, bed.md0, bed.md1):
            await engine.stop()
        await bed.until(lambda: bed.router.metrics.pauses.collect()[0].samples[0].value > 0)
        for engine in (bed.rld0, bed.md0, bed.md1):
            await engine.start()
        await pausing
        bed.p0.prefill_s = 60.0  # cancelled at the end; until then they fill the router
        await agent.say("link", peer="md1", state="incompatible", reason="dtype: a != b")
        await bed.until(lambda: bool(bed.router.fleet.incompatible()))
        running = [asyncio.create_task(bed.chat(f"still running {n}", max_tokens=5)) for n in range(3)]
        await bed.until(lambda: bed.router.metrics.queued.collect()[0].samples[0].value > 0)
        assert (await bed.post("/v1/completions", prompt="refused", max_tokens=5)).status == 429
        for _ in range(3):
            bed.router.fleet.engines["md1"].note_failure()
        device = bed.router.fleet.engines["p0"].belief
        await bed.until(lambda: device.num_device_blocks > 0)
        assert {name for name, value in (await values(bed)).items() if not value} == set()
        for task in running:
            task.cancel()
