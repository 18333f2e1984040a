"""The schema of a scenario file: every assumption behind a prediction, with its unit.

Owns the sections and their checks; ``scenario_file`` reads them. Quantities people type (``"100gbit"``,
``"30ms"``, ``"512GiB"``) are parsed here; from here on everything is bytes, seconds and bytes per second.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pdd.core.units import parse_duration_s, parse_rate_bytes_per_s, parse_size_bytes

Rate = Annotated[
    float, BeforeValidator(lambda v: parse_rate_bytes_per_s(v) if isinstance(v, str) else v), Field(gt=0)
]
Duration = Annotated[
    float, BeforeValidator(lambda v: parse_duration_s(v) if isinstance(v, str) else v), Field(ge=0)
]
Size = Annotated[
    float, BeforeValidator(lambda v: parse_size_bytes(v) if isinstance(v, str) else v), Field(gt=0)
]
Ratio = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Architecture = Literal["one-site", "naive", "prfaas", "pdd", "pdd-with-p-rld"]


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSection(Section):
    """The model that all engines serve."""

    config: str
    """A bundled name (``qwen3-32b``), a ``config.json``, or a folder that holds one."""
    kv_layout: Literal["bf16", "fp8", "fp8_mla"] = "bf16"
    """How KV is stored and sent."""
    indexer_layout: Literal["default", "bf16", "fp8", "fp4", "none"] = "default"
    """Layout of a sparse-attention indexer's keys."""
    bytes_per_param: Annotated[float, Field(gt=0)] = 2.0
    """Of the weights: 1 for fp8, 2 for bf16, 0.53 for 4-bit formats with scales."""
    fp8_compute: bool = False
    """Matrix products run at the fp8 peak."""


class EfficiencySection(Section):
    """How much of each peak is reached. Assumptions: replace them by your own measurements."""

    linear_ratio: Ratio = 0.5
    attention_ratio: Ratio = 0.5
    bandwidth_ratio: Ratio = 0.8
    link_ratio: Ratio = 0.7
    memory_ratio: Ratio = 0.9
    step_overhead: Duration = 0.002
    chunk_overhead: Duration = 0.005
    tile_tokens: Count = 128


class WorkloadSection(Section):
    """Where requests come from."""

    kind: Literal["synthetic-agent", "agent-trace", "mooncake", "azure"]
    path: str = ""
    """Of a trace, relative to the scenario file."""
    requests: Count | None = None
    """How many to simulate; default: the whole trace, 20,000 for a generator."""
    rate_per_s: Annotated[float, Field(gt=0)] | None = None
    """Mean arrival rate. A trace's sessions are re-started to reach it; None keeps recorded times."""
    is_causal: bool = True
    """A session's next turn waits for the answer to the one before; false: recorded times come what may."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """This first share of the time fills caches and is not measured."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "synthetic-agent":
            if self.rate_per_s is None:
                raise ValueError("workload.rate_per_s is required for a synthetic workload")
            if self.path:
                raise ValueError("workload.path does not apply to a synthetic workload")
        elif not self.path:
            raise ValueError(f"workload.path is required for {self.kind}")
        return self


class SloSection(Section):
    """When a request counts as good."""

    ttft: Duration
    """First token after arrival."""
    second_token: Duration
    """Second token after arrival: what a relay exists for."""
    tpot: Duration
    """Mean time per output token after the second."""
    attainment_ratio: Ratio = 0.9
    """Share of requests that must meet all three for a rate to count as carried."""


class RoleSection(Section):
    """One role's engines."""

    chip: str
    """Key in the table of chips."""
    engines: Annotated[int, Field(ge=0)]
    chips_per_engine: Count = 1
    """Tensor or expert parallel degree."""
    cache: Size = 512e9
    """Host memory for prefix KV, per engine."""
    max_batch: Count = 256
    """``--max-num-seqs``."""
    chunk_tokens: Count = 8192
    """``--max-num-batched-tokens`` of prefill."""
    cost: Annotated[float, Field(gt=0)] | None = None
    """Of one chip per hour, or relative to the baseline's chip; default: the table's price."""
    prefill_curve: str = ""
    """CSV of measured prefill times; replaces the roofline."""
    decode_curve: str = ""
    """CSV of measured decode steps; replaces the roofline."""


class FleetSection(Section):
    """What is bought, and how it is used."""

    architecture: Architecture = "pdd"
    prefill: RoleSection
    """Site A (for ``prfaas``: the remote prefill cluster)."""
    relay: RoleSection | None = None
    """Site A."""
    main: RoleSection
    """Site B (for ``one-site``: decode, beside prefill)."""
    local_prefill: RoleSection | None = None
    """``prfaas`` only: prefill engines beside decode."""
    prefill_cache: Literal["pool", "engine"] = "pool"
    """Whether prefill engines share one prefix store or each keeps its own."""
    main_cache: bool = True
    """The decode-side radix cache (DRC). Without it every prompt's whole KV crosses."""
    offload_above_tokens: Count = 8192
    """``prfaas`` only: uncached length from which prefill goes remote."""
    relay_shares_prefill: bool = False
    """Relays decode on the prefill engines, one token a chunk; no ``relay`` is needed then, or bought."""

    @property
    def has_relays(self) -> bool:
        """Whether the architecture relays requests."""
        return self.architecture.startswith("pdd")

    @property
    def owned_relay(self) -> RoleSection | None:
        """The relay engines that are bought; None if there are none of their own."""
        return self.relay if self.has_relays and not self.relay_shares_prefill else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.prefill.engines or not self.main.engines:
            raise ValueError("fleet needs at least one prefill and one main engine (engines = 0)")
        if (
            self.has_relays
            and not self.relay_shares_prefill
            and (self.relay is None or not self.relay.engines)
        ):
            raise ValueError(
                f"fleet.relay is required for architecture {self.architecture}, with at least one engine"
            )
        if self.architecture == "prfaas" and (self.local_prefill is None or not self.local_prefill.engines):
            raise ValueError(
                "fleet.local_prefill is required for architecture prfaas, with at least one engine"
            )
        return self


