"""Asks the policies about one rendered request and puts their answers into a plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pdd.config.schema import PddConfig, Role
from pdd.core.block_hash import BlockHasher
from pdd.core.errors import NoEndpointError
from pdd.policy.outlier import OutlierDecision, OutlierInput
from pdd.policy.pipeline import PipelineDecision, PipelineInput
from pdd.policy.placement import place
from pdd.policy.relayable import RelayDecision
from pdd.policy.snapshot import DeltaView, EngineView, LinkView
from pdd.router.decisions import DecisionLog
from pdd.router.fleet import Fleet
from pdd.router.request.events import EnginesNow, Plan
from pdd.router.request.job import Rendered

_MISSING = {
    "no_prefill_engine": "no prefill engine is ready",
    "no_decode_engine": "no decode engine is ready",
}
_NO_LINK = LinkView(rate_bytes_per_s=1.0, rtt_s=0.0, up=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKeys:
    """The content addresses of a prompt's chunks; empty where they cannot be known."""

    hasher: BlockHasher
    keys: list[bytes]
    token_ids: list[int]
    tenant: str = ""

    def with_reply(self, reply: list[int]) -> list[bytes]:
        """The keys of prompt and reply, hashing only what the prompt's keys do not cover."""
        if not self.keys:
            return []
        rest = self.token_ids[len(self.keys) * self.hasher.chunk_tokens :] + reply
        return self.keys + self.hasher.chunk_keys(rest, parent_key=self.keys[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """A plan and the decisions it came from."""

    plan: Plan
    pipeline: PipelineDecision
    outlier: OutlierDecision
    relayable: RelayDecision
    prompt: PromptKeys
    believed_missing: Mapping[str, int]


def prompt_keys(hasher: BlockHasher, rendered: Rendered) -> PromptKeys:
    """The prompt's chunk keys; 12 ms for 64 thousand tokens, so do it once per prompt."""
    salt = rendered.carried.get("cache_salt")
    # The hashes of images are the engine's business; without them every key would be wrong.
    keys = [] if rendered.multimodal else hasher.chunk_keys(rendered.token_ids, cache_salt=salt)
    return PromptKeys(hasher=hasher, keys=keys, token_ids=rendered.token_ids, tenant=rendered.tenant)


def block_hasher(config: PddConfig) -> BlockHasher:
    """The hasher that agrees with the fleet's engines."""
    return BlockHasher(
        algo=config.kv.hash_algo,
        seed=config.kv.hash_seed,
        block_tokens=config.kv.block_size_tokens,
        blocks_per_chunk=config.kv.blocks_per_chunk,
    )


def choose_prefill(fleet: Fleet) -> str:
    """The P engine to render and prefill on.

    Raises:
        NoEndpointError: If none is ready.
    """
    order = place(fleet.views("prefill")).order
    if not order:
        raise NoEndpointError(f"{_MISSING['no_prefill_engine']}: {'; '.join(fleet.missing_for_ready())}")
    return order[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Asks the policies for one request after the other, each decision written down."""

    config: PddConfig
    fleet: Fleet
    decisions: DecisionLog

    def plan(
        self, request: str, prompt: PromptKeys, *, max_tokens: int, relayable: RelayDecision
    ) -> Planning:
        """The plan for one answer.

        Raises:
            NoEndpointError: If no whole path exists.
        """
        fleet = self.fleet
        decide = partial(self.decisions.decide, request=request)
        relay_views = fleet.views("relay")
        prefills = decide("placement", engines=fleet.views("prefill")).order
        relays = decide("placement", engines=relay_views).order if relayable.relayable else ()
        mains = decide("placement", engines=fleet.views("main")).order
        admission = decide("admission", prefills=len(prefills), relays=len(relays), mains=len(mains))
        if not admission.admitted:
            detail = "; ".join(fleet.missing_for_ready())
            raise NoEndpointError(f"{_MISSING[admission.reason]}{': ' + detail if detail else ''}")
        main = mains[0] if mains else None
        relay = next((view for view in relay_views if relays and view.id == relays[0]), None)
        delta = fleet.delta(main, prompt.keys) if main else _no_delta(prompt)
        pipeline: PipelineDecision = decide(
            "pipeline",
            facts=PipelineInput(
                forced=self.config.router.pipeline,
                not_relayable=relayable.reason,
                link=fleet.link(prefills[0], main) if main else _NO_LINK,
                delta=delta,
                relay=relay,
                main_reachable=main is not None,
                second_token_slo_s=self.config.policy.second_token_slo_s,
                max_tokens=max_tokens,
            ),
        )
        outlier: OutlierDecision = decide(
            "outlier", facts=self._outlier_input(pipeline, relay, prompt, max_tokens)
        )
        plan = Plan(
            pipeline=pipeline.pipeline,
            prefills=prefills,
            relays=relays,
            mains=mains,
            max_tokens=max_tokens,
            whole_on_main=relayable.whole_on_main,
            relays_allowed=relayable.relayable,
            hold_tokens=outlier.hold_tokens,
        )
        return Planning(
            plan=plan,
            pipeline=pipeline,
            outlier=outlier,
            relayable=relayable,
            prompt=prompt,
            believed_missing={main: delta.missing_chunks} if main and prompt.keys else {},
        )

    def _outlier_input(
        self, pipeline: PipelineDecision, relay: EngineView | None, prompt: PromptKeys, max_tokens: int
    ) -> OutlierInput:
        policy = self.config.policy
        return OutlierInput(
            relayed=pipeline.reason == "wan_beyond_slo",
            predicted_wan_s=pipeline.predicted_wan_s,
            max_tokens=max_tokens,
            history_tokens=self.fleet.history.bound_tokens(prompt.tenant),
            relay_itl_s=(relay.itl_s if relay else None) or policy.assumed_relay_itl_s,
            margin_ratio=policy.outlier_margin_ratio,
            known_ratio=self.fleet.known_ratio(prompt.keys),
            returning_ratio=policy.outlier_returning_ratio,
        )


def _no_delta(prompt: PromptKeys) -> DeltaView:
    return DeltaView(missing_chunks=len(prompt.keys), chunk_bytes=0)


def engines_now(fleet: Fleet, *, tokens: int) -> EnginesNow:
    """The engines that can be used now for prompt and answer of so many tokens together."""

    def usable(role: Role) -> tuple[str, ...]:
        views = fleet.views(role)
        return place(v for v in views if v.max_model_len is None or v.max_model_len >= tokens).order

    return EnginesNow(prefills=usable("prefill"), relays=usable("relay"), mains=usable("main"))
