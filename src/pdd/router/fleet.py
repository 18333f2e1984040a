"""The engines and agents the router works with: who is healthy, how loaded, how far away.

Policies get frozen views of it. It decides nothing.
"""

import asyncio
import logging
import os

import zmq.asyncio

from pdd.config.load import agent_socket, kv_event_addresses
from pdd.config.schema import EngineConfig, PddConfig, Role
from pdd.core.errors import PddError
from pdd.policy.breaker import Breaker, BreakerParams
from pdd.policy.handoff import Mode
from pdd.policy.snapshot import DeltaView, EngineView, LinkView
from pdd.router.agents import AgentClient
from pdd.router.belief import CacheBelief, PromptBlocks
from pdd.router.claims import Claims
from pdd.router.engines import EngineClient
from pdd.router.history import OutputHistory
from pdd.router.kv_events import KvEventReader, block_hasher
from pdd.router.kv_follow import KvEventFollower, end_context
from pdd.router.scrape import MetricsPage

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
IDLE_METRICS_INTERVAL_S = 10.0
DOWN_AFTER_FAILURES = 3
"""Busy engines answer late; only this many misses in a row abort what runs there."""
LATE_NEWS_S = 60.0
"""How long after its end a request's transfers may still be spoken of."""
ITL_WEIGHT = 0.1
"""Of the newest answer: the estimate follows a change of load within about ten answers."""
DEFAULT_CAPACITY = 256
"""vLLM's default of ``--max-num-seqs`` on the hardware of a server."""


