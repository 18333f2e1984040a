"""Seeds and penalties go over the handoff: token for token what one plain engine answers."""

import asyncio
import random
from typing import Any

import pytest
from tests.e2e.client import HANDED_OVER_TOKENS, VOCABULARY, Answer, random_prompt
from tests.e2e.fleet import Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

FEW_TOKENS = random.Random(5).sample(VOCABULARY, k=25)
"""So few that the model repeats itself, which is what penalties are about."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "seed": {"seed": 11, "temperature": 1.0},
    "seed-truncated": {"seed": 12, "temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.001},
    "presence": {"presence_penalty": 2.0, "allowed_token_ids": FEW_TOKENS},
    "frequency": {"frequency_penalty": -0.5, "allowed_token_ids": FEW_TOKENS},
    "all": {
        "seed": 13, "temperature": 0.7, "presence_penalty": 0.7, "frequency_penalty": 0.3,
        "repetition_penalty": 1.2, "allowed_token_ids": FEW_TOKENS,
    },
}  # fmt: skip


async def held_until(fleet: Fleet, mode: str, prompt: list[int], gap: int, **sampling: Any) -> Answer:
    """An answer that RLD has made ``gap`` tokens of when the line lets MD take over."""
    reached = asyncio.Event()

    def on_token(num_tokens: int) -> None:
        if num_tokens > gap:
            reached.set()

    await fleet.line.hold()
    try:
        request = asyncio.create_task(
            fleet.router(mode).complete(prompt, max_tokens=HANDED_OVER_TOKENS, on_token=on_token, **sampling)
        )
        await asyncio.wait_for(reached.wait(), 120)
    finally:
        await fleet.line.resume()
    return await request


@pytest.mark.parametrize("mode", ["one-shot", "catch-up"])
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_sampled_answers_are_those_of_one_plain_engine(fleet: Fleet, name: str, mode: str) -> None:
    number = list(SAMPLINGS).index(name)
    prompt = random_prompt(200 + 50 * number, seed=4000 + number + 10 * (mode == "one-shot"))
    answer, expected = await asyncio.gather(
        held_until(fleet, mode, prompt, 5 + 7 * number, **SAMPLINGS[name]),
        fleet.reference.complete(prompt, max_tokens=HANDED_OVER_TOKENS, **SAMPLINGS[name]),
    )
    assert answer.headers["x-pdd-pipeline"] == "p-rld-md"
    assert answer.record["eager_tokens"] >= 5 + 7 * number
    assert answer.record["handoff_mode"] == mode
    assert answer.tokens == expected


async def test_a_seeded_prompt_of_several_steps_is_drawn_by_position(fleet: Fleet) -> None:
    """Every step of a prompt draws once and drops it; vLLM's CPU backend ends there, so the reference is PDD.

    The second answer finds the prompt's KV and takes one step.
    """
    prompt = random_prompt(1300, seed=4100)
    cold, warm = [
        (await fleet.router("p-md").complete(prompt, max_tokens=30, **SAMPLINGS["seed"])).tokens
        for _ in range(2)
    ]
    assert cold == warm
    plain = await fleet.reference.complete(prompt, max_tokens=1)  # its cache is warm now, too
    assert len(plain) == 1
    assert cold == await fleet.reference.complete(prompt, max_tokens=30, **SAMPLINGS["seed"])
