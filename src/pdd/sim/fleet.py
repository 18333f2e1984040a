"""Turns a scenario into the engines' times: roofline or measured curves, capacities, costs.

Owns the step from assumptions to numbers the simulation and the planner use.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path

from pdd.core.errors import ConfigurationError
from pdd.sim.chips import Chip, load_chips
from pdd.sim.cost import CostLine
from pdd.sim.curves import read_surface
from pdd.sim.decode_engine import DecodeTimes
from pdd.sim.kv_bytes import KvFootprint, kv_footprint
from pdd.sim.line import LineProfile, loss_limited_bytes_per_s
from pdd.sim.model import ModelShape, load_model_config, model_shape
from pdd.sim.roofline import Efficiency, Roofline, Weights
from pdd.sim.scenario import EfficiencySection, LineSection, RoleSection, Scenario

PrefillTime = Callable[[int, float], float]
"""Seconds of a chunk, from its new tokens and the cached tokens before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleModel:
    """One role's engines, ready to use.

    Args:
        section: As in the scenario.
        roofline: Of one engine; also holds its memory.
        chunk_s: Time of one prefill chunk.
        decode: Step times and capacity.
        load_s_per_token: Copying landed or cached KV from host to device, per token.
    """

    section: RoleSection
    roofline: Roofline
    chunk_s: PrefillTime
    decode: DecodeTimes
    load_s_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything derived from a scenario once."""

    scenario: Scenario
    chips: dict[str, Chip]
    shape: ModelShape
    kv: KvFootprint

    def role(self, section: RoleSection, name: str) -> RoleModel:
        """The model of one role.

        Raises:
            ConfigurationError: If the chip is unknown or the model does not fit.
        """
        chip = self.chip(section.chip, f"fleet.{name}.chip")
        roofline = Roofline(
            shape=self.shape,
            kv=self.kv,
            weights=Weights(
                bytes_per_param=self.scenario.model.bytes_per_param,
                fp8_compute=self.scenario.model.fp8_compute,
            ),
            chip=chip,
            chips=section.chips_per_engine,
            efficiency=_efficiency(self.scenario.efficiency),
        )
        if roofline.kv_capacity_bytes <= 0:
            weights_gb = self.shape.total_params * self.scenario.model.bytes_per_param / 1e9
            raise ConfigurationError(
                f"fleet.{name}: the model's {weights_gb:.0f} GB of weights do not fit "
                f"{section.chips_per_engine} x {chip.name} "
                f"({section.chips_per_engine * chip.hbm_bytes / 1e9:.0f} GB); expected more "
                f"chips_per_engine or larger chips"
            )
        host_rate = chip.host_bytes_per_s * section.chips_per_engine * self.scenario.efficiency.link_ratio
        return RoleModel(
            section=section,
            roofline=roofline,
            chunk_s=_chunk_time(section, roofline),
            decode=_decode_times(section, roofline, self.scenario.slo.tpot),
            load_s_per_token=self.kv.bytes_per_token / host_rate,
        )

    def chip(self, name: str, key: str) -> Chip:
        """A chip of the table."""
        if name not in self.chips:
            raise ConfigurationError(
                f"{key}: {name!r} is not in the table of chips; expected one of "
                f"{', '.join(sorted(self.chips))}"
            )
        return self.chips[name]

    def unit_cost(self, section: RoleSection, name: str) -> float:
        """Cost per hour of one chip of a role."""
        if section.cost is not None:
            return section.cost
        price = self.chip(section.chip, f"fleet.{name}.chip").price_per_hour
        if price is None:
            raise ConfigurationError(
                f"fleet.{name}.cost: chip {section.chip} has no price in the table; expected a cost above "
                f"zero"
            )
        return price

    def cost_lines(self) -> tuple[CostLine, ...]:
        """What the scenario's fleet costs, thing by thing."""
        fleet = self.scenario.fleet
        roles = [("prefill", fleet.prefill), ("main", fleet.main)]
        if fleet.owned_relay is not None:
            roles.insert(1, ("relay", fleet.owned_relay))
        if fleet.local_prefill is not None and fleet.architecture == "prfaas":
            roles.append(("local_prefill", fleet.local_prefill))
        lines = [
            CostLine(
                what=f"{role.engines * role.chips_per_engine} x {role.chip} {name}",
                units=role.engines * role.chips_per_engine,
                unit_cost_per_hour=self.unit_cost(role, name),
            )
            for name, role in roles
        ]
        if self.scenario.line is not None and fleet.architecture != "one-site":
            lines.append(CostLine(what="line", units=1, unit_cost_per_hour=self.scenario.line.cost))
        return tuple(lines)


