"""From a checked and rendered request to what computes it: one run for every choice."""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pdd.policy.relayable import RelayDecision, decide_relayable
from pdd.router.api.body import ChatBody, CompletionBody, stops
from pdd.router.api.errors import BadRequestError
from pdd.router.api.shapes import Choice
from pdd.router.api.sinks import Run
from pdd.router.claims import Claim
from pdd.router.detokenize import TextOptions
from pdd.router.kv_events import block_hasher
from pdd.router.records import Record, RecordRing
from pdd.router.request.driver import RequestDriver
from pdd.router.request.job import Job, Rendered
from pdd.router.request.planning import Planner, Planning, prompt_keys, reserve
from pdd.router.request.services import Services

COMPLETION_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for ``/v1/completions``."""
_TRANSFER_ID_CHARS = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")

Body = ChatBody | CompletionBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One client's request: its id, when it came, how long it may take, and what its engines are told."""

    id: str
    body: Body
    arrived_s: float
    timeout_s: float
    engine_headers: Mapping[str, str]

    @property
    def deadline_s(self) -> float:
        """When its time is over, on the event loop's clock."""
        return self.arrived_s + self.timeout_s


class RunFactory:
    """Plans every choice of a request."""

    def __init__(self, services: Services, records: RecordRing) -> None:
        self._services = services
        self._records = records
        self._hasher = block_hasher(services.config)
        self._planner = Planner(config=services.config, fleet=services.fleet, decisions=services.decisions)

    @contextmanager
    def planned(self, asked: Asked, prompts: Sequence[Rendered]) -> Iterator[list[Run]]:
        """A run for each copy of each prompt; what has not begun when the context ends, never does.

        Raises:
            NoEndpointError: If no whole path exists.
            BadRequestError: If a prompt and its answer do not fit.
        """
        reserved: list[Claim] = []
        try:
            yield self._plan(asked, prompts, reserved)
        finally:
            for claim in reserved:
                claim.close()

    def _plan(self, asked: Asked, prompts: Sequence[Rendered], reserved: list[Claim]) -> list[Run]:
        body = asked.body
        runs: list[Run] = []
        for rendered in prompts:
            relayable = self._relayable(body, rendered)
            keys = prompt_keys(self._hasher, rendered)
            for copy in range(body.n or 1):
                index = len(runs)
                max_tokens = max(1, rendered.max_tokens)
                planning = self._planner.plan(asked.id, keys, max_tokens=max_tokens, relayable=relayable)
                max_tokens = self._check_length(body, rendered, planning, max_tokens)
                if max_tokens != planning.plan.max_tokens:
                    planning = replace(planning, plan=replace(planning.plan, max_tokens=max_tokens))
                record = self._record(asked, index, rendered, planning)
                reservation = reserve(self._services.fleet, planning)
                reserved.extend(reservation)
                driver = RequestDriver(
                    services=self._services,
                    job=_job(asked, index, _with_seed(rendered, copy), max_tokens),
                    planning=planning,
                    reservation=reservation,
                    record=record,
                    arrived_s=asked.arrived_s,
                )
                choice = Choice(
                    index=index, prompt_ids=rendered.token_ids, echo_text=self._echo(body, rendered)
                )
                runs.append(Run(choice=choice, driver=driver))
        for run in runs:  # only now: what has a record is run, and ends it
            self._records.add(run.driver.record)
        return runs

    def _relayable(self, body: Body, rendered: Rendered) -> RelayDecision:
        words = body.bad_words or []
        # A word counts with and without a leading space, as the engine bans both.
        encoded = [
            self._services.tokenizer.encode(p + w, add_special_tokens=False) for w in words for p in ("", " ")
        ]
        return decide_relayable(
            rendered.sampling_params,
            multimodal=rendered.multimodal,
            echo=bool(body.echo),
            multi_token_bad_words=any(len(encoding.ids) > 1 for encoding in encoded),
            sampler_state_carried=self._services.fleet.carries_sampler_state,
        )

    def _check_length(self, body: Body, rendered: Rendered, planning: Planning, max_tokens: int) -> int:
        """The most tokens every planned engine has room for.

        Raises:
            BadRequestError: If the prompt, or prompt and wanted answer together, exceed what one takes.
        """
        plan = planning.plan
        states = self._services.fleet.engines
        limits = [states[e].max_model_len for e in (*plan.prefills, *plan.relays, *plan.mains)]
        limit = min((limit for limit in limits if limit is not None), default=None)
        if limit is None:
            return max_tokens
        asked = _asked_tokens(body)
        prompt = len(rendered.token_ids)
        if prompt + (asked or 1) > limit:
            raise BadRequestError(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{asked or 1} output tokens and your prompt contains {prompt} input tokens.",
                param="max_tokens" if prompt < limit else "prompt",
            )
        return min(max_tokens, limit - prompt)

    def _record(self, asked: Asked, index: int, rendered: Rendered, planning: Planning) -> Record:
        decision, plan = planning.pipeline, planning.plan
        record = Record(
            id=asked.id if index == 0 else f"{asked.id}-{index}",
            arrived_s=asked.arrived_s,
            pipeline=decision.pipeline,
            reason=decision.reason,
            reason_detail=decision.detail or None,
            prefill=plan.prefills[0],
            relay=plan.relays[0] if plan.relays and decision.pipeline == "p-rld-md" else None,
            main=plan.mains[0] if plan.mains else None,
            prompt_tokens=len(rendered.token_ids),
            outlier=planning.outlier.is_outlier,
            predicted_wan_s=decision.predicted_wan_s if decision.predicted_wan_s != float("inf") else None,
        )
        metrics = self._services.metrics
        metrics.decisions.labels(path=decision.pipeline, reason=decision.reason).inc()
        if planning.relayable.reason is not None:
            metrics.not_relayable.labels(what=planning.relayable.reason).inc()
        return record

    def _echo(self, body: Body, rendered: Rendered) -> str:
        if not body.echo:
            return ""
        return self._services.tokenizer.decode(
            list(rendered.token_ids), skip_special_tokens=body.skip_special_tokens
        )


def _job(asked: Asked, index: int, rendered: Rendered, max_tokens: int) -> Job:
    safe = _UNSAFE.sub("_", asked.id[:_TRANSFER_ID_CHARS])
    body = asked.body
    # A parser's needs may have changed it where the request was rendered.
    skips: Any = rendered.sampling_params.get("skip_special_tokens", body.skip_special_tokens)
    return Job(
        request_id=asked.id,
        transfer_prefix=f"{safe}-{index}-{secrets.token_hex(6)}",
        rendered=rendered,
        text=TextOptions(
            stop=stops(body),
            include_stop=body.include_stop_str_in_output,
            min_tokens=body.min_tokens or 0,
            skip_special_tokens=bool(skips),
        ),
        max_tokens=max_tokens,
        timeout_s=asked.timeout_s,
        headers=asked.engine_headers,
    )


def _asked_tokens(body: Body) -> int | None:
    if isinstance(body, ChatBody):
        return body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return body.max_tokens if body.max_tokens is not None else COMPLETION_DEFAULT_MAX_TOKENS


def _with_seed(rendered: Rendered, copy: int) -> Rendered:
    """Copies of one prompt draw from different seeds, as vLLM's do."""
    seed = rendered.sampling_params.get("seed")
    if not copy or not isinstance(seed, int):
        return rendered
    params = {**rendered.sampling_params, "seed": seed + copy}
    return Rendered(token_ids=rendered.token_ids, sampling_params=params, carried=rendered.carried)
