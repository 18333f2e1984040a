"""What the agents say and are told: one event stream per agent, cancel and release.

An agent that is gone for ``LOST_AFTER_S`` takes its transfers with it: they are reported failed, so that
no request waits for news that cannot come.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp
import msgspec

from pdd.core.errors import PddError, RemoteProtocolError
from pdd.policy.snapshot import LinkView
from pdd.router.http_client import HttpClient
from pdd.router.sse import LineBuffer

log = logging.getLogger(__name__)

LOST_AFTER_S = 5.0
"""A stream that breaks for a moment resumes with what was missed; after this the agent counts as gone."""
SILENCE_S = 30.0
"""Agents ping every 10 s; three missed pings are a dead connection."""
RECONNECT_S = (0.1, 0.2, 0.5, 1.0)
CONTROL_TIMEOUT_S = 5.0
COMMAND_PATIENCE_S = 30.0
"""How long a cancel, resume or release is tried; then the agent is long another process or its leases end."""
MAX_KNOWN_TRANSFERS = 4096
"""Late news of ended transfers (their final byte counts) is still told apart for so many."""

AgentEvent = dict[str, Any]
Listener = Callable[[AgentEvent], None]


class StoreListener(Protocol):
    """Hears of a store's size."""

    def __call__(self, *, slots: int, used: int) -> None:
        """The store has so many slots, and so many are used."""


