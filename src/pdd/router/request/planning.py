"""Asks the policies about one rendered request and puts their answers into a plan."""

from dataclasses import dataclass

from pdd.config.schema import PddConfig
from pdd.core.block_hash import BlockHasher
from pdd.core.errors import NoEndpointError
from pdd.policy.admission import decide_admission
from pdd.policy.pipeline import PipelineDecision, PipelineInput, decide_pipeline
from pdd.policy.placement import place
from pdd.policy.relayable import RelayDecision
from pdd.policy.snapshot import DeltaView, EngineView, LinkView
from pdd.router.fleet import Fleet
from pdd.router.request.events import Plan
from pdd.router.request.job import Rendered

_MISSING = {
    "no_prefill_engine": "no prefill engine is ready",
    "no_decode_engine": "no decode engine is ready",
}
_NO_LINK = LinkView(rate_bytes_per_s=1.0, rtt_s=0.0, up=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """A plan and the decisions it came from; ``keys`` are the prompt's chunk keys."""

    plan: Plan
    pipeline: PipelineDecision
    relayable: RelayDecision
    keys: list[bytes]


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
    config: PddConfig, fleet: Fleet, rendered: Rendered, *, max_tokens: int, relayable: RelayDecision
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
    salt = rendered.carried.get("cache_salt")
    keys = [] if rendered.multimodal else block_hasher(config).chunk_keys(rendered.token_ids, cache_salt=salt)
    main = mains[0] if mains else None
    decision = decide_pipeline(
        PipelineInput(
            forced=config.router.pipeline,
            not_relayable=relayable.reason,
            link=fleet.link(prefills[0], main)
            if main
            else LinkView(rate_bytes_per_s=1.0, rtt_s=0.0, up=False),
            delta=fleet.delta(main, keys) if main else DeltaView(missing_chunks=len(keys), chunk_bytes=0),
            relay=_view(relay_views, relays),
            main_reachable=main is not None,
            second_token_slo_s=config.policy.second_token_slo_s,
            max_tokens=max_tokens,
        )
    )
    plan = Plan(
        pipeline=decision.pipeline,
        prefills=prefills,
        relays=relays,
        mains=mains,
        max_tokens=max_tokens,
        whole_on_main=relayable.whole_on_main,
    )
    return Planning(plan=plan, pipeline=decision, relayable=relayable, keys=keys)


def _view(views: list[EngineView], order: tuple[str, ...]) -> EngineView | None:
    return next((view for view in views if order and view.id == order[0]), None)
