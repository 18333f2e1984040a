"""Random trouble for a bed: kills, stalls, lost agents and cut links, one per role at a time."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.kit.bed import Bed

Fault = Callable[[str], Awaitable[None]]


class Trouble:
    """Troubles engines, agents and links until cancelled; ``heal_all`` makes everything well again."""

    def __init__(self, bed: Bed, rng: random.Random, counts: Counter[str]) -> None:
        self._bed = bed
        self._rng = rng
        self._counts = counts
        self._faults: dict[str, Fault] = {
            "kill engine": self._kill_engine,
            "stall engine": self._stall,
            "kill streams": self._kill_streams,
            "garble streams": self._garble,
            "abort streams": self._abort,
            "kill agent": self._kill_agent,
            "cut events": self._cut_events,
        }

    async def run(self) -> None:
        """Trouble each role and the far sites, each in its own rhythm."""
        async with asyncio.TaskGroup() as group:
            for role in ("p", "rld", "md"):
                group.create_task(self._trouble_role([e for e in self._bed.engines if e.startswith(role)]))
            group.create_task(self._trouble_links())

    async def heal_all(self) -> None:
        """Everything serves again."""
        for engine, agent in zip(self._bed.engines.values(), self._bed.agents.values(), strict=True):
            self._calm(engine.id)
            agent.cut.clear()
            if engine.is_down:
                await engine.start()
            if agent.is_down:
                await agent.start()

    async def _trouble_role(self, engines: list[str]) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.2, 1.5))
            victim = self._rng.choice(engines)
            name = self._rng.choice(list(self._faults))
            self._counts[name] += 1
            await self._faults[name](victim)
            await self._until_usable(victim)

    async def _trouble_links(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 3.0))
            peers = self._rng.choice([{"md0"}, {"md1"}, {"md0", "md1"}])
            senders = [self._bed.agents[p] for p in self._rng.choice([("p0",), ("p1",), ("p0", "p1")])]
            self._counts["cut link"] += 1
            for sender in senders:
                sender.cut |= peers
            await self._hold()
            for sender in senders:
                sender.cut -= peers

    async def _until_usable(self, engine: str) -> None:
        """The router may not lose both engines of a role, so it must have seen this one come back."""
        while True:
            view = self._bed.router.fleet.engines[engine].view
            if view.healthy and view.kv_ready:
                return
            await asyncio.sleep(0.02)

    async def _hold(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.05, 1.5))

    # ---- faults

    async def _kill_engine(self, victim: str) -> None:
        await self._bed.engines[victim].stop()
        await self._hold()
        await self._bed.engines[victim].start()

    async def _stall(self, victim: str) -> None:
        self._bed.engines[victim].stall_stream_after = self._rng.randint(0, 20)
        await self._hold()
        self._calm(victim)

    async def _kill_streams(self, victim: str) -> None:
        self._bed.engines[victim].kill_stream_after = self._rng.randint(0, 20)
        await self._hold()
        self._calm(victim)

    async def _garble(self, victim: str) -> None:
        self._bed.engines[victim].garble_stream_after = self._rng.randint(0, 20)
        await self._hold()
        self._calm(victim)

    async def _abort(self, victim: str) -> None:
        self._bed.engines[victim].abort_stream_after = self._rng.randint(0, 20)
        await self._hold()
        self._calm(victim)

    def _calm(self, victim: str) -> None:
        engine = self._bed.engines[victim]
        engine.stall_stream_after = engine.kill_stream_after = None
        engine.garble_stream_after = engine.abort_stream_after = None

    async def _kill_agent(self, victim: str) -> None:
        await self._bed.agents[victim].stop(forget=True)
        await self._hold()
        await self._bed.agents[victim].start()

    async def _cut_events(self, victim: str) -> None:
        await self._bed.agents[victim].stop()
        await self._hold()
        await self._bed.agents[victim].start()