class LineSection(Section):
    """The line between the sites."""

    rate: Rate
    """Usable rate, one way."""
    rtt: Duration
    loss_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Packet loss, for the loss-based bound on a stream; 0 if ``stream_rate`` is measured."""
    stream_rate: Rate | None = None
    """Most one TCP stream reaches; default: the loss bound."""
    streams: Annotated[int, Field(ge=1, le=64)] = 8
    """Streams per transfer."""
    pool: Count = 32
    """Transfers that move at once, over all senders."""
    cost: Annotated[float, Field(gt=0)]
    """Per hour, in the unit of the chips' cost."""
    compression_ratio: Annotated[float, Field(ge=1)] = 1.0
    """Lossless codec: bytes before / bytes after."""
    codec_rate: Rate | None = None
    """Bytes per second (uncompressed) one transfer's codec takes; None: no codec."""


class FastLinkSection(Section):
    """The fabric inside a site, from a prefill engine to a decode engine."""

    rate: Rate = 50e9
    rtt: Duration = 20e-6


class PolicySection(Section):
    """Parameters of the router's decisions; each policy's module says how they are used."""

    second_token_slack: Duration = 0.5
    """WAN time tolerated without a relay."""
    wan_order: Literal["first-come", "shortest-unmasked-first"] = "shortest-unmasked-first"
    """Order of transfers on the line; see ``docs/explanation/simulator.md`` for what it brings."""
    wan_ageing: Duration = 5.0
    """Waiting that weighs as much as half of what a transfer has left."""
    masked_steps: Annotated[float, Field(ge=0)] = 6.0
    """Doublings of its length that a transfer counts for while a relay decodes for its request."""
    one_shot_max_gap_tokens: Annotated[int, Field(ge=0)] = 8
    catch_up_gap_tokens: Annotated[int, Field(ge=0)] = 4
    """Tokens MD may have left to compute when RLD stops. Less than the router's, with blocks of one token."""
    catch_up_max_rounds: Count = 4
    block_tokens: Count = 1
    """What MD's prefix cache keeps as one. An accelerator computes what a round leaves of a block in the same
    step as the rest, so that one token is near enough."""
    busy_ratio: Ratio = 0.75
    idle_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
    relay_stretch_ratio: Annotated[float, Field(ge=0)] = 0.0
    """Adaptive relay threshold: SLOs added when the relays are full; 0 is the plain rule."""
    main_prefill_max_tokens: Annotated[int, Field(ge=0)] = 0
    """MD computes uncached tails up to so many tokens itself, without P and line; 0: never."""
    hot_prefix_copies: Annotated[int, Field(ge=0)] = 0
    """Prefixes shared by several sessions are kept on all MDs at start; 0: no, 1: yes."""
    hold_outliers: bool = False
    """Transfers that would land after their request ended are queued last."""
    outlier_output_tokens: Count = 2000
    """Output expected of a request when nothing better is known (a high quantile of history)."""
    outlier_margin_ratio: Ratio = 0.8
    """A request is an outlier if RLD would end it in this part of the WAN time."""
    outlier_returning_ratio: Ratio = 0.5
    """It is none if P knows so much of its prompt: a conversation's next turn comes back."""


class BaselineSection(Section):
    """The one-datacenter fleet that BCR is measured against."""

    chip: str
    chips: Count
    """All chips, split between prefill and decode in the best way the planner finds."""
    cost: Annotated[float, Field(gt=0)] = 1.0
    """Of one chip, in the unit of the fleet's costs."""
    chips_per_engine: Count = 1


class PlanSection(Section):
    """What the planner may vary."""

    prefill: tuple[int, ...] = ()
    relay: tuple[int, ...] = ()
    main: tuple[int, ...] = ()
    line_rates: tuple[Rate, ...] = ()
    line_costs: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Of each rate."""
    budget: Annotated[float, Field(gt=0)] | None = None
    """Fleets that cost more are left out; default: the baseline's cost."""
    finalists: Count = 6
    """Fleets simulated after the analytic screen."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.line_rates) != len(self.line_costs):
            raise ValueError("plan.line_costs must have one entry for each of plan.line_rates")
        return self


class Scenario(Section):
    """The whole file."""

    title: str = ""
    seed: int = 1
    chips: str = ""
    """Another table of chips, relative to the scenario file."""
    model: ModelSection
    efficiency: EfficiencySection = EfficiencySection()
    workload: WorkloadSection
    slo: SloSection
    fleet: FleetSection
    line: LineSection | None = None
    fast_link: FastLinkSection = FastLinkSection()
    policy: PolicySection = PolicySection()
    baseline: BaselineSection | None = None
    plan: PlanSection = PlanSection()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.fleet.architecture != "one-site" and self.line is None:
            raise ValueError(f"line is required for architecture {self.fleet.architecture}")
        return self
