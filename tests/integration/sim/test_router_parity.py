"""The simulator decides as the router did: what a router recorded, asked again as a run asks it."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, cast

from tests.kit.bed import running_bed

from pdd.policy.replay import plain
from pdd.sim.build import build_mains, build_pools, build_relays
from pdd.sim.decisions import Crossing, Decisions
from pdd.sim.fleet import build_parts
from pdd.sim.kernel import Kernel
from pdd.sim.line import Line
from pdd.sim.main_site import MainSite
from pdd.sim.relay_site import RelaySite
from pdd.sim.scenario_file import load_scenario
from pdd.sim.workload.stream import Workload, build_paths

PAPER = build_parts(
    load_scenario(
        Path(__file__).parents[3] / "examples" / "scenarios" / "paper.toml",
        overrides=("fleet.prefill.max_batch=2", "fleet.relay.max_batch=2", "fleet.main.max_batch=2"),
    )
)
BLOCK_TOKENS = 64
ROLES = {
    "p0": ("prefill", "a"),
    "rld0": ("relay", "a"),
    "rld1": ("relay", "a"),
    "md0": ("main", "b"),
    "md1": ("main", "b"),
}
UNMODELLED = {"forced", "not_relayable", "no_relay_engine", "no_main_engine"}
"""Why the router chose a pipeline where a run has no such state: nothing is forced or lost there."""


async def _recorded() -> list[dict[str, Any]]:
    """Decisions of a router whose line is fast, then slow, on relays that fill up."""
    policy = {"second_token_slo_s": 0.05, "outlier_margin_ratio": 0.5}
    async with running_bed(roles=ROLES, policy=policy) as bed:
        bed.agents["p0"].landing_s.update(md0=0.2, md1=0.2)
        for relay in ("rld0", "rld1"):
            bed.engines[relay].itl_s = 0.01  # the longest answers are not over when their KV lands
        links = bed.router.fleet.engines["p0"].agent.links
        for rate_bytes_per_s in (1e12, 3e5, 1e2):
            for peer in ("md0", "md1"):
                links[peer] = {"state": "up", "rate_bytes_per_s": rate_bytes_per_s, "rtt_s": 0.01}
            prompts = [f"say {n} {rate_bytes_per_s} " * 40 for n in range(16)]
            lengths = [1 + 29 * (n % 3) for n in range(16)]
            asked = zip(prompts, lengths, strict=True)
            await asyncio.gather(
                *(bed.post("/v1/completions", prompt=text, max_tokens=most) for text, most in asked)
            )
        return list(bed.router.decisions.of())


@dataclass
class LineThen:
    """A line in the state of a recorded snapshot."""

    share_bytes_per_s: float
    waiting_bytes: float

    def queue_s(self) -> float:
        return self.waiting_bytes / self.share_bytes_per_s


class SimulatorThen:
    """A run's decision maker, put into the state of recorded snapshots."""

    def __init__(self) -> None:
        self.tokens, self.output = 32 * BLOCK_TOKENS, 2

    def decisions(
        self,
        *,
        link: Mapping[str, Any],
        block_bytes: int = 1,
        running: int = 0,
        capacity: int = 1,
        **policy: Any,
    ) -> tuple[Decisions, RelaySite, MainSite]:
        section = PAPER.scenario.policy.model_copy(update=policy)
        parts = replace(PAPER, scenario=PAPER.scenario.model_copy(update={"policy": section}))
        work = Workload(
            name="recorded",
            block_tokens=BLOCK_TOKENS,
            arrival_s=[0.0],
            input_tokens=[self.tokens],
            output_tokens=[self.output],
            parent=[-1],
            shared_blocks=[0],
            keeps_output=[False],
        )
        kernel, paths = Kernel(), build_paths(work)
        pool, _ = build_pools(kernel, parts, work, paths, on_sendable=_no, on_done=_no)
        mains = build_mains(kernel, parts, work, paths, on_start=_none, on_done=_no)
        relays = build_relays(kernel, parts, work, pool, on_start=_none, on_done=_no)
        assert relays is not None
        relays.capacity, relays.load = capacity, [running]
        crossing = Crossing(
            line=cast(Line, LineThen(link["rate_bytes_per_s"], link["queued_bytes"])),
            bytes_per_token=block_bytes / BLOCK_TOKENS,
            block_bytes=block_bytes,
            sent_shrink=1.0,
            rtt_s=link["rtt_s"],
            flow_bytes_per_s=link["rate_bytes_per_s"],
            fast_bytes_per_s=inf,
        )
        decide = Decisions(parts, work, mains=mains, relays=relays, crossing=crossing, homes={})
        return decide, relays, mains


