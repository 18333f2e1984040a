"""A whole PDD of fakes around one real router, all in the test's event loop over loopback."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from tests.kit.fake_control import FakeAgent
from tests.kit.fake_events import FakePublisher
from tests.kit.fake_model import FakeModel
from tests.kit.fake_vllm import FakeEngine

from pdd.config.load import agent_socket, kv_event_addresses, parse_config
from pdd.config.schema import PddConfig
from pdd.router.app import RouterApp

ROLES = {"p0": ("prefill", "a"), "rld0": ("relay", "a"), "md0": ("main", "b")}
CHUNK_TOKENS = 32


class Bed:
    """The router, its fakes and a client session."""

    def __init__(
        self, model: FakeModel, engines: dict[str, FakeEngine], agents: dict[str, FakeAgent]
    ) -> None:
        self.model = model
        self.engines = engines
        self.agents = agents
        self.router: RouterApp
        self.client: aiohttp.ClientSession
        self.url = ""
        self.run_dir = ""

    def __getattr__(self, name: str) -> FakeEngine:
        """``bed.p0`` is the engine of that id."""
        try:
            return self.__dict__["engines"][name]
        except KeyError:
            raise AttributeError(name) from None

    async def chat(self, content: str = "Hello there", **fields: Any) -> Any:
        """The JSON of a chat answer that is not streamed."""
        answer = await self.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": content}], **fields
        )
        body = await answer.json()
        assert answer.status == 200, body
        return body

    async def post(
        self, path: str, *, headers: dict[str, str] | None = None, **fields: Any
    ) -> aiohttp.ClientResponse:
        """Any request, with the model filled in."""
        return await self.client.post(self.url + path, json={"model": "fake", **fields}, headers=headers)

    def reference(self, content: str, max_tokens: int) -> str:
        """The text one plain engine would answer to a chat of one message."""
        prompt = self.model.chat_prompt([{"role": "user", "content": content}])
        return self.model.text(self.model.generate(prompt, max_tokens))

    async def record(self, answer_id: str) -> dict[str, Any]:
        """The router's record of an answer."""
        async with self.client.get(f"{self.url}/pdd/requests/{answer_id}") as answer:
            return dict(await answer.json())

    async def last_record(self) -> dict[str, Any]:
        """The router's latest record."""
        async with self.client.get(f"{self.url}/pdd/requests") as answer:
            return dict((await answer.json())["requests"][-1])

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        """Wait for something the fakes will show; the limit is for what never comes, and measures nothing."""
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - fakes have no one event to wait for
                await asyncio.sleep(0.005)

    async def until_free(self, *, timeout_s: float = 30.0) -> None:
        """Wait until no engine runs anything, no transfer is open and no lease is held."""
        await self.until(self.is_free, timeout_s=timeout_s)

    def is_free(self) -> bool:
        """Nothing of any request is left."""
        return not (
            any(engine.running for engine in self.engines.values())
            or any(agent.leases for agent in self.agents.values())
            or any(
                "open" in t.state.values() for agent in self.agents.values() for t in agent.transfers.values()
            )
        )


def bed_config(
    bed: Bed,
    roles: dict[str, tuple[str, str]],
    overrides: dict[str, Any],
    *,
    vllm_args: Sequence[str] = (),
    parsers: Mapping[str, str] | None = None,
) -> PddConfig:
    """The configuration of a bed whose fakes are up."""
    values: dict[str, Any] = {
        "model": {"path": "unused", "name": "fake", **(parsers or {})},
        "kv": {"block_size_tokens": CHUNK_TOKENS},
        "engines": [
            {
                "id": engine_id,
                "role": role,
                "site": site,
                "port": bed.engines[engine_id].port,
                "data_port": 1,
                "control_port": bed.agents[engine_id].port,
                "max_num_seqs": 8,
                "vllm_args": vllm_args,
                "env": {"VLLM_API_KEY": key} if (key := bed.engines[engine_id].api_key) else {},
            }
            for engine_id, (role, site) in roles.items()
        ],
        "run_dir": bed.run_dir,
        **overrides,
    }
    return parse_config(values, source="test", environ={})


def start_publisher(config: PddConfig, engine_id: str) -> FakePublisher:
    """A publisher of KV events where a router with this configuration follows them."""
    addresses = kv_event_addresses(config.engine(engine_id), agent_socket=agent_socket(config, engine_id))
    publisher = FakePublisher(addresses)
    publisher.start()
    return publisher


@asynccontextmanager
async def running_bed(
    *,
    roles: dict[str, tuple[str, str]] | None = None,
    model: FakeModel | None = None,
    wait_ready: bool = True,
    api_key: str | None = None,
    vllm_args: Sequence[str] = (),
    parsers: Mapping[str, str] | None = None,
    kv_events: bool = False,
    **overrides: Any,
) -> AsyncIterator[Bed]:
    """A bed; ``overrides`` are sections of the configuration. With ``kv_events`` the engines publish them."""
    roles = roles or ROLES
    model = model or FakeModel()
    engines = {e: FakeEngine(e, model=model, chunk_tokens=CHUNK_TOKENS) for e in roles}
    agents = {e: FakeAgent(engine, engines) for e, engine in engines.items()}
    for engine in engines.values():
        engine.api_key = api_key
    bed = Bed(model, engines, agents)
    for agent in agents.values():
        agent.agents = agents
    for fake in (*engines.values(), *agents.values()):
        await fake.start()
    folder = tempfile.TemporaryDirectory(prefix="pdd-bed-")
    bed.run_dir = folder.name
    config = bed_config(bed, roles, overrides, vllm_args=vllm_args, parsers=parsers)
    for engine in engines.values() if kv_events else ():
        engine.events = start_publisher(config, engine.id)
    bed.router = RouterApp(config, tokenizer=model.tokenizer)
    runner = web.AppRunner(bed.router.app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    bed.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as bed.client:
        try:
            if wait_ready:
                fleet = bed.router.fleet
                await bed.until(
                    lambda: all(s.view.healthy and s.view.kv_ready for s in fleet.engines.values())
                )
            yield bed
        finally:
            await runner.cleanup()
            for fake in (*engines.values(), *agents.values()):
                await fake.stop()
            for engine in engines.values():
                if engine.events is not None:
                    await engine.events.stop()
            folder.cleanup()
