"""Asks the policies about one rendered request and puts their answers into a plan."""

from dataclasses import dataclass

from pdd.config.schema import PddConfig, Role
from pdd.core.block_hash import BlockHasher
from pdd.core.errors import NoEndpointError
from pdd.policy.admission import decide_admission
from pdd.policy.outlier import OutlierDecision, OutlierInput, decide_outlier
from pdd.policy.pipeline import PipelineDecision, PipelineInput, decide_pipeline
from pdd.policy.placement import place
from pdd.policy.relayable import RelayDecision
from pdd.policy.snapshot import DeltaView, EngineView, LinkView
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


def make_plan(
    config: PddConfig, fleet: Fleet, prompt: PromptKeys, *, max_tokens: int, relayable: RelayDecision
) -> Planning:
    """The plan for one answer.

    Raises:
        NoEndpointError: If no whole path exists.
    """
    prefills = place(fleet.views("prefill")).order
    relay_views = fleet.views("relay")
    relays = place(relay_views).order if relayable.relayable else ()
    mains = place(fleet.views("main")).order
    admission = decide_admission(prefills=len(prefills), relays=len(relays), mains=len(mains))
    if not admission.admitted:
        detail = "; ".join(fleet.missing_for_ready())
        raise NoEndpointError(f"{_MISSING[admission.reason]}{': ' + detail if detail else ''}")
    main = mains[0] if mains else None
    decision = decide_pipeline(
        PipelineInput(
            forced=config.router.pipeline,
            not_relayable=relayable.reason,
            link=fleet.link(prefills[0], main)
            if main
            else LinkView(rate_bytes_per_s=1.0, rtt_s=0.0, up=False),
            delta=fleet.delta(main, prompt.keys)
            if main
            else DeltaView(missing_chunks=len(prompt.keys), chunk_bytes=0),
            relay=_view(relay_views, relays),
            main_reachable=main is not None,
            second_token_slo_s=config.policy.second_token_slo_s,
            max_tokens=max_tokens,
        )
    )
    relay = _view(relay_views, relays)
    outlier = decide_outlier(
        OutlierInput(
            relayed=decision.reason == "wan_beyond_slo",
            predicted_wan_s=decision.predicted_wan_s,
            max_tokens=max_tokens,
            history_tokens=fleet.history.bound_tokens(prompt.tenant),
            relay_itl_s=(relay.itl_s if relay else None) or config.policy.assumed_relay_itl_s,
            margin_ratio=config.policy.outlier_margin_ratio,
        )
    )
    plan = Plan(
        pipeline=decision.pipeline,
        prefills=prefills,
        relays=relays,
        mains=mains,
        max_tokens=max_tokens,
        whole_on_main=relayable.whole_on_main,
        relays_allowed=relayable.relayable,
        hold_tokens=outlier.hold_tokens,
    )
    return Planning(plan=plan, pipeline=decision, outlier=outlier, relayable=relayable, prompt=prompt)


def engines_now(fleet: Fleet, *, tokens: int) -> EnginesNow:
    """The engines that can be used now for prompt and answer of so many tokens together."""

    def usable(role: Role) -> tuple[str, ...]:
        views = fleet.views(role)
        return place(v for v in views if v.max_model_len is None or v.max_model_len >= tokens).order

    return EnginesNow(prefills=usable("prefill"), relays=usable("relay"), mains=usable("main"))


def _view(views: list[EngineView], order: tuple[str, ...]) -> EngineView | None:
    return next((view for view in views if order and view.id == order[0]), None)
