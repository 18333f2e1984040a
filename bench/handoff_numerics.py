"""How often an answer handed over equals one plain engine's, beside how often two plain engines agree.

In float32 both are always. In bfloat16 two plain engines already differ at near ties, so the second figure is
what the first has to be read against. Reports; asserts nothing.

    python -m bench.handoff_numerics --dtype bfloat16 --prompts 24
"""

import argparse
import asyncio
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.e2e.client import PlainEngine, random_prompt
from tests.e2e.fleet import Fleet, free_ports, running_fleet

from pdd.engine.models import prepare_tiny_model
from pdd.launch.fleet import reference_program

MAX_TOKENS = 40


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """The position at which two answers part; None if they do not."""
    if ours == theirs:
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


async def measure(fleet: Fleet, second: PlainEngine, num_prompts: int) -> dict[str, object]:
    """Compare each answer of the relay, and of a second plain engine, with the first plain engine's."""
    relayed: list[int | None] = []
    plain: list[int | None] = []
    for i in range(num_prompts):
        prompt = random_prompt(40 + 61 * i % 1400, seed=9000 + i)
        reference = await fleet.reference.complete(prompt, max_tokens=MAX_TOKENS)
        answer = await fleet.router(("one-shot", "catch-up")[i % 2]).complete(prompt, max_tokens=MAX_TOKENS)
        relayed.append(first_difference(answer.tokens, reference))
        plain.append(first_difference(await second.complete(prompt, max_tokens=MAX_TOKENS), reference))
    return {
        "dtype": fleet.config.model.dtype,
        "prompts": num_prompts,
        "tokens_each": MAX_TOKENS,
        "handoffs_equal_to_plain": relayed.count(None),
        "second_plain_equal_to_plain": plain.count(None),
        "handoffs_part_at": [position for position in relayed if position is not None],
        "second_plain_parts_at": [position for position in plain if position is not None],
    }


async def run(dtype: str, num_prompts: int) -> dict[str, object]:
    """Boot a fleet and a second plain engine, measure, and end both."""
    model_dir = prepare_tiny_model(Path(os.environ.get("PDD_MODEL_CACHE", ".cache/models")))
    with tempfile.TemporaryDirectory(prefix="pdd-bench-") as run_dir:
        async with running_fleet(model_dir, Path(run_dir), dtype=dtype) as fleet:
            (port,) = free_ports(1)
            program = replace(reference_program(fleet.config, port=port), name="engine-reference-2")
            await fleet.supervisor.start(program)
            second = PlainEngine(fleet.session, f"http://127.0.0.1:{port}")
            return await measure(fleet, second, num_prompts)


def main() -> None:
    """Print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=24)
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(run(arguments.dtype, arguments.prompts))))


if __name__ == "__main__":
    main()
