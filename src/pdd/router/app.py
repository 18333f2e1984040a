"""The router's web application: routes, request ids, API keys, and errors as JSON."""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from pdd.config.load import parse_socket
from pdd.config.schema import PddConfig
from pdd.core.errors import ConfigurationError, PddError
from pdd.router.api.admin import AdminHandler
from pdd.router.api.errors import MethodError, NotFoundError, UnauthorizedError, error_response
from pdd.router.api.generate import ARRIVED_S, REQUEST_ID, GenerateHandler
from pdd.router.decisions import DecisionLog
from pdd.router.detokenize import load_tokenizer
from pdd.router.door import Door
from pdd.router.fastpath.lanes import FastPath
from pdd.router.fastpath.library import load
from pdd.router.fastpath.vocabulary import vocabulary_of
from pdd.router.fleet import Fleet
from pdd.router.metrics import RouterMetrics
from pdd.router.parsing import ParserClient
from pdd.router.records import RecordRing
from pdd.router.request.services import Services

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
"""Probes and scrapers carry no key."""
MAX_REQUEST_ID_CHARS = 256
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RouterApp:
    """One router: build it inside a running event loop.

    Args:
        config: The whole configuration.
        tokenizer: For tests; the model's by default.
    """

    def __init__(self, config: PddConfig, *, tokenizer: Tokenizer | None = None) -> None:
        self.config = config
        self.fleet = Fleet(config)
        self.records = RecordRing()
        self.metrics = RouterMetrics()
        self._background: set[asyncio.Task[None]] = set()
        self.decisions = DecisionLog(path=config.router.decision_log)
        tokenizer = tokenizer or load_tokenizer(config.model.path)
        self.services = Services(
            config=config,
            fleet=self.fleet,
            tokenizer=tokenizer,
            metrics=self.metrics,
            background=self._run_in_background,
            door=Door(
                max_concurrent=config.router.max_concurrent_requests,
                queue_size=config.router.queue_size,
                metrics=self.metrics,
                decisions=self.decisions,
            ),
            decisions=self.decisions,
            parser=ParserClient(parse_socket(config)),
            fast_path=_fast_path(tokenizer) if config.router.fast_path else None,
        )
        self.app = self._build()

    def _build(self) -> web.Application:
        app = web.Application(middlewares=[self._around], client_max_size=self.config.router.max_body_bytes)
        generate = GenerateHandler(self.services, self.records)
        admin = AdminHandler(self.services, self.records)
        app.add_routes(
            [
                web.post("/v1/chat/completions", generate.chat),
                web.post("/v1/completions", generate.completion),
                web.get("/v1/models", admin.models),
                web.get("/v1/models/{id:.+}", admin.model),
                web.get("/health", admin.health),
                web.get("/ping", admin.health),
                web.get("/ready", admin.ready),
                web.get("/version", admin.version),
                web.get("/metrics", admin.metrics),
                web.get("/pdd/decisions", admin.decisions),
                web.get("/pdd/requests", admin.records),
                web.get("/pdd/requests/{id:.+}", admin.record),
            ]
        )
        app.on_response_prepare.append(_echo_request_id)
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)
        return app

    async def _start(self, _app: web.Application) -> None:
        if self.services.fast_path is not None:
            self.services.fast_path.start()
        await self.fleet.start()

    async def _stop(self, _app: web.Application) -> None:
        if self._background:
            await asyncio.wait(self._background, timeout=2.0)
        self.services.parser.close()
        await self.fleet.close()
        if self.services.fast_path is not None:
            self.services.fast_path.close()

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run to the end whatever becomes of the request that wanted it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request[ARRIVED_S] = asyncio.get_running_loop().time()
        request[REQUEST_ID] = _request_id(request)
        error: PddError
        try:
            self._authenticate(request)
            return await handler(request)
        except PddError as known:
            error = known
        except web.HTTPNotFound:
            error = NotFoundError(f"there is no {request.path}")
        except web.HTTPMethodNotAllowed:
            error = MethodError(f"{request.path} does not take {request.method}")
        except (web.HTTPException, ConnectionError):
            raise  # the latter: the client left, and its request has ended everywhere
        except Exception as unknown:  # process boundary: a bug must not look like a closed connection
            log.exception("request %s failed", request[REQUEST_ID])
            error = PddError(f"internal error: {type(unknown).__name__}")
        response = error_response(error)
        self.metrics.errors.labels(status=str(response.status)).inc()
        log.info("request %s: %d %s", request[REQUEST_ID], response.status, error)
        return response

    def _authenticate(self, request: web.Request) -> None:
        keys = self.config.router.api_keys
        if keys and request.path not in OPEN_PATHS:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            # Every key is compared in full, so that the time says nothing about them.
            matches = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
            if scheme.lower() != "bearer" or not any(matches):
                raise UnauthorizedError("a valid API key is needed: Authorization: Bearer <key>")


def _fast_path(tokenizer: Tokenizer) -> FastPath | None:
    """None if tokens have to go through Python, which costs CPU and nothing else."""
    try:
        load()
    except ConfigurationError as error:
        log.warning("no fast path: %s", error)
        return None
    if (vocabulary := vocabulary_of(tokenizer)) is None:
        log.warning("no fast path: the texts of this tokenizer's tokens depend on their neighbours")
        return None
    return FastPath(vocabulary)


def _request_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "").strip()
    return given[:MAX_REQUEST_ID_CHARS] if given.isprintable() and given else secrets.token_hex(16)


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