IDLE_LINK = {"rate_bytes_per_s": 1e9, "queued_bytes": 0, "rtt_s": 0.0}


def _no(_: int) -> None:
    """Nothing runs here."""


def _none(_: int) -> None:
    """Nobody starts here."""


def _pipeline(facts: Mapping[str, Any]) -> str:
    simulator = SimulatorThen()
    simulator.output = facts["max_tokens"]
    decide, _, _ = simulator.decisions(
        link=facts["link"],
        block_bytes=facts["delta"]["chunk_bytes"],
        running=facts["relay"]["running"],
        capacity=facts["relay"]["capacity"],
        second_token_slack=facts["second_token_slo_s"],
    )
    relay = decide.relay_for(0, facts["delta"]["missing_chunks"] * BLOCK_TOKENS)
    return "p-rld-md" if relay >= 0 else "p-md"


def _outlier(facts: Mapping[str, Any]) -> bool:
    bound = min(facts["max_tokens"], facts["history_tokens"] or facts["max_tokens"])
    decide, relays, _ = SimulatorThen().decisions(
        link={"rate_bytes_per_s": 1.0, "queued_bytes": 0, "rtt_s": 0.0},
        hold_outliers=True,
        outlier_output_tokens=bound,
        outlier_margin_ratio=facts["margin_ratio"],
        outlier_returning_ratio=facts["returning_ratio"],
    )
    relays.engines[0].slow_to(facts["relay_itl_s"])
    relays.take(0, 0)
    known_ratio = facts["known_ratio"]
    return decide.wan_priority(0, facts["predicted_wan_s"], known_ratio=known_ratio) < 0


def _handoff(arguments: Mapping[str, Any]) -> Any:
    params = dict(arguments["params"])
    assert params.pop("forced") == "auto"
    decide, _, _ = SimulatorThen().decisions(link=IDLE_LINK, **params)
    return plain(
        decide.handoff(
            gap_tokens=arguments["gap_tokens"],
            relay_load_ratio=arguments["relay_load_ratio"],
            previous=arguments["previous"],
        )
    )


def _least(engines: Sequence[Mapping[str, Any]]) -> str:
    """The engine a run calls the least loaded, of equal ones in the order of their ids."""
    by_id = sorted(engines, key=lambda engine: str(engine["id"]))
    _, relays, _ = SimulatorThen().decisions(link=IDLE_LINK)
    relays.load = [0] * len(by_id)
    on_relays = [relay for relay, engine in enumerate(by_id) for _ in range(engine["running"])]
    for request, relay in enumerate(on_relays):
        relays.take(request, relay)
    return str(by_id[relays.least]["id"])


async def test_a_run_decides_what_the_router_decided() -> None:
    seen: Counter[tuple[str, object]] = Counter()
    for entry in await _recorded():
        policy, arguments, decision = entry["policy"], entry["arguments"], entry["decision"]
        if policy == "pipeline" and decision["reason"] not in UNMODELLED:
            assert _pipeline(arguments["facts"]) == decision["pipeline"], entry
            seen[policy, decision["reason"]] += 1
        elif policy == "outlier" and decision["reason"] in ("shorter_than_wan", "longer_than_wan", "returns"):
            assert _outlier(arguments["facts"]) is decision["is_outlier"], entry
            seen[policy, decision["is_outlier"]] += 1
        elif policy == "handoff":
            assert _handoff(arguments) == decision, entry
            seen[policy, decision["mode"]] += 1
        elif policy == "placement" and {engine["kv_usage_ratio"] for engine in arguments["engines"]} == {0.0}:
            assert _least(arguments["engines"]) == decision["order"][0], entry
            seen[policy, decision["order"][0] in ("rld1", "md1")] += 1
    assert set(seen) >= {
        ("pipeline", "wan_within_slo"),
        ("pipeline", "wan_beyond_slo"),
        ("pipeline", "nothing_follows"),
        ("outlier", True),
        ("outlier", False),
        ("placement", True),
        ("placement", False),
    }, seen
    assert "handoff" in {policy for policy, _ in seen}  # which mode is a question of the fakes' load
