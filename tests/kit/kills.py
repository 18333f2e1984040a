"""kill -9 at random moments on real engines; every answer that ends is compared with a plain engine's.

    python -m tests.kit.kills --kills 40 --seed 1

P, RLD and MD with their agents run under the launcher, which starts again what ends, as ``pdd serve`` does.
Killed are engines, agents, and connections: the router's to engines and agents, and KV's over the line. An
answer may fail only if no path was left at some moment of its life: for one without a token yet, P and a
decode engine; for one that has begun, a decode engine.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from tests.e2e.client import VOCABULARY, Answer, text_of, wait_until
from tests.e2e.conftest import orphaned_shared_memory
from tests.e2e.fleet import CHUNK_TOKENS, Fleet, running_fleet

from pdd.core.errors import EngineError
from pdd.engine.models import prepare_tiny_model
from pdd.router.detokenize import load_tokenizer

ENGINES = ("p0", "rld0", "md0")
DECODERS = ("rld0", "md0")
WEIGHTS = {"p0": 1, "rld0": 3, "md0": 3}
"""Without P no answer begins, so most kills are of those that answers can do without."""
KINDS = {"engine": 0.5, "agent": 0.25, "connection": 0.25}
SECOND_ENGINE_RATIO = 0.2
"""Of the kills of an engine while another one still starts; all of them would leave no path most of the
time."""
CLIENTS = 4
PAUSE_S = (1.0, 15.0)
"""Between two kills: shorter than a restart, so that failures meet."""
P_GONE_S = 15.0
THINK_S = 0.2
SETTLED_AFTER_S = 2.0
"""Events come within 0.2 s; repeated ones within a second more."""
HEALED_WITHIN_S = 600.0
FREE_WITHIN_S = 90.0
"""The lease is 60 s."""
CANCELLED_RATIO = 0.1


class _LeaveError(Exception):
    """The client has seen enough."""


@dataclass(slots=True)
class Outage:
    """From a kill until the router counts the engine in again; None if it has not yet."""

    engine: str
    begun_s: float
    ended_s: float | None = None

    def covers(self, engine: str, moment_s: float) -> bool:
        """Whether the engine could not be counted on at that moment."""
        return (
            engine == self.engine
            and self.begun_s <= moment_s
            and (self.ended_s is None or moment_s <= self.ended_s)
        )


@dataclass(slots=True)
class Report:
    """What was done and what came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    pipelines: Counter[str] = field(default_factory=Counter)
    survived: int = 0
    tokens: int = 0
    fast_path_tokens: int = 0
    longest_gap_s: float = 0.0
    predictions: list[tuple[int, int]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


class Kills:
    """One run over a fleet; see the module."""

    def __init__(self, fleet: Fleet, *, seed: int) -> None:
        self.report = Report()
        self._fleet = fleet
        self._router = next(iter(fleet.routers.values()))
        self._tokenizer = load_tokenizer(fleet.config.model.path)
        self._rng = random.Random(seed)
        self._outages: list[Outage] = []
        self._watches: list[asyncio.Task[None]] = []
        self._histories: list[list[int]] = [[] for _ in range(CLIENTS)]
        self._is_over = False

    async def run(self, num_kills: int) -> Report:
        """Ask all the time, kill now and then, wait until all is whole, and see that nothing is left."""
        router_pid = next(c.pid for n, c in self._fleet.children.items() if n.startswith("router"))
        files_before = psutil.Process(router_pid).num_fds()
        await self._check_prediction()
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(self._client(number))
            for _ in range(num_kills):
                await asyncio.sleep(self._rng.uniform(*PAUSE_S))
                await self._wait_for_prefill()
                await self._kill()
            await asyncio.wait_for(asyncio.gather(*self._watches), HEALED_WITHIN_S)
            await asyncio.sleep(PAUSE_S[1])  # some whole answers of the healed fleet
            self._is_over = True
        await self._check_prediction()
        self.report.fast_path_tokens = await self._router.fast_path_tokens()
        await self._check_free()
        if (files := psutil.Process(router_pid).num_fds()) > files_before + 40:
            self._violation(f"FREE: the router has {files} open files, {files_before} before")
        return self.report

    # ---- kills

    async def _wait_for_prefill(self) -> None:
        """Without P no answer begins, and kills would soon meet none: a few follow, then it is awaited."""

        async def is_worth_it() -> bool:
            now_s = time.monotonic()
            return not any(
                outage.engine == "p0" and outage.ended_s is None and now_s - outage.begun_s > P_GONE_S
                for outage in self._outages
            )

        await wait_until(is_worth_it, what="p0 being back", timeout_s=HEALED_WITHIN_S)

    async def _kill(self) -> None:
        kind = self._rng.choices(list(KINDS), weights=list(KINDS.values()))[0]
        up = [engine for engine in ENGINES if not self._is_out(engine, time.monotonic())]
        if kind == "engine" and len(up) < len(ENGINES) and self._rng.random() > SECOND_ENGINE_RATIO:
            kind = self._rng.choice(("agent", "connection"))
        if kind == "connection" or not up:
            kind, what = "connection", self._rng.choice(self._fleet.config.links[0].forwards).listen
            await self._fleet.line.cut(what)
        else:
            what = self._rng.choices(up, weights=[WEIGHTS[engine] for engine in up])[0]
            outage = Outage(engine=what, begun_s=time.monotonic())
            self._outages.append(outage)
            (self._fleet.kill_engine if kind == "engine" else self._fleet.kill_agent)(what)
            self._watches.append(asyncio.create_task(self._watch(outage, kind)))
        self.report.kills[kind if kind == "connection" else f"{kind} {what}"] += 1
        self._tell(f"kill {kind} {what}; so far {dict(self.report.ends)}")

    async def _watch(self, outage: Outage, kind: str) -> None:
        """The outage ends when the router, which has noticed it, counts the engine in again."""

        async def is_noticed() -> bool:
            return not await self._is_in(outage.engine)

        with contextlib.suppress(TimeoutError):  # an agent may be back before anybody looked
            await wait_until(is_noticed, what="the router noticing", timeout_s=30 if kind == "engine" else 8)
        await wait_until(
            lambda: self._is_in(outage.engine), what=f"{outage.engine} back", timeout_s=HEALED_WITHIN_S
        )
        outage.ended_s = time.monotonic()
        self._tell(f"{outage.engine} is back")

    def _tell(self, what: str) -> None:
        print(f"{time.monotonic():.1f} {what}", file=sys.stderr, flush=True)

    def _violation(self, what: str) -> None:
        self.report.violations.append(what)
        self._tell(what)

    async def _is_in(self, engine: str) -> bool:
        try:
            return await self._fleet.is_used_by_every_router(engine)
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _is_out(self, engine: str, moment_s: float) -> bool:
        return any(outage.covers(engine, moment_s) for outage in self._outages)

    def _had_no_path(self, begun_s: float, first_token_s: float | None, ended_s: float) -> bool:
        """Whether at some moment nothing was left that could have served the request."""
        moments = [begun_s, ended_s]
        for outage in self._outages:
            moments += [outage.begun_s, outage.ended_s or ended_s]
        for moment_s in moments:
            if not begun_s <= moment_s <= ended_s:
                continue
            no_decoder = all(self._is_out(engine, moment_s) for engine in DECODERS)
            has_begun = first_token_s is not None and moment_s >= first_token_s
            if no_decoder or (not has_begun and self._is_out("p0", moment_s)):
                return True
        return False

    # ---- requests

    async def _check_prediction(self) -> None:
        """The caches of every engine are known to the block, before the kills and after them."""
        first = self._rng.choices(VOCABULARY, k=500)
        one = await self._router.complete(first, max_tokens=40)
        await asyncio.sleep(SETTLED_AFTER_S)
        second = [*first, *one.tokens, *self._rng.choices(VOCABULARY, k=40)]
        record = (await self._router.complete(second, max_tokens=4)).record
        predicted, found = record["predicted_cached_tokens"], record["cached_tokens"]
        self.report.predictions.append((predicted, found))
        if abs(predicted - found) > CHUNK_TOKENS or found < len(first) - CHUNK_TOKENS:
            self._violation(f"HIT: {predicted} tokens predicted, {found} found of {len(first)}: {record}")

    async def _client(self, number: int) -> None:
        rng = random.Random(self._rng.random())
        while not self._is_over:
            await wait_until(self._fleet.is_ready, what="a whole path", timeout_s=HEALED_WITHIN_S)
            prompt = self._prompt(rng, number)
            max_tokens = rng.choice([1, 8, 40, 100, 200])
            cancel_after = rng.randint(1, max_tokens) if rng.random() < CANCELLED_RATIO else None
            await self._ask(number, prompt, max_tokens, cancel_after)
            await asyncio.sleep(rng.uniform(0, THINK_S))

    def _prompt(self, rng: random.Random, number: int) -> list[int]:
        new = rng.choices(VOCABULARY, k=rng.choice([3, 31, 32, 100, 400, 900]))
        history = self._histories[number]
        if len(history) > 1500 or rng.random() < 0.5:
            history.clear()
        return history + new

    async def _ask(self, number: int, prompt: list[int], max_tokens: int, cancel_after: int | None) -> None:
        """Ask and compare; every other client asks for plain text, which goes by the router's fast path."""

        def on_token(num_tokens: int) -> None:
            if cancel_after is not None and num_tokens >= cancel_after:
                raise _LeaveError

        with_ids = number % 2 == 0
        begun_s = time.monotonic()
        answer = Answer()
        end = "complete"
        try:
            await self._router.complete(
                prompt, max_tokens=max_tokens, on_token=on_token, into=answer, return_token_ids=with_ids
            )
        except _LeaveError:
            end = "cancelled"
        except (EngineError, aiohttp.ClientError, TimeoutError) as error:
            end = self._judge_loss(begun_s, time.monotonic(), answer, f"{len(prompt)} + {max_tokens}", error)
            await asyncio.sleep(0.5)  # as a client that is told to try again later
        self.report.ends[end] += 1
        self._count(answer)
        expected = await self._fleet.reference.complete(prompt, max_tokens=max_tokens)
        got: Sequence[Any] = answer.tokens
        wanted: Sequence[Any] = expected
        if not with_ids:
            has_eos = answer.finish_reason == "stop"
            got, wanted = (
                answer.text,
                text_of(self._tokenizer, prompt, expected[:-1] if has_eos else expected),
            )
        if got != wanted[: len(got)] or (end == "complete" and got != wanted):
            at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), "the end")
            self._violation(
                f"TOK: {len(prompt)} + {max_tokens} tokens, {end} with {len(got)} of {len(wanted)}, "
                f"differs at {at}: {answer.record}"
            )
        if end == "complete":
            self._histories[number][:] = prompt + expected

    def _judge_loss(self, begun_s: float, ended_s: float, answer: Answer, size: str, error: Exception) -> str:
        seen = answer.arrival_times_s
        if self._had_no_path(begun_s, seen[0] if seen else None, ended_s):
            return "lost without a path"
        self._violation(f"END: {size} tokens, {len(seen)} seen, {begun_s:.1f} to {ended_s:.1f}: {error!r}")
        return "lost"

    def _count(self, answer: Answer) -> None:
        report, record = self.report, answer.record
        report.tokens += len(answer.arrival_times_s)
        gaps = [b - a for a, b in pairwise(answer.arrival_times_s)]
        report.longest_gap_s = max([report.longest_gap_s, *gaps])
        if record:
            report.pipelines[str(record["pipeline"])] += 1
            report.survived += bool(record["failures"] or record["attempts"] > 1)

    # ---- the end

    async def _check_free(self) -> None:
        async def is_free() -> bool:
            states = [await self._fleet.agent_state(engine) for engine in ENGINES]
            return await self._fleet.every_engine_is_free() and not any(
                state["transfers"] or state["store"]["leased"] for state in states
            )

        try:
            await wait_until(is_free, what="everything being free", timeout_s=FREE_WITHIN_S)
        except TimeoutError as error:
            running = await self._fleet.requests_on_engines()
            states = {e: await self._fleet.agent_state(e) for e in ENGINES}
            left = {e: (s["transfers"], s["store"]) for e, s in states.items()}
            self._violation(f"FREE: {error}: {running}, {left}")


