"""The engines and agents the router works with: who is healthy, how loaded, how far away.

Policies get frozen views of it. It decides nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdd.config.schema import EngineConfig, PddConfig, Role
from pdd.core.errors import PddError
from pdd.policy.handoff import Mode
from pdd.policy.snapshot import DeltaView, EngineView, LinkView
from pdd.router.agents import AgentClient
from pdd.router.belief import CacheBelief
from pdd.router.engines import EngineClient

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
DOWN_AFTER_FAILURES = 3
"""Busy engines answer late; only this many misses in a row abort what runs there."""
DEFAULT_CAPACITY = 256
"""vLLM's default of ``--max-num-seqs`` on the hardware of a server."""


class EngineState:
    """One engine, the agent beside it, and what the router knows of both."""

    def __init__(self, config: EngineConfig, *, client: EngineClient, agent: AgentClient) -> None:
        self.config = config
        self.client = client
        self.agent = agent
        self.belief = CacheBelief()
        self.healthy = False
        self._on_down: list[Callable[[], None]] = []
        self.max_model_len: int | None = None
        self.model_names: tuple[str, ...] = ()
        self.auto_handoff: Mode = "catch-up"

    @property
    def view(self) -> EngineView:
        """The frozen view policies decide on."""
        return EngineView(
            id=self.config.id,
            healthy=self.healthy,
            running=len(self._on_down),
            capacity=self.config.max_num_seqs or DEFAULT_CAPACITY,
            kv_ready=self.agent.alive and self.agent.engine_connected,
            max_model_len=self.max_model_len,
        )

    @contextmanager
    def occupied(self, on_down: Callable[[], None]) -> Iterator[None]:
        """One more request runs on the engine while the context is open; it hears when the engine is down."""
        self._on_down.append(on_down)
        try:
            yield
        finally:
            self._on_down.remove(on_down)

    async def watch(self) -> None:
        """Keep ``healthy`` true to the engine's health check, for ever."""
        failures = 0
        while True:
            if await self.client.healthy(timeout_s=HEALTH_TIMEOUT_S) and await self._learn_models():
                failures = 0
                if not self.healthy:
                    log.info("engine %s is healthy", self.config.id)
                self.healthy = True
            else:
                failures += 1
                self._note_failure(failures)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    def suspect(self) -> None:
        """A request could not reach the engine: use no more of it until its health check answers again."""
        self.healthy = False

    def _note_failure(self, failures: int) -> None:
        if self.healthy and failures >= DOWN_AFTER_FAILURES:
            log.warning("engine %s does not answer its health check", self.config.id)
        if failures >= DOWN_AFTER_FAILURES or not self.healthy:
            self.healthy = False
            # Learned again when it is back: it may be another process with other limits.
            self.max_model_len = None
        if failures == DOWN_AFTER_FAILURES:
            for on_down in list(self._on_down):
                on_down()

    async def _learn_models(self) -> bool:
        if self.max_model_len is not None:
            return True
        try:
            models = await self.client.models(timeout_s=HEALTH_TIMEOUT_S)
        except (PddError, TimeoutError):
            return False
        self.model_names = tuple(str(model.get("id")) for model in models)
        lengths = [n for model in models if isinstance(n := model.get("max_model_len"), int)]
        self.max_model_len = min(lengths, default=None)
        return True


class Fleet:
    """All engines of the configuration."""

    def __init__(self, config: PddConfig) -> None:
        self._config = config
        self.engines = {
            engine.id: EngineState(
                engine,
                client=EngineClient(
                    engine_id=engine.id,
                    url=engine.url,
                    idle_timeout_s=config.router.engine_idle_timeout_s,
                    api_key=engine.env.get("VLLM_API_KEY"),
                ),
                agent=AgentClient(engine_id=engine.id, url=engine.control_url),
            )
            for engine in config.engines
        }
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to watch every engine and agent."""
        for state in self.engines.values():
            self._tasks.append(asyncio.create_task(state.watch(), name=f"health {state.config.id}"))
            self._tasks.append(asyncio.create_task(state.agent.run(), name=f"events {state.config.id}"))

    async def close(self) -> None:
        """Stop watching and close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for state in self.engines.values():
            await state.agent.close()
            await state.client.close()

    def views(self, role: Role) -> list[EngineView]:
        """Views of all engines of a role, in the file's order."""
        return [self.engines[engine.id].view for engine in self._config.engines_of(role)]

    def is_wan(self, prefill: str, peer: str) -> bool:
        """Whether KV leaves the site on its way from a prefill engine to a peer."""
        return self.engines[prefill].config.site != self.engines[peer].config.site

    def link(self, prefill: str, peer: str) -> LinkView:
        """The path for KV from a prefill engine to a peer."""
        policy = self._config.policy
        return self.engines[prefill].agent.link_view(
            peer, assumed_rate_bytes_per_s=policy.assumed_wan_rate, assumed_rtt_s=policy.assumed_wan_rtt_s
        )

    def delta(self, main: str, keys: list[bytes]) -> DeltaView:
        """What the main engine is believed to lack of the keys."""
        state = self.engines[main]
        chunk_bytes = state.agent.chunk_bytes or self._any_chunk_bytes()
        return DeltaView(missing_chunks=state.belief.missing(keys), chunk_bytes=chunk_bytes)

    def _any_chunk_bytes(self) -> int:
        return next((s.agent.chunk_bytes for s in self.engines.values() if s.agent.chunk_bytes), 0)

    def missing_for_ready(self) -> list[str]:
        """What keeps the first whole path from existing, in words; empty when requests can be served."""
        missing: list[str] = []
        roles: tuple[tuple[Role, str], ...] = (("prefill", "prefill"), ("main", "main decode"))
        for role, words in roles:
            states = [self.engines[engine.id] for engine in self._config.engines_of(role)]
            if any(state.view.healthy and state.view.kv_ready for state in states):
                continue
            if not states:
                missing.append(f"no {words} engine is configured")
            missing.extend(_why_not_ready(state) for state in states)
        return missing or self._why_no_pair_fits()

    def incompatible(self) -> list[dict[str, str]]:
        """Pairs of engines whose KV means something else, as their agents found out when they met."""
        return [
            {"from": prefill.id, "to": other.id, "reason": str(link.get("reason"))}
            for prefill in self._config.engines_of("prefill")
            for other in self._config.engines
            if (link := self.engines[prefill.id].agent.links.get(other.id, {}))
            and link.get("state") == "incompatible"
        ]

    def _why_no_pair_fits(self) -> list[str]:
        """Why no prefill engine can send to any main engine; empty if one may."""
        bad = {(pair["from"], pair["to"]): pair["reason"] for pair in self.incompatible()}
        pairs = [
            (prefill.id, main.id)
            for prefill in self._config.engines_of("prefill")
            for main in self._config.engines_of("main")
        ]
        if any(pair not in bad for pair in pairs):
            return []
        return [f"{sender} and {receiver}: {bad[sender, receiver]}" for sender, receiver in pairs]


def _why_not_ready(state: EngineState) -> str:
    if not state.healthy:
        return f"engine {state.config.id} does not answer at {state.config.url}"
    if not state.agent.alive:
        return f"the agent of {state.config.id} does not answer at {state.config.control_url}"
    return f"the agent of {state.config.id} has no connection to its engine"
