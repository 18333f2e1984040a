"""Mixed traffic and random trouble over a bed of fakes; every answer is judged, and so is what it leaves.

    python -m tests.kit.soak --minutes 30 --seed 1 --uvloop

Each role has two engines and at most one of them in trouble at a time, so one path is always left: an answer
may pause, but it must not end with an error.
"""

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import prometheus_client
import uvloop
from prometheus_client.samples import Sample
from tests.kit.bed import Bed, running_bed
from tests.kit.soak_trouble import Trouble

ROLES = {
    "p0": ("prefill", "a"),
    "p1": ("prefill", "a"),
    "rld0": ("relay", "a"),
    "rld1": ("relay", "a"),
    "md0": ("main", "b"),
    "md1": ("main", "c"),
}
LEASE_S = 2.0
FREE_WITHIN_S = LEASE_S + 5.0
DEADLINE_S = 60.0
CANCELLED_RATIO = 0.2
WORDS = [
    "light",
    "house",
    "keeper",
    "storm",
    "lamp",
    "glass",
    "brass",
    "stair",
    "tower",
    "night",
    "ship",
    "rock",
    "foam",
    "gull",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request and what a plain engine would answer."""

    id: str
    path: str
    body: dict[str, Any]
    prompt: list[int]
    cancel_after_s: float | None

    @property
    def may_end_early(self) -> bool:
        """Whether its state cannot move to another engine, so that a lost engine ends it."""
        return "response_format" in self.body


@dataclass(slots=True)
class Answer:
    """What the client saw."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] | None = None
    errors: list[str] = field(default_factory=list)
    is_done: bool = False
    is_cancelled: bool = False


@dataclass(slots=True)
class Report:
    """Counts and everything that was wrong."""

    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    violations: list[str] = field(default_factory=list)
    num_faults: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    lanes: dict[str, int] = field(default_factory=dict)
    lane_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """For the last line of a run."""
        return {
            "requests": sum(self.ends.values()),
            "ends": dict(self.ends),
            "tokens": self.tokens,
            "faults": dict(self.num_faults),
            "longest_s": round(self.longest_s, 2),
            "lanes": self.lanes,
            "lane_tokens": self.lane_tokens,
            "violations": self.violations[:20],
            "num_violations": len(self.violations),
        }


class Soak:
    """One run; see the module."""

    def __init__(self, bed: Bed, *, seed: int, concurrency: int) -> None:
        self.report = Report()
        self._bed = bed
        self._rng = random.Random(seed)
        self._concurrency = concurrency
        self._count = 0
        self._checks: set[asyncio.Task[None]] = set()
        self._histories: list[list[dict[str, str]]] = [[] for _ in range(4)]

    async def run(self, duration_s: float) -> Report:
        """Ask until the time is over, then wait for what is open and see that nothing is left."""
        baseline = _tasks()
        trouble = Trouble(self._bed, random.Random(self._rng.random()), self.report.num_faults)
        troubles = asyncio.create_task(trouble.run())
        ends_s = time.monotonic() + duration_s
        async with asyncio.TaskGroup() as clients:
            for _ in range(self._concurrency):
                clients.create_task(self._client(ends_s))
        troubles.cancel()
        await asyncio.gather(troubles, return_exceptions=True)
        await trouble.heal_all()
        await asyncio.gather(*self._checks)
        await self._check_end(baseline)
        metrics = self._bed.router.metrics
        self.report.lane_tokens = int(sum(s.value for s in _totals(metrics.fast_path_tokens)))
        self.report.lanes = {s.labels["reason"]: int(s.value) for s in _totals(metrics.fast_path_lanes)}
        return self.report

    async def _client(self, ends_s: float) -> None:
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < ends_s:
                question = self._question()
                begun_s = time.monotonic()
                answer = await self._ask(session, question)
                self.report.longest_s = max(self.report.longest_s, time.monotonic() - begun_s)
                self._judge(question, answer)
                task = asyncio.create_task(self._check_free(question))
                self._checks.add(task)
                task.add_done_callback(self._checks.discard)

    # ---- questions

    def _question(self) -> Question:
        rng = self._rng
        self._count += 1
        kind = rng.choice(["chat"] * 5 + ["completion"] * 3 + ["conversation"] * 3 + ["structured"])
        content = " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))
        body: dict[str, Any] = {
            "model": "fake",
            "max_tokens": rng.choice([1, 2, 5, 20, 60, 120]),
            "stream": rng.random() < 0.75,
        }
        if kind == "structured" or rng.random() < 0.4:  # those without can go by the fast path
            body["return_token_ids"] = True
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if kind == "structured":
            body.update(response_format={"type": "json_object"})
        if kind == "completion":
            path, prompt = "/v1/completions", list(self._bed.model.tokenizer.encode(content).ids)
            body["prompt"] = prompt
        else:
            path = "/v1/chat/completions"
            messages = [{"role": "user", "content": content}]
            if kind == "conversation":
                history = rng.choice(self._histories)
                history += messages
                messages = list(history)
                if len(history) > 6:
                    history.clear()
            body["messages"] = messages
            prompt = self._bed.model.chat_prompt(messages)
        cancel = rng.uniform(0.0, 0.6) if rng.random() < CANCELLED_RATIO else None
        return Question(
            id=f"soak-{self._count:07d}", path=path, body=body, prompt=prompt, cancel_after_s=cancel
        )

    async def _ask(self, session: aiohttp.ClientSession, question: Question) -> Answer:
        answer = Answer()
        try:
            async with asyncio.timeout(question.cancel_after_s):
                await self._read(session, question, answer)
        except TimeoutError:
            # Not between what ends the answer and the end of its connection: it has ended otherwise then.
            answer.is_cancelled = not answer.is_done and not answer.errors
        except (aiohttp.ClientError, ValueError) as error:
            answer.errors.append(f"transport: {error!r}")
        return answer

    async def _read(self, session: aiohttp.ClientSession, question: Question, answer: Answer) -> None:
        headers = {"X-Request-Id": question.id, "X-Request-Timeout": str(DEADLINE_S)}
        url = self._bed.url + question.path
        async with session.post(url, json=question.body, headers=headers) as response:
            if response.status != 200:
                answer.errors.append(f"http {response.status}: {await response.text()}")
            elif question.body["stream"]:
                async for line in response.content:
                    if line.startswith(b"data: "):
                        _read_event(line.removeprefix(b"data: ").strip(), answer)
            else:
                body = await response.json()
                choice = body["choices"][0]
                answer.token_ids = choice.get("token_ids") or []
                answer.text = choice["text"] if "text" in choice else choice["message"]["content"]
                answer.finish, answer.usage, answer.is_done = choice["finish_reason"], body["usage"], True

    # ---- verdicts

    def _judge(self, question: Question, answer: Answer) -> None:
        model, limit = self._bed.model, question.body["max_tokens"]
        expected = model.generate(question.prompt, limit)
        got = answer.token_ids
        has_ids = "return_token_ids" in question.body
        self.report.tokens += len(got) if has_ids else len(answer.text)
        if got != expected[: len(got)]:
            self._violation(question, f"TOK: {got} is not the beginning of {expected}")
        if not model.text(expected).startswith(answer.text.rstrip("\ufffd")):
            self._violation(question, f"TXT: {answer.text!r} is not the beginning of the answer")
        whole = answer.is_done and not answer.errors
        if whole:
            text = model.text(expected)
            usage = answer.usage or {}
            if (has_ids and got != expected) or answer.text.rstrip("\ufffd") != text:
                self._violation(question, f"TOK: a whole answer of {len(got)} of {len(expected)} tokens")
            if answer.finish != "length":
                self._violation(question, f"END: finish {answer.finish!r}")
            if (usage.get("prompt_tokens"), usage.get("completion_tokens")) != (
                len(question.prompt),
                len(expected),
            ):
                self._violation(question, f"USE: {usage} for {len(question.prompt)} + {len(expected)}")
        if sum((whole, bool(answer.errors), answer.is_cancelled)) != 1:
            self._violation(question, f"END: {answer}")
        if answer.errors and not (question.may_end_early and _is_excused(answer)):
            self._violation(question, f"END: an error though a path was left: {answer.errors[0][:200]}")
        end = "cancelled" if answer.is_cancelled else "complete" if whole else "error"
        self.report.ends[end] += 1

    async def _check_free(self, question: Question) -> None:
        for engine in self._bed.engines.values():  # a long run must not remember every prompt
            for memory in (engine.seen, engine.headers, engine.aborted, engine.finished):
                memory.clear()
        ends_s = time.monotonic() + FREE_WITHIN_S
        while left := self._left_of(question.id):
            if time.monotonic() > ends_s:
                self._violation(question, f"FREE: {left}")
                return
            await asyncio.sleep(0.05)

    def _left_of(self, request_id: str) -> list[str]:
        left = [f"{e.id} runs {r}" for e in self._bed.engines.values() for r in e.running if request_id in r]
        for agent in self._bed.agents.values():
            left += [f"{agent.engine.id} leases {lease}" for lease in agent.leases if request_id in lease]
            left += [
                f"{agent.engine.id} sends {t.id} to {peer}"
                for t in agent.transfers.values()
                if request_id in t.id
                for peer, state in t.state.items()
                if state == "open"
            ]
            for known in [t for t in agent.transfers if request_id in t and not left]:
                del agent.transfers[known]
        return left

    async def _check_end(self, baseline: Counter[str]) -> None:
        fleet = self._bed.router.fleet
        try:
            await self._bed.until(
                lambda: (
                    self._bed.is_free()
                    and not any(state.view.running for state in fleet.engines.values())
                    and _tasks() <= baseline
                ),
                timeout_s=FREE_WITHIN_S,
            )
        except TimeoutError:
            running = {e: state.view.running for e, state in fleet.engines.items()}
            self.report.violations.append(f"FREE at the end: running {running}, tasks {_tasks() - baseline}")

    def _violation(self, question: Question, what: str) -> None:
        record = self._bed.router.records.get(question.id)
        story = f"{record.attempts} attempts: {record.as_json()}" if record else "unknown"
        self.report.violations.append(f"{question.id}: {what} ({story})")


def _totals(counter: prometheus_client.Counter) -> list[Sample]:
    """A counter's values, one for each set of labels."""
    return [s for metric in counter.collect() for s in metric.samples if s.name.endswith("_total")]


def _is_excused(answer: Answer) -> bool:
    """Whether the error may end an answer that only MD may give.

    It had begun and cannot be continued, or it had not while one MD was dead and the line to the other cut.
    """
    return "cannot be continued" in answer.errors[0] or not answer.token_ids


def _tasks() -> Counter[str]:
    """What runs in this loop, by coroutine, but for the fakes' and the router's open connections."""
    names = Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]
    return Counter({name: n for name, n in names.items() if not name.startswith("RequestHandler.")})


