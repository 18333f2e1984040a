"""What the router decided can be decided again from what it wrote down, with the same result."""

import asyncio
import json
from pathlib import Path

from tests.kit.bed import running_bed

from pdd.policy.replay import POLICIES, decide_again

ROLES = {
    "p0": ("prefill", "a"),
    "p1": ("prefill", "a"),
    "rld0": ("relay", "a"),
    "md0": ("main", "b"),
    "md1": ("main", "c"),
}


async def test_recorded_decisions_are_made_again_alike(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    router = {"decision_log": str(file), "max_concurrent_requests": 3, "queue_size": 2}
    async with running_bed(roles=ROLES, router=router, policy={"second_token_slo_s": 0.01}) as bed:
        for agent in ("p0", "p1"):
            bed.agents[agent].landing_s.update(md0=0.05, md1=0.05)
        questions = [bed.post("/v1/completions", prompt=f"question {n}", max_tokens=40) for n in range(12)]
        answers = await asyncio.gather(*questions)
        assert {answer.status for answer in answers} == {200, 429}
        await bed.chat("not relayable", max_tokens=3, response_format={"type": "json_object"})
        bed.router.fleet.engines["p0"].agent.links["md0"] = {"state": "down"}
        bed.router.fleet.engines["p1"].agent.links["md0"] = {"state": "down"}
        body = await bed.chat("over a line that is down, so it takes for ever", max_tokens=3)
        async with bed.client.get(f"{bed.url}/pdd/decisions") as page:
            served = (await page.json())["decisions"]
        record = await bed.record(body["id"])
        async with bed.client.get(f"{bed.url}/pdd/decisions", params={"request": record["id"]}) as page:
            of_one = (await page.json())["decisions"]
    assert {entry["policy"] for entry in of_one} >= {"entry", "placement", "pipeline", "outlier"}
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert written == served
    assert {entry["policy"] for entry in written} == set(POLICIES)
    for entry in written:
        assert decide_again(entry["policy"], entry["arguments"]) == entry["decision"]
