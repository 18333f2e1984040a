"""Engines that differ in tensor parallelism continue each other's answers exactly, for families of models.

P runs with two tensor-parallel workers, MD with one; KV crosses in both directions. Booting engines takes a
minute a family, so by default there is the one that has everything: sliding windows beside full attention, in
three KV cache groups, with grouped-query heads. ``PDD_FAMILIES=tiny,tiny-window`` runs both.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.e2e.client import random_prompt
from tests.e2e.pair import CHUNK_TOKENS, FIRST, SECOND, Pair, running_pair

from pdd.engine.models import prepare_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

FAMILIES = os.environ.get("PDD_FAMILIES", "tiny-window").split(",")
KV_GROUPS = {"tiny": "full", "tiny-window": "window(80)+window(80)+full"}
CHUNKS_OF_WINDOWS = {"tiny": 0, "tiny-window": 2 * 3}
"""Chunks of the sliding windows that a long prompt needs, beside one for each position."""

LENGTHS = {FIRST: (1, 31, 32, 33, 64, 97, 300, 512, 513, 1000), SECOND: (32, 97, 512, 1000)}
"""By where the KV comes from; two workers on two cores that do other things too decode slowly."""
MAX_TOKENS = 24
DIRECTIONS = [(FIRST, SECOND), (SECOND, FIRST)]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=FAMILIES)
async def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(family: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """P with two workers, MD with one."""
    cache = Path(os.environ.get("PDD_MODEL_CACHE", ".cache/models"))
    model = prepare_tiny_model(cache, family=family)
    two_workers = {"vllm_args": ["--tensor-parallel-size", "2"]}
    async with running_pair(model, tmp_path_factory.mktemp(family), first=two_workers) as running:
        yield running


async def test_tensor_parallelism_is_no_difference(pair: Pair, family: str) -> None:
    first = (await pair.state(FIRST))["fingerprint"]
    assert first == (await pair.state(SECOND))["fingerprint"]
    assert first["parallelism"].startswith("canonical")
    assert first["kv_groups"] == KV_GROUPS[family]


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
async def test_answers_go_on_exactly(pair: Pair, family: str, source: str, target: str) -> None:
    """Token for token what one engine without tensor parallelism answers; the last one has the figures."""
    for length in LENGTHS[source]:
        prompt = random_prompt(length, seed=length + DIRECTIONS.index((source, target)))
        answer = await pair.handoff(prompt, MAX_TOKENS, source=source, target=target)
        assert answer.tokens == await pair.plain(SECOND, prompt, MAX_TOKENS), length
        assert answer.num_cached == length // CHUNK_TOKENS * CHUNK_TOKENS
        num_positions = length // CHUNK_TOKENS
        assert answer.event["chunks"] <= num_positions + CHUNKS_OF_WINDOWS[family]
        assert answer.event["chunks_sent"] == answer.event["chunks"]
        assert answer.event["tokens"] == answer.num_cached
    assert answer.event["chunks"] == num_positions + CHUNKS_OF_WINDOWS[family]


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
async def test_the_next_turn_sends_only_what_is_new(
    pair: Pair, family: str, source: str, target: str
) -> None:
    """A prompt that P has on its device, and a reply that MD wrote and P never saw."""
    prompt = random_prompt(500, seed=7 + DIRECTIONS.index((source, target)))
    first = await pair.handoff(prompt, MAX_TOKENS, source=source, target=target)
    prompt = [*prompt, *first.tokens, *random_prompt(70, seed=9)]
    second = await pair.handoff(prompt, MAX_TOKENS, source=source, target=target)
    assert second.tokens == await pair.plain(SECOND, prompt, MAX_TOKENS)
    assert second.num_cached == len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS
    assert second.event["chunks_sent"] <= 5 * len(KV_GROUPS[family].split("+"))