def _read_event(payload: bytes, answer: Answer) -> None:
    if payload == b"[DONE]":
        answer.is_done = True
        return
    event = json.loads(payload)
    if "error" in event:
        answer.errors.append(str(event["error"]["message"]))
        return
    answer.usage = event.get("usage") or answer.usage
    for choice in event["choices"]:
        answer.token_ids += choice.get("token_ids") or []
        answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        answer.finish = choice["finish_reason"] or answer.finish


async def soak(*, duration_s: float, seed: int = 0, concurrency: int = 8) -> Report:
    """The report of one run."""
    router = {"engine_idle_timeout_s": 1.0, "keep_alive_interval_s": 1.0}
    policy = {"second_token_slo_s": 0.02}
    async with running_bed(roles=ROLES, router=router, policy=policy, kv_events=True) as bed:
        for engine in bed.engines.values():
            engine.itl_s = 0.005
        for agent in bed.agents.values():
            agent.lease_s = LEASE_S
            agent.landing_s.update(md0=0.15, md1=0.3)
            agent.link["rate_bytes_per_s"] = 20_000
        return await Soak(bed, seed=seed, concurrency=concurrency).run(duration_s)


def main() -> int:
    """Run and print the report as the last line; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--uvloop", action="store_true", help="as in production, else asyncio's own loop")
    given = parser.parse_args()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if given.uvloop else None) as runner:
        report = runner.run(
            soak(duration_s=60 * given.minutes, seed=given.seed, concurrency=given.concurrency)
        )
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    num_fds = len(list(Path("/proc/self/fd").iterdir()))
    print(json.dumps({**report.as_json(), "rss_growth_mb": grown_kib // 1024, "open_files": num_fds}))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
