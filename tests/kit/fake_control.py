"""A fake agent: the control API of the real one, with landing times and failures on demand."""

import asyncio
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from tests.kit.fake_line import FakeLine
from tests.kit.fake_vllm import FakeEngine, cut_connections

CHUNK_BYTES = 1000


@dataclass
class Transfer:
    """One transfer as its sender knows it; ``state`` per peer: open, landed, cancelled, failed."""

    id: str
    tokens: list[int]
    order: dict[str, Any] = field(default_factory=dict)
    wan_bytes: dict[str, int] = field(default_factory=dict)
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    tasks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)


class FakeAgent:
    """The agent beside one engine.

    Args:
        engine: The engine beside it.
        peers: All engines by id, where KV can be sent.

    ``landing_s`` delays a peer's landing after the order; ``lands_after`` until another engine streamed so
    many tokens; ``hold`` holds landings back until ``let_land``; ``fail_with`` makes transfers to a peer fail
    with a reason. ``cut`` peers cannot be reached: their transfers stall until they can. ``lines`` have a
    rate, shared by all that goes to a peer.
    """

    def __init__(self, engine: FakeEngine, peers: Mapping[str, FakeEngine]) -> None:
        self.engine = engine
        self.landing_s: dict[str, float] = {}
        self.lands_after: dict[str, tuple[FakeEngine, int]] = {}
        self.fail_with: dict[str, str] = {}
        self.cut: set[str] = set()
        self.lines: dict[str, FakeLine] = {}
        self.lease_s = 60.0
        self.slots = 100_000
        self.sampler = "v1"
        self.is_dead = False
        self.boot = uuid.uuid4().hex
        self.transfers: dict[str, Transfer] = {}
        self.cancelled: list[tuple[str, str]] = []
        self.released: list[str] = []
        self.leases: set[str] = set()
        self.agents: dict[str, FakeAgent] = {}
        self.link: dict[str, Any] = {"rate_bytes_per_s": None, "rtt_s": None, "queued_bytes": 0}
        self.port = 0
        self._peers = peers
        self._held: dict[str, asyncio.Event] = {}
        self._events: list[dict[str, Any]] = []
        self._seq = 0
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        engine.on_transfer = self.begin

    # ---- life

    async def start(self) -> None:
        """Serve; on the same port as before if it was up already."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/state", self._state),
                web.get("/v1/events", self._stream),
                web.post("/v1/transfers/{id}/cancel", self._cancel),
                web.post("/v1/transfers/{id}/release", self._release),
                web.post("/v1/transfers/{id}/resume", self._resume),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.is_dead = False

    async def stop(self, *, forget: bool = False) -> None:
        """Be gone; ``forget`` is what a new process would know of the old one's events."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        cut_connections(runner)
        await runner.cleanup()
        if forget:
            self._seq, self._events = 0, []
            self.boot = uuid.uuid4().hex
            self.is_dead = True
            for transfer in self.transfers.values():
                for task in transfer.tasks.values():
                    task.cancel()
            self.transfers.clear()
            self.leases.clear()
            self.engine.cached_chunks.clear()

    @property
    def is_down(self) -> bool:
        """Whether nobody answers at the port."""
        return self._runner is None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    # ---- transfers

    def begin(self, order: dict[str, Any], tokens: list[int]) -> None:
        """The engine beside us got an order with its prefill."""
        if self.is_dead:
            return
        transfer = Transfer(id=order["transfer"], tokens=list(tokens), order=order)
        self.transfers[transfer.id] = transfer
        # As the agent does it: a hold is for the line to the other site, where the main engines are.
        for peer in (peer for peer in order["targets"] if order.get("hold") and peer.startswith("md")):
            transfer.held[peer] = asyncio.Event()
        for peer in order["targets"]:
            transfer.state[peer] = "open"
            transfer.tasks[peer] = asyncio.create_task(self._send(transfer, peer))

    def hold(self, peer: str) -> None:
        """From now on nothing lands at the peer."""
        self._held[peer] = asyncio.Event()

    def let_land(self, peer: str) -> None:
        """What was held back lands now, and what comes later without delay."""
        self._held[peer].set()

    async def _send(self, transfer: Transfer, peer: str) -> None:
        if peer in transfer.held:
            await transfer.held[peer].wait()
        await self._wait_for_tokens(peer)
        await asyncio.sleep(self.landing_s.get(peer, 0.005))
        if peer in self._held:
            await self._held[peer].wait()
        missing = self._peers[peer].missing(transfer.tokens)
        sent = len(missing) * CHUNK_BYTES
        await self._wait_for_link(transfer, peer)
        if peer in self.lines:
            await self._cross(transfer, peer, sent)
        await self.say(
            "progress", transfer=transfer.id, peer=peer, bytes_sent=sent // 2, chunks_done=0, chunks_offered=0
        )
        if (reason := self.fail_with.get(peer)) is not None:
            transfer.state[peer] = "failed"
            await self.say(
                "failed", transfer=transfer.id, peer=peer, reason=reason, detail="", wan_bytes=sent // 2
            )
            return
        self._peers[peer].receive(transfer.tokens)
        chunks = len(transfer.tokens) // self.engine.chunk_tokens
        transfer.state[peer] = "landed"
        if peer in self.agents:
            self.agents[peer].lease(transfer.id)
        await self.say(
            "landed",
            transfer=transfer.id,
            peer=peer,
            chunks=chunks,
            chunks_sent=len(missing),
            wan_bytes=sent + 10,
            payload_bytes=sent,
            full_bytes=chunks * CHUNK_BYTES,
            tokens=chunks * self.engine.chunk_tokens,
            elapsed_s=0.01,
            prefill_overlap_ratio=0.5,
        )

    def lease(self, transfer: str) -> None:
        """What landed here is kept for a while."""
        self.leases.add(transfer)
        asyncio.get_running_loop().call_later(self.lease_s, self.leases.discard, transfer)

    async def _wait_for_link(self, transfer: Transfer, peer: str) -> None:
        def is_down() -> bool:
            return peer in self.cut or (peer in self.agents and self.agents[peer].is_dead)

        if is_down():
            await self.say("stalled", transfer=transfer.id, peer=peer, detail="the link is cut")
        while is_down():  # noqa: ASYNC110 - a cut has no one event to wait for
            await asyncio.sleep(0.02)

    async def _cross(self, transfer: Transfer, peer: str, num_bytes: int) -> None:
        def sent(piece: int) -> None:
            transfer.wan_bytes[peer] = transfer.wan_bytes.get(peer, 0) + piece

        await self.lines[peer].carry(num_bytes, priority=-transfer.order.get("priority", 0), sent=sent)

    async def _wait_for_tokens(self, peer: str) -> None:
        if peer not in self.lands_after:
            return
        engine, count = self.lands_after[peer]
        goal = engine.tokens_streamed + count
        while engine.tokens_streamed < goal:  # noqa: ASYNC110 - a fake engine has no event per token
            await asyncio.sleep(0.002)

    async def say(self, event: str, **fields: Any) -> None:
        """Write an event to every follower."""
        async with self._changed:
            self._seq += 1
            self._events.append({"event": event, "seq": self._seq, **fields})
            del self._events[:-1024]
            self._changed.notify_all()

    # ---- pages

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _state(self, _request: web.Request) -> web.Response:
        peers = [{"peer": p, "address": "", "state": "up", "reason": None, **self.link} for p in self._peers]
        return web.json_response(
            {
                "engine_id": self.engine.id,
                "engine_connected": True,
                "sampler": self.sampler,
                "chunk_tokens": self.engine.chunk_tokens,
                "chunk_bytes": CHUNK_BYTES,
                "store": {"slots": self.slots, "used": len(self.engine.cached_chunks), "leased": 0},
                "peers": peers,
            }
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        after = int(request.query.get("after", 0))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        hello = {"event": "hello", "agent": self.engine.id, "boot": self.boot, "seq": self._seq}
        await self._line(response, hello)
        while True:
            for event in [e for e in self._events if e["seq"] > after]:
                await self._line(response, event)
                after = event["seq"]
            async with self._changed:
                if self._seq <= after:
                    await self._changed.wait()  # no pings: tests are shorter than the silence that matters

    async def _line(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(json.dumps(event).encode() + b"\n")

    async def _cancel(self, request: web.Request) -> web.Response:
        transfer = self.transfers.get(request.match_info["id"])
        peers = (await request.json()).get("peers") or list(transfer.state if transfer else ())
        done = []
        for peer in peers:
            self.cancelled.append((request.match_info["id"], peer))
            if transfer is not None and transfer.state.get(peer) == "open":
                transfer.tasks[peer].cancel()
                transfer.state[peer] = "cancelled"
                done.append(peer)
                wan_bytes = transfer.wan_bytes.get(peer, 0) + 7
                news = {"transfer": transfer.id, "peer": peer, "reason": "cancelled", "detail": ""}
                await self.say("failed", **news, wan_bytes=wan_bytes)
        return web.json_response({"cancelled": done})

    async def _resume(self, request: web.Request) -> web.Response:
        transfer = self.transfers.get(request.match_info["id"])
        held = transfer.held if transfer is not None else {}
        resumed = [peer for peer, gate in held.items() if not gate.is_set()]
        for gate in held.values():
            gate.set()
        return web.json_response({"resumed": resumed})

    async def _release(self, request: web.Request) -> web.Response:
        transfer = request.match_info["id"]
        self.released.append(transfer)
        held = transfer in self.leases
        self.leases.discard(transfer)
        return web.json_response({"released": held})