class AgentClient:
    """The control port of one engine's agent.

    Args:
        engine_id: The engine beside the agent.
        url: Base URL of the control port.
        connect_timeout_s: An agent that takes no connection within this is not there.
        on_store: Told how many slots the agent's store has, and how many are used, when that may have
            changed.
    """

    def __init__(
        self, *, engine_id: str, url: str, connect_timeout_s: float, on_store: StoreListener
    ) -> None:
        self.engine_id = engine_id
        self._on_store = on_store
        self.url = url.rstrip("/")
        self.connected = False
        self.alive = False
        self.engine_connected = False
        self.chunk_bytes: int | None = None
        self.sampler: str | None = None
        self.links: dict[str, dict[str, Any]] = {}
        self._listeners: OrderedDict[str, Listener] = OrderedDict()
        self._after = 0
        self._boot: str | None = None
        # Two orders a request: aiohttp takes five times as long.
        self._control = HttpClient(self.url, {}, connect_timeout_s=connect_timeout_s)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=SILENCE_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()
        await self._control.close()

    # ---- transfers

    def listen(self, transfer: str, listener: Listener) -> None:
        """From now on ``listener`` hears every event of the transfer, until forgotten for age."""
        self._listeners[transfer] = listener
        while len(self._listeners) > MAX_KNOWN_TRANSFERS:
            self._listeners.popitem(last=False)

    async def cancel(self, transfer: str, peers: list[str]) -> None:
        """Tell the sender to stop; tried for a while, as ``_post`` says."""
        await self._post(f"/v1/transfers/{quote(transfer, safe='')}/cancel", {"peers": peers})

    async def resume(self, transfer: str) -> None:
        """Tell the sender that what it holds of it may go; a failure is logged, RLD finishes then."""
        await self._post(f"/v1/transfers/{quote(transfer, safe='')}/resume", {})

    async def release(self, transfer: str) -> None:
        """Tell the receiver that the lease may end; failures are logged, since it ends by itself."""
        await self._post(f"/v1/transfers/{quote(transfer, safe='')}/release", {})

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        """Deliver a command, also to an agent that cannot be reached for a while."""
        sent = msgspec.json.encode(body)
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + COMMAND_PATIENCE_S
        failures = 0
        while True:
            try:
                async with asyncio.timeout(CONTROL_TIMEOUT_S):
                    answer = await self._control.begin("POST", path, body=lambda: sent)
                    try:
                        await answer.end()
                    finally:
                        answer.release()
                if answer.status != 200:
                    log.warning("agent %s answered %d to %s", self.engine_id, answer.status, path)
                return
            except (PddError, TimeoutError) as error:
                if loop.time() > ends_s:
                    log.warning("agent %s did not take %s: %r", self.engine_id, path, error)
                    return
            await asyncio.sleep(RECONNECT_S[min(failures, len(RECONNECT_S) - 1)])
            failures += 1

    # ---- links

    def link_view(self, peer: str, *, assumed_rate_bytes_per_s: float, assumed_rtt_s: float) -> LinkView:
        """The link to a peer as last measured, or as assumed."""
        link = self.links.get(peer, {})
        return LinkView(
            rate_bytes_per_s=link.get("rate_bytes_per_s") or assumed_rate_bytes_per_s,
            rtt_s=link.get("rtt_s") or assumed_rtt_s,
            queued_bytes=link.get("queued_bytes") or 0,
            up=link.get("state", "idle") in ("idle", "up"),
        )

    # ---- the event stream

    async def run(self) -> None:
        """Follow the agent's events for ever, reconnecting with what was missed."""
        failures = 0
        lost_timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._follow()
            except (aiohttp.ClientError, TimeoutError, OSError, RemoteProtocolError, ValueError) as error:
                log.debug("event stream of agent %s: %r", self.engine_id, error)
            if self.connected:
                self.connected = False
                failures = 0
                log.warning("lost the event stream of agent %s", self.engine_id)
                if lost_timer is not None:
                    lost_timer.cancel()
                lost_timer = loop.call_later(LOST_AFTER_S, self._give_up)
            await asyncio.sleep(RECONNECT_S[min(failures, len(RECONNECT_S) - 1)])
            failures += 1

    def _give_up(self) -> None:
        if not self.connected:
            self.alive = self.engine_connected = False
            self._fail_all("agent_lost", f"the agent of {self.engine_id} does not answer")

    def _fail_all(self, reason: str, detail: str) -> None:
        for transfer, listener in list(self._listeners.items()):
            listener(
                {"event": "failed", "transfer": transfer, "peer": None, "reason": reason, "detail": detail}
            )

    async def _follow(self) -> None:
        async with self._session.get(f"{self.url}/v1/events", params={"after": str(self._after)}) as answer:
            if answer.status != 200:
                raise RemoteProtocolError(f"/v1/events answered {answer.status}")
            lines = LineBuffer()
            while data := await answer.content.readany():
                for line in lines.feed(data):
                    if line:
                        await self._take(msgspec.json.decode(line))

    async def _take(self, event: AgentEvent) -> None:
        kind = event.get("event")
        if kind == "hello":
            await self._on_hello(event)
            return
        if isinstance(seq := event.get("seq"), int):
            self._after = max(self._after, seq)
        if kind == "link":
            self.links[event["peer"]] = event
        elif kind == "engine":
            if event["connected"]:
                await self._read_state()  # before it is used: it may be another engine
            else:
                self.engine_connected = False
        elif isinstance(transfer := event.get("transfer"), str) and (
            listener := self._listeners.get(transfer)
        ):
            listener(event)

    async def _on_hello(self, event: AgentEvent) -> None:
        before, self._boot = self._boot, event.get("boot")
        if event.get("seq", 0) < self._after or before not in (None, self._boot):
            # Another process than before: nothing it sends will ever mention the old transfers.
            # Nor would it send anything before its numbers passed the old ones, so ask again from the start.
            self._after = 0
            message = f"the agent of {self.engine_id} was restarted"
            self._fail_all("agent_restarted", message)
            self._listeners.clear()
            raise RemoteProtocolError(message)
        self.connected = self.alive = True
        await self._read_state()
        log.info("following agent %s", self.engine_id)

    async def _read_state(self) -> None:
        async with asyncio.timeout(CONTROL_TIMEOUT_S), self._session.get(f"{self.url}/v1/state") as answer:
            state = await answer.json()
        self.sampler = state.get("sampler", "")  # None: no engine has come yet
        self.engine_connected = bool(state.get("engine_connected"))
        self.chunk_bytes = state.get("chunk_bytes") or self.chunk_bytes
        if isinstance(store := state.get("store"), dict):
            self._on_store(slots=int(store.get("slots", 0)), used=int(store.get("used", 0)))
        for link in state.get("peers", []):
            self.links[link["peer"]] = link
