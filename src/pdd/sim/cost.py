"""What a fleet costs, and the benefit-cost ratio against another.

Owns the arithmetic of money. Costs are per hour, or in units of one chip of the baseline: only ratios
matter for BCR.
"""

from dataclasses import dataclass

from pdd.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """One thing that is paid for.

    Args:
        what: For people, e.g. ``40 x H100-SXM prefill``.
        units: How many.
        unit_cost_per_hour: Of one.
    """

    what: str
    units: float
    unit_cost_per_hour: float

    @property
    def cost_per_hour(self) -> float:
        """All of them."""
        return self.units * self.unit_cost_per_hour


def fleet_cost_per_hour(lines: tuple[CostLine, ...]) -> float:
    """Sum of the lines.

    Raises:
        ConfigurationError: If something is free: a price of zero makes every ratio meaningless.
    """
    for line in lines:
        if line.units > 0 and not line.unit_cost_per_hour > 0:
            raise ConfigurationError(
                f"price of {line.what}: expected more than zero, got {line.unit_cost_per_hour:g}"
            )
    return sum(line.cost_per_hour for line in lines)


def bcr_gain(*, goodput_rps: float, cost: float, baseline_goodput_rps: float, baseline_cost: float) -> float:
    """How much more goodput a unit of cost brings than in the baseline: 0.3 is 30 % more.

    Source:
        BCR = goodput within the SLO / hardware cost (arXiv 2609.13161, abstract).
    """
    if min(cost, baseline_cost, baseline_goodput_rps) <= 0:
        raise ConfigurationError("BCR needs costs and a baseline goodput above zero")
    return (goodput_rps / cost) / (baseline_goodput_rps / baseline_cost) - 1


def line_cost_for_bcr(
    *,
    gain: float,
    goodput_ratio: float,
    baseline_chips: float,
    local_chips: float,
    remote_chips: float,
    premium: float,
) -> float:
    """What the line may cost, in baseline chips, for a stated BCR gain."""
    return goodput_ratio * baseline_chips / (1 + gain) - local_chips - remote_chips * (1 + premium)