async def kills(*, num_kills: int, seed: int, model_dir: Path, run_dir: Path) -> Report:
    """The report of one run over a fleet of its own, all of which has ended."""
    orphans_before = orphaned_shared_memory()
    async with running_fleet(model_dir, run_dir, routers={"auto": {}}, all_through_line=True) as fleet:
        report = await Kills(fleet, seed=seed).run(num_kills)
        pids = [child.pid for child in fleet.children.values()]
    if left := [pid for pid in pids if psutil.pid_exists(pid)]:
        report.violations.append(f"FREE: processes {left}")
    if orphans := orphaned_shared_memory() - orphans_before:
        report.violations.append(f"FREE: shared memory {orphans}")
    return report


def main() -> int:
    """Run and print the report as the last line; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, help="logs are kept there; default: a temporary folder")
    given = parser.parse_args()
    model_dir = prepare_tiny_model(Path(os.environ.get("PDD_MODEL_CACHE", ".cache/models")))
    with contextlib.ExitStack() as stack:
        run_dir = given.run_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdd-kills-")))
        run_dir.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(
            kills(num_kills=given.kills, seed=given.seed, model_dir=model_dir, run_dir=run_dir)
        )
    print(
        json.dumps(
            {
                "kills": dict(report.kills),
                "num_kills": sum(report.kills.values()),
                "requests": sum(report.ends.values()),
                "ends": dict(report.ends),
                "survived_a_failure": report.survived,
                "pipelines": dict(report.pipelines),
                "tokens": report.tokens,
                "fast_path_tokens": report.fast_path_tokens,
                "longest_gap_s": round(report.longest_gap_s, 2),
                "predicted_and_found_tokens": report.predictions,
                "violations": report.violations[:20],
                "num_violations": len(report.violations),
            }
        )
    )
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
