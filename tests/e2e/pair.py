"""Two real engines with their agents, without router and line: KV goes from either to the other.

What an answer is compared with comes from one of the two engines too, as a plain engine would compute it:
with a ``cache_salt`` of its own, a prompt finds no KV of others, on the device or elsewhere.
"""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tests.e2e.client import wait_until
from tests.e2e.fleet import config_toml

from pdd.config.load import parse_config
from pdd.config.schema import PddConfig
from pdd.launch.fleet import agent_program, engine_program
from pdd.launch.ports import free_ports
from pdd.launch.supervisor import Supervisor

CHUNK_TOKENS = 32
FIRST, SECOND = "p0", "md0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tokens, and how many tokens of the prompt came from a cache."""

    tokens: list[int]
    num_cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff(Answer):
    """An answer whose KV crossed: ``event`` is what the sender's agent said when it had landed."""

    event: dict[str, Any]


@dataclass(kw_only=True)
class Pair:
    """The running engines ``p0`` and ``md0``."""

    config: PddConfig
    session: aiohttp.ClientSession

    async def generate(self, engine_id: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> Answer:
        """The greedy continuation by one engine."""
        body = {
            "token_ids": list(prompt),
            "sampling_params": {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
            **more,
        }
        engine = self.config.engine(engine_id)
        url = f"http://{engine.host}:{engine.port}/inference/v1/generate"
        async with self.session.post(url, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        return Answer(
            tokens=list(answer["choices"][0]["token_ids"]),
            num_cached=int(answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0),
        )

    async def plain(self, engine_id: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """What the engine answers when nothing is cached for it."""
        answer = await self.generate(engine_id, prompt, max_tokens, cache_salt=uuid.uuid4().hex)
        assert answer.num_cached == 0
        return answer.tokens

    async def handoff(self, prompt: Sequence[int], max_tokens: int, *, source: str, target: str) -> Handoff:
        """One engine prefills and gives the first token, the other continues from the KV that arrived."""
        transfer = uuid.uuid4().hex
        order = {"transfer": transfer, "targets": [target], "prompt_tokens": len(prompt)}
        first = await self.generate(source, prompt, 1, kv_transfer_params={"pdd": order})
        async with asyncio.timeout(60):
            event = await self._end_of(source, transfer)
        assert event["event"] == "landed", event
        rest = await self.generate(target, [*prompt, *first.tokens], max_tokens - 1)
        return Handoff(tokens=first.tokens + rest.tokens, num_cached=rest.num_cached, event=event)

    async def state(self, engine_id: str) -> dict[str, Any]:
        """What an agent says of itself."""
        async with self.session.get(f"{self.config.engine(engine_id).control_url}/v1/state") as response:
            return dict(await response.json())

    async def _end_of(self, engine_id: str, transfer: str) -> dict[str, Any]:
        url = f"{self.config.engine(engine_id).control_url}/v1/events"
        async with self.session.get(url, params={"after": "0"}) as response:
            async for line in response.content:
                event = dict(json.loads(line))
                if event.get("transfer") == transfer and event["event"] in ("landed", "failed"):
                    return event
        raise AssertionError(f"the agent of {engine_id} ended its events")


@contextlib.asynccontextmanager
async def running_pair(
    model: Path,
    run_dir: Path,
    *,
    first: Mapping[str, Any] | None = None,
    second: Mapping[str, Any] | None = None,
) -> AsyncIterator[Pair]:
    """A pair that answers; all of it has ended when the block does.

    Args:
        model: What both serve.
        run_dir: For sockets and logs.
        first: More keys of the first engine's configuration.
        second: More keys of the second one's.
    """
    ports = iter(free_ports(6))

    def engine(engine_id: str, role: str, more: Mapping[str, Any] | None) -> dict[str, Any]:
        more = dict(more or {})
        return {
            "id": engine_id, "role": role,
            "port": next(ports), "data_port": next(ports), "control_port": next(ports),
            "store_bytes": "128MiB", "primary_bytes": "64MiB", "max_num_seqs": 8, **more,
            "env": {"OMP_NUM_THREADS": "1", **more.get("env", {})},
        }  # fmt: skip

    values = {
        "run_dir": str(run_dir),
        "model": {"path": str(model), "name": "pdd", "dtype": "float32", "max_model_len": 4096},
        "kv": {"block_size_tokens": CHUNK_TOKENS, "blocks_per_chunk": 1},
        "engines": [engine(FIRST, "prefill", first), engine(SECOND, "main", second)],
    }
    config = parse_config(values, source="tests/e2e/pair.py", environ={})
    config_path = run_dir / "pdd.toml"
    config_path.write_text(config_toml(values), encoding="utf-8")
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session,
        Supervisor(log_dir=run_dir / "logs") as supervisor,
    ):
        for each in config.engines:
            await supervisor.start(agent_program(config, each, config_path=config_path))
        await asyncio.gather(*(supervisor.start(engine_program(config, each)) for each in config.engines))
        pair = Pair(config=config, session=session)

        async def are_connected() -> bool:
            return all([(await pair.state(each.id))["engine_connected"] for each in config.engines])

        await wait_until(are_connected, what="both engines finding their agents")
        yield pair
