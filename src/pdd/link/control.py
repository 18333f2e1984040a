"""The control API that both emulators share, over HTTP, and its client for the command line and the demo.

GET /state; POST /set {"rate","delay",...}, /hold, /resume, /cut {"forward"}. Every answer is a JSON object;
an error has one key, ``error``.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
from aiohttp import web

from pdd.core.errors import ConfigurationError, ConnectError
from pdd.core.units import parse_duration_s, parse_rate_bytes_per_s, parse_ratio, parse_size_bytes

CLIENT_TIMEOUT_S = 5.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ControlledLink(Protocol):
    """A line that can be shown and changed while it runs."""

    def state(self) -> object:
        """Settings and counters now, as a dataclass."""

    def set_line(self, **changes: float) -> None:
        """The named settings have new values: ``rate_bytes_per_s``, ``delay_s`` and what else it can show.

        Raises:
            ValueError: If a value makes no sense, or this emulator cannot show it.
        """

    def hold(self, forward: str | None = None) -> None:
        """Nothing moves."""

    def resume(self, forward: str | None = None) -> None:
        """Everything moves again."""

    def cut(self, forward: str | None = None) -> object:
        """What is on the line is lost."""


class SetRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /set; what is absent stays. Only the packet emulator takes more than rate and delay."""

    rate: str | None = None
    delay: str | None = None
    jitter: str | None = None
    loss: str | None = None
    queue: str | None = None
    idle_drop: str | None = None

    def changes(self) -> dict[str, float]:
        """The settings by their names inside PDD, in its units.

        Raises:
            ValueError: If a text is no quantity, or the rate is 0.
        """
        read: dict[str, float] = {}
        for text, name, parse in (
            (self.rate, "rate_bytes_per_s", parse_rate_bytes_per_s),
            (self.delay, "delay_s", parse_duration_s),
            (self.jitter, "jitter_s", parse_duration_s),
            (self.loss, "loss_ratio", parse_ratio),
            (self.queue, "queue_bytes", parse_size_bytes),
            (self.idle_drop, "idle_drop_s", parse_duration_s),
        ):
            if text is not None:
                read[name] = parse(text)
        if read.get("rate_bytes_per_s", 1) <= 0:
            raise ValueError("the rate must be above 0; use /hold to stop the line")
        return read


class ForwardRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /hold, /resume and /cut: one forward by its listening address, or all."""

    forward: str | None = None


def control_app(link: ControlledLink) -> web.Application:
    """The HTTP application that shows and changes one line."""

    async def state(_: web.Request) -> web.Response:
        return _answer(link)

    async def set_line(request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read() or b"{}", type=SetRequest)
        link.set_line(**body.changes())
        return _answer(link)

    def on_forward(change: Callable[[str | None], object]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            change(msgspec.json.decode(await request.read() or b"{}", type=ForwardRequest).forward)
            return _answer(link)

        return handle

    app = web.Application(middlewares=[_explain_errors])
    app.router.add_get("/state", state)
    app.router.add_post("/set", set_line)
    app.router.add_post("/hold", on_forward(link.hold))
    app.router.add_post("/resume", on_forward(link.resume))
    app.router.add_post("/cut", on_forward(link.cut))
    return app


def _answer(link: ControlledLink) -> web.Response:
    return web.Response(body=msgspec.json.encode(link.state()), content_type="application/json")


@web.middleware
async def _explain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except KeyError as error:
        return web.json_response({"error": f"no forward listens at {error.args[0]}"}, status=404)
    except (ValueError, msgspec.MsgspecError) as error:
        return web.json_response({"error": str(error)}, status=400)


def call_control(address: str, action: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the emulator at ``address`` answers to an action.

    Args:
        address: ``host:port`` of its control API.
        action: ``state``, ``set``, ``hold``, ``resume`` or ``cut``.
        body: What the action takes.

    Raises:
        ConfigurationError: If the emulator refuses the request.
        ConnectError: If nobody answers there.
    """
    data = None if action == "state" else json.dumps(body or {}).encode()
    request = urllib.request.Request(f"http://{address}/{action}", data=data)
    try:
        with urllib.request.urlopen(request, timeout=CLIENT_TIMEOUT_S) as response:  # noqa: S310
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        raise ConfigurationError(f"the link at {address} refused: {said}") from error
    except OSError as error:
        raise ConnectError(f"no link emulator answers at {address}: {error}") from error