class EngineState:
    """One engine, the agent beside it, and what the router knows of both."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        client: EngineClient,
        agent: AgentClient,
        page: MetricsPage,
        breaker: BreakerParams,
        belief: CacheBelief,
        events: KvEventReader,
        follower: KvEventFollower,
    ) -> None:
        self.config = config
        self._page = page
        self.kv_usage_ratio = 0.0
        self._looked_s = float("-inf")
        self._breaker = Breaker()
        self._breaker_params = breaker
        self.client = client
        self.agent = agent
        self.belief = belief
        self.events = events
        self._follower = follower
        self.claims = Claims()
        self.healthy = False
        self.max_model_len: int | None = None
        self.model_names: tuple[str, ...] = ()
        self.auto_handoff: Mode = "catch-up"
        self.itl_s: float | None = None

    @property
    def view(self) -> EngineView:
        """The frozen view policies decide on."""
        return self._viewed(held_tokens=0)

    def _viewed(self, *, held_tokens: int) -> EngineView:
        return EngineView(
            id=self.config.id,
            healthy=self.healthy,
            running=len(self.claims),
            capacity=self.config.max_num_seqs or DEFAULT_CAPACITY,
            kv_ready=self.agent.alive and self.agent.engine_connected,
            max_model_len=self.max_model_len,
            itl_s=self.itl_s,
            tripped=self._is_tripped(),
            kv_usage_ratio=self.kv_usage_ratio,
            pending_tokens=self.claims.pending_tokens,
            held_tokens=held_tokens,
        )

    def view_for(self, prompt: PromptBlocks) -> EngineView:
        """The view, with what the engine is believed to hold of a prompt."""
        return self._viewed(held_tokens=self.belief.held_tokens(prompt))

    async def follow_caches(self) -> None:
        """Keep the belief true to the engine's KV events, for ever."""
        await self._follower.run()

    async def watch(self) -> None:
        """Keep ``healthy`` true to the engine's health check, for ever."""
        failures = 0
        while True:
            if await self.client.healthy(timeout_s=HEALTH_TIMEOUT_S) and await self._learn_models():
                failures = 0
                if not self.healthy:
                    log.info("engine %s is healthy", self.config.id)
                self.healthy = True
                await self._look_at_metrics()
            else:
                failures += 1
                self._note_failure(failures)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _look_at_metrics(self) -> None:
        """A metrics page costs its engine some 15 ms, so where nothing of ours runs it is asked seldom."""
        now_s = asyncio.get_running_loop().time()
        if self.claims or now_s - self._looked_s >= IDLE_METRICS_INTERVAL_S:
            self._looked_s = now_s
            self.kv_usage_ratio = await self._page.kv_usage_ratio() or 0.0

    def note_success(self) -> None:
        """A request ended well here."""
        self._breaker = self._breaker.after_success()

    def note_failure(self) -> None:
        """A request failed here, and not by the client's fault."""
        now_s = asyncio.get_running_loop().time()
        self._breaker = self._breaker.after_failure(now_s=now_s, params=self._breaker_params)

    def _is_tripped(self) -> bool:
        if self._breaker.opened_s is None:
            return False
        now_s = asyncio.get_running_loop().time()
        state = self._breaker.view(now_s=now_s, params=self._breaker_params)
        return state == "open" or (state == "half-open" and len(self.claims) > 0)

    def note_itl(self, itl_s: float) -> None:
        """One answer's mean time for a token; recent answers count most."""
        known = self.itl_s if self.itl_s is not None else itl_s
        self.itl_s = known + ITL_WEIGHT * (itl_s - known)

    async def close(self) -> None:
        """Close all connections."""
        await self.agent.close()
        await self.client.close()
        await self._page.close()

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
            self.claims.tell_down()

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
        self._zmq = zmq.asyncio.Context()
        self._hasher = block_hasher(config)
        self._in_service = config.engines
        self.engines = {engine.id: self._state(engine) for engine in config.engines}
        self.history = OutputHistory()
        self._was_whole = False
        self._readiness: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._watches: dict[EngineState, list[asyncio.Task[None]]] = {}

    def _state(self, engine: EngineConfig) -> EngineState:
        router = self._config.router
        api_key = engine.env.get("VLLM_API_KEY") or os.environ.get("VLLM_API_KEY")
        belief = CacheBelief(max_blocks=router.max_believed_blocks)
        events = KvEventReader(engine_id=engine.id, belief=belief, hasher=self._hasher)
        socket = agent_socket(self._config, engine.id)
        return EngineState(
            engine,
            client=EngineClient(
                engine_id=engine.id,
                url=engine.url,
                idle_timeout_s=router.engine_idle_timeout_s,
                connect_timeout_s=router.connect_timeout_s,
                api_key=api_key,
            ),
            page=MetricsPage(url=engine.url, api_key=api_key),
            agent=AgentClient(
                engine_id=engine.id,
                url=engine.control_url,
                connect_timeout_s=router.connect_timeout_s,
                on_store=belief.store_is,
            ),
            breaker=BreakerParams(failures=router.breaker_failures, open_s=router.breaker_open_s),
            belief=belief,
            events=events,
            follower=KvEventFollower(
                context=self._zmq,
                addresses=kv_event_addresses(engine, agent_socket=socket),
                reader=events,
            ),
        )

    async def start(self) -> None:
        """Begin to watch every engine and agent."""
        for state in self.engines.values():
            self._watch(state)
        self._readiness = asyncio.create_task(self._watch_readiness(), name="readiness")

    async def _watch_readiness(self) -> None:
        """Notice that a whole path exists also where nobody asks for it."""
        while True:
            self.missing_for_ready()
            await asyncio.sleep(HEALTH_INTERVAL_S)

    def _watch(self, state: EngineState) -> None:
        self._watches[state] = [
            asyncio.create_task(state.watch(), name=f"health {state.config.id}"),
            asyncio.create_task(state.agent.run(), name=f"events {state.config.id}"),
            asyncio.create_task(state.follow_caches(), name=f"caches {state.config.id}"),
        ]
        for task in self._watches[state]:
            task.add_done_callback(_report_bug)

    async def close(self) -> None:
        """Stop watching and close all connections."""
        if self._readiness is not None:
            self._readiness.cancel()
        for state in list(self._watches):
            await self._end(state)
        end_context(self._zmq)

    async def _end(self, state: EngineState) -> None:
        tasks = self._watches.pop(state)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await state.close()

    def apply(self, config: PddConfig) -> None:
        """The engines of ``config`` are in service, and no others; everything else in it needs a restart.

        What runs on an engine that goes may end there, and is continued elsewhere if the engine stops.
        """
        before = {state.config.id: state for state in self.engines.values()}
        for engine in config.engines:
            known = before.get(engine.id)
            if known is not None and known.config == engine and known in self._watches:
                continue
            log.info("engine %s is in service at %s", engine.id, engine.url)
            self.engines[engine.id] = state = self._state(engine)
            self._watch(state)
        self._in_service = config.engines
        kept = {engine.id for engine in config.engines}
        for state in before.values():
            if state.config.id not in kept or self.engines[state.config.id] is not state:
                log.info("engine %s at %s leaves service", state.config.id, state.config.url)
                asyncio.get_running_loop().call_later(self._linger_s, self._forget, state)

    @property
    def _linger_s(self) -> float:
        """No request that has planned with an engine outlives this."""
        return self._config.router.request_timeout_s + LATE_NEWS_S

    def _forget(self, state: EngineState) -> None:
        is_current = self.engines.get(state.config.id) is state
        came_back = is_current and any(engine == state.config for engine in self._in_service)
        if came_back or state not in self._watches:
            return  # the latter: the router stops
        if is_current:
            del self.engines[state.config.id]
        task = asyncio.create_task(self._end(state))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def views(self, role: Role) -> list[EngineView]:
        """Views of all engines of a role that are in service, in the file's order."""
        return [self.engines[engine.id].view for engine in self._in_service if engine.role == role]

    def views_for(self, role: Role, prompt: PromptBlocks) -> list[EngineView]:
        """As ``views``, with what each is believed to hold of a prompt."""
        return [
            self.engines[engine.id].view_for(prompt) for engine in self._in_service if engine.role == role
        ]

    def is_wan(self, prefill: str, peer: str) -> bool:
        """Whether KV leaves the site on its way from a prefill engine to a peer."""
        return self.engines[prefill].config.site != self.engines[peer].config.site

    @property
    def carries_sampler_state(self) -> bool:
        """Whether all engines that have been heard of continue the penalties and seeds of one another."""
        said = {self.engines[engine.id].agent.sampler for engine in self._in_service} - {None}
        return self._config.carries_sampler_state and len(said) == 1 and "" not in said

    def link(self, prefill: str, peer: str) -> LinkView:
        """The path for KV from a prefill engine to a peer."""
        policy = self._config.policy
        return self.engines[prefill].agent.link_view(
            peer, assumed_rate_bytes_per_s=policy.assumed_wan_rate, assumed_rtt_s=policy.assumed_wan_rtt_s
        )

    def delta(self, main: str, prompt: PromptBlocks) -> DeltaView:
        """What the main engine's store is believed to lack of the prompt."""
        state = self.engines[main]
        chunk_bytes = state.agent.chunk_bytes or self._any_chunk_bytes()
        return DeltaView(missing_chunks=state.belief.missing_chunks(prompt), chunk_bytes=chunk_bytes)

    def _any_chunk_bytes(self) -> int:
        return next((s.agent.chunk_bytes for s in self.engines.values() if s.agent.chunk_bytes), 0)

    def missing_for_ready(self) -> list[str]:
        """What keeps the first whole path from existing, in words; empty when requests can be served.

        Once it existed, P and any decode engine are enough: RLD serves while the far site is dark.
        """
        missing = self._missing_towards("main")
        if not missing:
            self._was_whole = True
        elif self._was_whole and not self._missing_towards("relay"):
            return []
        return missing

    def _any_ready(self, role: Role) -> bool:
        return any(view.healthy and view.kv_ready for view in self.views(role))

    def _missing_towards(self, decode: Role) -> list[str]:
        missing: list[str] = []
        roles: tuple[tuple[Role, str], ...] = (("prefill", "prefill"), (decode, f"{decode} decode"))
        for role, words in roles:
            states = [self.engines[engine.id] for engine in self._in_service if engine.role == role]
            if self._any_ready(role):
                continue
            if not states:
                missing.append(f"no {words} engine is configured")
            missing.extend(_why_not_ready(state) for state in states)
        return missing or self._why_no_pair_fits(decode)

    def incompatible(self) -> list[dict[str, str]]:
        """Pairs of engines whose KV means something else, as their agents found out when they met."""
        return [
            {"from": prefill.id, "to": other.id, "reason": str(link.get("reason"))}
            for prefill in self._in_service
            if prefill.role == "prefill"
            for other in self._in_service
            if (link := self.engines[prefill.id].agent.links.get(other.id, {}))
            and link.get("state") == "incompatible"
        ]

    def _why_no_pair_fits(self, decode: Role) -> list[str]:
        """Why no prefill engine can send to any engine of the decode role; empty if one may."""
        bad = {(pair["from"], pair["to"]): pair["reason"] for pair in self.incompatible()}
        pairs = [
            (prefill.id, other.id)
            for prefill in self._in_service
            if prefill.role == "prefill"
            for other in self._in_service
            if other.role == decode
        ]
        if any(pair not in bad for pair in pairs):
            return []
        return [f"{sender} and {receiver}: {bad[sender, receiver]}" for sender, receiver in pairs]


def _report_bug(watch: asyncio.Task[None]) -> None:
    if not watch.cancelled() and (error := watch.exception()) is not None:
        log.error("the router is blind from now on: %s", watch.get_name(), exc_info=error)


def _why_not_ready(state: EngineState) -> str:
    if not state.healthy:
        return f"engine {state.config.id} does not answer at {state.config.url}"
    if not state.agent.alive:
        return f"the agent of {state.config.id} does not answer at {state.config.control_url}"
    return f"the agent of {state.config.id} has no connection to its engine"
