"""Everything that is not generating: models, health, readiness, metrics, version, request records."""

import time
from typing import Any

from aiohttp import web

import pdd
from pdd.router.api.errors import NotFoundError
from pdd.router.records import RecordRing
from pdd.router.request.services import Services


class AdminHandler:
    """Serves the pages an operator, a probe or a client's start-up asks for."""

    def __init__(self, services: Services, records: RecordRing) -> None:
        self._services = services
        self._records = records
        self._created = int(time.time())

    async def health(self, _request: web.Request) -> web.Response:
        """``GET /health``: the router itself lives."""
        return web.Response()

    async def ready(self, _request: web.Request) -> web.Response:
        """``GET /ready``: 200 once a whole path from P to MD exists, else 503 and what is missing.

        Where the model has parsers, their process is part of it.
        """
        missing = self._services.fleet.missing_for_ready()
        if self._services.config.model.parses_answers:
            problem = await self._services.parser.problem()
            missing += [problem] if problem is not None else []
        status = 503 if missing else 200
        body = {
            "ready": not missing,
            "missing": missing,
            "incompatible": self._services.fleet.incompatible(),
        }
        return web.json_response(body, status=status)

    async def models(self, _request: web.Request) -> web.Response:
        """``GET /v1/models``."""
        return web.json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.Response:
        """``GET /v1/models/{id}``."""
        if request.match_info["id"] != self._services.config.model.name:
            raise NotFoundError(f"the model {request.match_info['id']!r} does not exist", param="model")
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        lengths = [
            s.max_model_len for s in self._services.fleet.engines.values() if s.max_model_len is not None
        ]
        name = self._services.config.model.name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdd",
            "root": self._services.config.model.path,
            "parent": None,
            "max_model_len": min(lengths, default=self._services.config.model.max_model_len),
            "permission": [],
        }

    async def version(self, _request: web.Request) -> web.Response:
        """``GET /version``."""
        return web.json_response({"version": pdd.__version__})

    async def metrics(self, _request: web.Request) -> web.Response:
        """``GET /metrics``."""
        metrics = self._services.metrics
        self._refresh()
        for engine, state in self._services.fleet.engines.items():
            view = state.view
            metrics.engine_up.labels(engine=engine).set(view.healthy)
            metrics.engine_running.labels(engine=engine).set(view.running)
            metrics.peer_state.labels(engine=engine).set(view.kv_ready)
            for peer, link in state.agent.links.items():
                is_incompatible = link.get("state") == "incompatible"
                metrics.incompatible.labels(src=engine, dst=peer).set(is_incompatible)
            metrics.breaker_open.labels(engine=engine).set(view.tripped)
            if state.config.role == "relay":
                metrics.auto_mode.labels(engine=engine).set(state.auto_handoff == "catch-up")
            metrics.belief_keys.labels(engine=engine).set(state.belief.num_chunks)
            metrics.belief_blocks.labels(engine=engine).set(state.belief.num_device_blocks)
            for result, count in state.events.take_counts().items():
                metrics.kv_batches.labels(engine=engine, result=result).inc(count)
        return web.Response(
            body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    def _refresh(self) -> None:
        """Tokens that went by the fast path are counted."""
        if self._services.fast_path is not None:
            self._services.fast_path.refresh()

    async def record(self, request: web.Request) -> web.Response:
        """``GET /pdd/requests/{id}``."""
        self._refresh()
        record = self._records.get(request.match_info["id"])
        if record is None:
            raise NotFoundError(f"no request {request.match_info['id']!r} is remembered")
        return web.json_response(record.as_json())

    async def records(self, _request: web.Request) -> web.Response:
        """``GET /pdd/requests``: the latest, oldest first."""
        self._refresh()
        return web.json_response({"requests": [record.as_json() for record in self._records.all()]})

    async def decisions(self, request: web.Request) -> web.Response:
        """``GET /pdd/decisions``: the latest, oldest first; of one request with ``?request=ID``."""
        return web.json_response({"decisions": self._services.decisions.of(request.query.get("request"))})
