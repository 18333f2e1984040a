"""The control port: what the router reads from an agent, and the few things it may ask of it."""

import asyncio
import contextlib
import json
from typing import Any, Final

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from pdd.agent.agent import Agent
from pdd.agent.metrics import AgentCollector

_PING_S: Final = 10.0
_MAX_BODY_BYTES: Final = 64 * 2**10
_AGENT: Final = web.AppKey("agent", Agent)
_REGISTRY: Final = web.AppKey("registry", CollectorRegistry)


def make_app(agent: Agent) -> web.Application:
    """The control API of an agent."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app[_AGENT] = agent
    app[_REGISTRY] = CollectorRegistry()
    app[_REGISTRY].register(AgentCollector(agent))
    app.router.add_get("/health", _health)
    app.router.add_get("/v1/state", _state)
    app.router.add_get("/v1/events", _events)
    app.router.add_get("/v1/transfers/{transfer}", _transfer)
    app.router.add_post("/v1/transfers/{transfer}/cancel", _cancel)
    app.router.add_post("/v1/transfers/{transfer}/release", _release)
    app.router.add_post("/v1/transfers/{transfer}/resume", _resume)
    app.router.add_get("/metrics", _metrics)
    return app


async def _health(_request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _state(request: web.Request) -> web.Response:
    return web.json_response(request.app[_AGENT].state())


async def _metrics(request: web.Request) -> web.Response:
    body = generate_latest(request.app[_REGISTRY])
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def _events(request: web.Request) -> web.StreamResponse:
    agent = request.app[_AGENT]
    try:
        after = int(request.query.get("after", agent.events.seq))
    except ValueError:
        return _error(400, "after must be a whole number")
    if after > agent.events.seq:
        after = 0  # the reader counted in an earlier life of this agent
    headers = {"Content-Type": "application/x-ndjson", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    hello = {
        "event": "hello",
        "agent": agent.engine_id,
        "boot": agent.events.boot,
        "seq": agent.events.seq,
    }
    with contextlib.suppress(ConnectionResetError):  # the reader is gone; it asks again from what it has
        await response.write(_line(hello))
        async for event in agent.events.follow(after, ping_s=_PING_S):
            await response.write(_line(event))
    return response


async def _transfer(request: web.Request) -> web.Response:
    space = request.app[_AGENT].space
    transfer = request.match_info["transfer"]
    if space is not None:
        peers = space.outbound.describe(transfer)
        if peers is not None:
            return web.json_response({"transfer": transfer, "role": "sender", "peers": peers})
        received = space.inbound.describe(transfer)
        if received is not None:
            peer = received.pop("peer") or "unknown"
            return web.json_response({"transfer": transfer, "role": "receiver", "peers": {peer: received}})
    return _error(404, f"no transfer {transfer}")


async def _cancel(request: web.Request) -> web.Response:
    try:
        peers = _peers(await request.read())
    except ValueError as error:
        return _error(400, str(error))
    space = request.app[_AGENT].space
    cancelled = space.outbound.cancel(request.match_info["transfer"], peers) if space else []
    return web.json_response({"cancelled": cancelled})


async def _resume(request: web.Request) -> web.Response:
    space = request.app[_AGENT].space
    resumed = space.outbound.resume(request.match_info["transfer"]) if space else []
    return web.json_response({"resumed": resumed})


async def _release(request: web.Request) -> web.Response:
    space = request.app[_AGENT].space
    # May wait for the engine's socket (``InboundHub.announce``), so not on the event loop.
    released = space is not None and await asyncio.to_thread(
        space.inbound.release, request.match_info["transfer"]
    )
    return web.json_response({"released": released})


def _peers(body: bytes) -> list[str] | None:
    """The ``peers`` of a cancel's body; None for all.

    Raises:
        ValueError: If the body is not such an object.
    """
    try:
        value: Any = json.loads(body) if body.strip() else {}
    except ValueError as error:
        raise ValueError("the body is not JSON") from error
    peers = value.get("peers") if isinstance(value, dict) else ()
    if peers is None:
        return None
    if not isinstance(peers, list) or not all(isinstance(peer, str) for peer in peers):
        raise ValueError('the body must be {} or {"peers": ["id", ...]}')
    return peers


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "BadRequestError", "code": status}}, status=status
    )
