"""What the router believes of real engines' caches, from their KV events alone."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.client import HANDED_OVER_TOKENS, random_prompt, wait_until
from tests.e2e.fleet import CHUNK_TOKENS, Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


async def believed_chunks(fleet: Fleet, mode: str, engine_id: str) -> int:
    """Chunks a router believes to be in an engine's store."""
    async with fleet.session.get(f"{fleet.router(mode).url}/metrics") as response:
        text = await response.text()
    (value,) = [
        sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "pdd_cache_belief_chunks"
        for sample in family.samples
        if sample.labels["engine"] == engine_id
    ]
    return int(value)


async def predicted_missing_chunks(fleet: Fleet, mode: str, request_id: str) -> int:
    """Chunks of a prompt that MD was believed to lack when the request was planned."""
    url = f"{fleet.router(mode).url}/pdd/decisions?request={request_id}"
    async with fleet.session.get(url) as response:
        decisions = (await response.json())["decisions"]
    (pipeline,) = [decision for decision in decisions if decision["policy"] == "pipeline"]
    return int(pipeline["arguments"]["facts"]["delta"]["missing_chunks"])


@pytest.mark.parametrize("mode", ["p-md", "one-shot"])
async def test_the_second_turns_hits_are_predicted_to_the_block(fleet: Fleet, mode: str) -> None:
    router = fleet.router(mode)
    first = random_prompt(700, seed=9000 + len(mode))
    before = await believed_chunks(fleet, mode, "md0")
    one = await router.complete(first, max_tokens=HANDED_OVER_TOKENS)
    known = before + (len(first) + HANDED_OVER_TOKENS - 1) // CHUNK_TOKENS

    async def is_known() -> bool:
        return await believed_chunks(fleet, mode, "md0") >= known

    await wait_until(is_known, what="the router hearing what MD stored", timeout_s=20)
    second = [*first, *one.tokens, *random_prompt(100, seed=9100 + len(mode))]
    two = await router.complete(second, max_tokens=HANDED_OVER_TOKENS)
    assert abs(two.record["predicted_cached_tokens"] - two.record["cached_tokens"]) <= CHUNK_TOKENS
    assert two.record["cached_tokens"] >= len(first) - CHUNK_TOKENS
    request_id = two.headers["X-Request-Id"]
    sent = round(two.record["wan_bytes"] / fleet.chunk_bytes)
    assert abs(await predicted_missing_chunks(fleet, mode, request_id) - sent) <= 1
    assert sent <= (len(second) - len(first) - len(one.tokens)) // CHUNK_TOKENS + 2
