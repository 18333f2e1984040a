"""Asks the policies about one rendered request and puts their answers into a plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pdd.config.schema import PddConfig, Role
from pdd.core.block_hash import BlockHasher
from pdd.core.errors import NoEndpointError
from pdd.policy.handoff import HandoffDecision, HandoffParams
from pdd.policy.outlier import OutlierDecision, OutlierInput
from pdd.policy.pipeline import PipelineDecision, PipelineInput
from pdd.policy.placement import place
from pdd.policy.relayable import RelayDecision
from pdd.policy.snapshot import DeltaView, EngineView, LinkView
from pdd.router.belief import PromptBlocks, block_name
from pdd.router.claims import Claim
from pdd.router.decisions import DecisionLog
from pdd.router.fleet import EngineState, Fleet
from pdd.router.request.events import EnginesNow, Plan
from pdd.router.request.job import Rendered

_MISSING = {
    "no_prefill_engine": "no prefill engine is ready",
    "no_decode_engine": "no decode engine is ready",
}
_NO_LINK = LinkView(rate_bytes_per_s=1.0, rtt_s=0.0, up=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKeys:
    """The content addresses of a prompt's blocks; empty where they cannot be known.

    ``blocks`` is the prompt as the belief about caches knows it.
    """

    hasher: BlockHasher
    hashes: list[bytes]
    token_ids: Sequence[int]
    blocks: PromptBlocks
    tenant: str = ""

    def with_reply(self, reply: list[int]) -> PromptBlocks:
        """Prompt and reply, hashing only what the prompt's hashes do not cover."""
        if not self.hashes:
            return self.blocks
        rest = [*self.token_ids[len(self.hashes) * self.hasher.block_tokens :], *reply]
        more = self.hasher.block_hashes(rest, parent=self.hashes[-1])
        names = self.blocks.names + _names(more)
        return _blocks(self.hasher, names, len(self.token_ids) + len(reply))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """A plan and the decisions it came from."""

    plan: Plan
    pipeline: PipelineDecision
    outlier: OutlierDecision
    relayable: RelayDecision
    prompt: PromptKeys
    believed_missing: Mapping[str, int]
    believed_held_tokens: Mapping[str, int]


def prompt_keys(hasher: BlockHasher, rendered: Rendered) -> PromptKeys:
    """The prompt's block hashes; 12 ms for 64 thousand tokens, so do it once per prompt."""
    salt = rendered.carried.get("cache_salt")
    # The hashes of images are the engine's business; without them every hash would be wrong.
    hashes = [] if rendered.multimodal else hasher.block_hashes(rendered.token_ids, cache_salt=salt)
    return PromptKeys(
        hasher=hasher,
        hashes=hashes,
        token_ids=rendered.token_ids,
        blocks=_blocks(hasher, _names(hashes), len(rendered.token_ids)),
        tenant=rendered.tenant,
    )


def _names(hashes: Iterable[bytes]) -> tuple[int, ...]:
    return tuple([block_name(block_hash) for block_hash in hashes])


def _blocks(hasher: BlockHasher, names: tuple[int, ...], num_tokens: int) -> PromptBlocks:
    return PromptBlocks(
        names=names,
        num_tokens=num_tokens,
        block_tokens=hasher.block_tokens,
        blocks_per_chunk=hasher.blocks_per_chunk,
    )


def reserve(fleet: Fleet, planning: Planning) -> list[Claim]:
    """What was planned counts at its engines from now on, though nothing of it runs yet.

    Several answers are planned before the first of them begins; without this, each would be placed as if it
    were alone.
    """
    plan, engines = planning.plan, fleet.engines
    prefill = plan.prefills[0]
    missing = len(planning.prompt.token_ids) - planning.believed_held_tokens.get(prefill, 0)
    claims = [engines[prefill].claims.open(computes_tokens=max(0, missing))]
    claims.extend(engines[engine].claims.open() for engine in plan.first_targets)
    return claims


