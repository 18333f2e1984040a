"""Load on agents while something goes wrong again and again; ``make soak`` makes it long."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
from tests.kit.agent_fleet import RunningAgent, wait_for
from tests.kit.engine_side import FakeEngine


@dataclass
class Outcome:
    """How the transfers of a load ended."""

    landed: int = 0
    failed: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.landed + sum(self.failed.values())


class PrefillLoad:
    """Small transfers to ``md0``, several at once, each seen to end exactly once; what landed is released."""

    def __init__(
        self, agent: RunningAgent, prefill: FakeEngine, *, receiver: RunningAgent, chunks: int = 3
    ) -> None:
        self.outcome = Outcome()
        self._agent = agent
        self._prefill = prefill
        self._receiver = receiver.agent
        self._chunks = chunks
        self._seen = agent.agent.events.seq
        self._open: set[str] = set()
        self._num = 0

    def run(
        self, num_transfers: int, *, at_once: int = 16, on_each: Callable[[int], object] = lambda _i: None
    ) -> Outcome:
        """So many more transfers have ended."""
        for i in range(num_transfers):
            on_each(i)
            name = f"load-{self._num}"
            self._num += 1
            self._open.add(name)
            self._prefill.push(name, ["md0"], self.names(name))
            wait_for(lambda: self._num_open() < at_once, f"{sorted(self._open)} to end", timeout_s=90)
        wait_for(lambda: self._num_open() == 0, f"{sorted(self._open)} to end", timeout_s=90)
        return self.outcome

    def names(self, transfer: str) -> list[str]:
        return [f"{transfer}-{i}" for i in range(self._chunks)]

    def _num_open(self) -> int:
        for event in self._agent.agent.events.after(self._seen):
            self._seen = event["seq"]
            if event["event"] not in ("landed", "failed") or not event["transfer"].startswith("load-"):
                continue
            assert event["transfer"] in self._open, f"{event} says an end that was said before"
            self._open.discard(event["transfer"])
            if event["event"] == "landed":
                self.outcome.landed += 1
                assert self._receiver.space is not None
                self._receiver.space.inbound.release(event["transfer"])
            else:
                reason = event["reason"]
                self.outcome.failed[reason] = self.outcome.failed.get(reason, 0) + 1
        return len(self._open)


def num_descriptors() -> int:
    return psutil.Process().num_fds()


def num_threads() -> int:
    return threading.active_count()


def check_no_growth(before: tuple[int, int], *, slack: int = 0) -> None:
    """Descriptors and threads are back to where they were; both, since each hides the other's leak."""
    wait_for(
        lambda: num_descriptors() <= before[0] + slack and num_threads() <= before[1] + slack,
        f"descriptors and threads to fall to {before}, now {(num_descriptors(), num_threads())}",
    )