def build_parts(scenario: Scenario) -> Parts:
    """The derived parts of a scenario."""
    config = load_model_config(scenario.model.config)
    return Parts(
        scenario=scenario,
        chips=load_chips(Path(scenario.chips) if scenario.chips else None),
        shape=model_shape(config),
        kv=kv_footprint(config, scenario.model.kv_layout, indexer=scenario.model.indexer_layout),
    )


def line_profile(line: LineSection) -> LineProfile:
    """The fluid line of a scenario's section.

    Raises:
        ConfigurationError: If nothing bounds a stream's rate.
    """
    stream = line.stream_rate
    if stream is None:
        stream = loss_limited_bytes_per_s(rtt_s=max(line.rtt, 1e-6), loss_ratio=line.loss_ratio)
    return LineProfile(
        rate_bytes_per_s=line.rate,
        rtt_s=line.rtt,
        flow_bytes_per_s=min(line.rate, stream * line.streams),
        pool=line.pool,
    )


def _efficiency(section: EfficiencySection) -> Efficiency:
    return Efficiency(
        linear_ratio=section.linear_ratio,
        attention_ratio=section.attention_ratio,
        bandwidth_ratio=section.bandwidth_ratio,
        link_ratio=section.link_ratio,
        memory_ratio=section.memory_ratio,
        step_overhead_s=section.step_overhead,
        chunk_overhead_s=section.chunk_overhead,
        tile_tokens=section.tile_tokens,
    )


def _chunk_time(section: RoleSection, roofline: Roofline) -> PrefillTime:
    if not section.prefill_curve:
        return roofline.chunk_s
    surface = read_surface(Path(section.prefill_curve), ("query_tokens", "cached_tokens", "seconds"))
    return lambda query, cached: surface.at(query, cached)


def _decode_times(section: RoleSection, roofline: Roofline, tpot_s: float) -> DecodeTimes:
    if section.decode_curve:
        surface = read_surface(Path(section.decode_curve), ("batch", "context_tokens", "step_seconds"))
        base = [surface.at(batch, 0.0) for batch in range(section.max_batch + 1)]
        middle = max(1, section.max_batch // 2)
        per_context = (surface.at(middle, 65_536.0) - base[middle]) / (middle * 65_536.0)
    else:
        terms = [roofline.decode_terms(batch) for batch in range(section.max_batch + 1)]
        base, per_context = [term[0] for term in terms], terms[-1][1]
    # Recomputing a token in a step that already reads the weights costs its arithmetic only.
    small = roofline.efficiency.tile_tokens
    flops = 2 * roofline.shape.active_params * small
    extend_s = (
        flops / (roofline.chips * roofline.chip.bf16_flops_per_s * roofline.efficiency.linear_ratio) / small
    )
    attention = roofline.shape.decode_flops(65_536) / 65_536
    return DecodeTimes(
        base_s=base,
        per_context_s=per_context,
        capacity_tokens=roofline.kv_capacity_bytes / roofline.kv.bytes_per_token,
        max_step_s=tpot_s if tpot_s > 0 else inf,
        extend_s=extend_s,
        extend_per_context_s=attention
        / (roofline.chips * roofline.chip.bf16_flops_per_s * roofline.efficiency.attention_ratio),
    )