def prefill_order(fleet: Fleet) -> tuple[str, ...]:
    """The P engines that may render, best first.

    Raises:
        NoEndpointError: If none is ready.
    """
    order = place(fleet.views("prefill")).order
    if not order:
        raise NoEndpointError(f"{_MISSING['no_prefill_engine']}: {'; '.join(fleet.missing_for_ready())}")
    return order


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
        blocks = prompt.blocks
        order = partial(
            decide,
            "placement",
            prompt_tokens=blocks.num_tokens,
            affinity_weight_ratio=self.config.policy.affinity_weight_ratio,
        )
        prefill_views = fleet.views_for("prefill", blocks)
        relay_views = fleet.views_for("relay", blocks)
        prefills = order(engines=prefill_views).order
        relays = order(engines=relay_views).order if relayable.relayable else ()
        mains = order(engines=fleet.views_for("main", blocks)).order
        admission = decide("admission", prefills=len(prefills), relays=len(relays), mains=len(mains))
        if not admission.admitted:
            detail = "; ".join(fleet.missing_for_ready())
            raise NoEndpointError(f"{_MISSING[admission.reason]}{': ' + detail if detail else ''}")
        main = mains[0] if mains else None
        relay = next((view for view in relay_views if relays and view.id == relays[0]), None)
        delta = fleet.delta(main, blocks) if main else _no_delta(blocks)
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
            "outlier",
            facts=self._outlier_input(
                pipeline,
                relay,
                tenant=prompt.tenant,
                max_tokens=max_tokens,
                known_ratio=_known_ratio(blocks, (*prefill_views, *relay_views)),
            ),
        )
        plan = Plan(
            pipeline=pipeline.pipeline,
            prefills=prefills,
            relays=relays,
            mains=mains,
            max_tokens=max_tokens,
            prompt_tokens=len(prompt.token_ids),
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
            believed_missing={main: delta.missing_chunks} if main and prompt.hashes else {},
            believed_held_tokens={view.id: view.held_tokens for view in prefill_views if prompt.hashes},
        )

    def _outlier_input(
        self,
        pipeline: PipelineDecision,
        relay: EngineView | None,
        *,
        tenant: str,
        max_tokens: int,
        known_ratio: float,
    ) -> OutlierInput:
        policy = self.config.policy
        return OutlierInput(
            relayed=pipeline.reason == "wan_beyond_slo",
            predicted_wan_s=pipeline.predicted_wan_s,
            max_tokens=max_tokens,
            history_tokens=self.fleet.history.bound_tokens(tenant),
            relay_itl_s=(relay.itl_s if relay else None) or policy.assumed_relay_itl_s,
            margin_ratio=policy.outlier_margin_ratio,
            known_ratio=known_ratio,
            returning_ratio=policy.outlier_returning_ratio,
        )


def _known_ratio(prompt: PromptBlocks, views: Iterable[EngineView]) -> float:
    """Share of the prompt that the engine which knows most of it is believed to hold."""
    return max((view.held_tokens for view in views), default=0) / max(1, prompt.num_tokens)


def _no_delta(prompt: PromptBlocks) -> DeltaView:
    return DeltaView(missing_chunks=len(prompt.chunks), chunk_bytes=0)


def choose_handoff(
    config: PddConfig, decisions: DecisionLog, *, request: str, relay: EngineState, gap_tokens: int
) -> HandoffDecision:
    """How RLD hands over an answer of which MD lacks so many tokens."""
    policy = config.policy
    decision: HandoffDecision = decisions.decide(
        "handoff",
        request=request,
        gap_tokens=gap_tokens,
        relay_load_ratio=relay.view.load_ratio,
        previous=relay.auto_handoff,
        params=HandoffParams(
            forced=config.router.handoff,
            one_shot_max_gap_tokens=policy.one_shot_max_gap_tokens,
            catch_up_gap_tokens=policy.catch_up_gap_tokens,
            catch_up_max_rounds=policy.catch_up_max_rounds,
            block_tokens=config.kv.block_size_tokens,
            busy_ratio=policy.busy_ratio,
            idle_ratio=policy.idle_ratio,
        ),
    )
    return decision


def engines_now(
    fleet: Fleet, prompt: PromptBlocks, *, tokens: int, affinity_weight_ratio: float
) -> EnginesNow:
    """The engines that can be used now for prompt and answer of so many tokens together."""

    def usable(role: Role) -> tuple[str, ...]:
        views = fleet.views_for(role, prompt)
        return place(
            (v for v in views if v.max_model_len is None or v.max_model_len >= tokens),
            prompt_tokens=prompt.num_tokens,
            affinity_weight_ratio=affinity_weight_ratio,
        ).order

    return EnginesNow(prefills=usable("prefill"), relays=usable("relay"), mains=usable("main"))
