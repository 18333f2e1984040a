"""How much WAN time is tolerated without a relay, adapted to the relays' load and the line.

The plain rule relays whatever would miss the second-token SLO. That fills the relays just when the line is
slow. The adaptive rule raises the tolerated time as the relays fill, so that the last free slots go to the
longest transfers.

Formula:
    ``threshold_s = slo_s * (1 + stretch_ratio * max(0, load - relaxed) / (1 - relaxed))``

Example:
    SLO 0.5 s, stretch 4, relaxed 0.5: relays half full or less tolerate 0.5 s, at 75 % 1.5 s, full 2.5 s.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayThresholdParams:
    """Parameters.

    Args:
        stretch_ratio: How many SLOs are added when the relays are full; 0 is the plain rule.
        relaxed_load_ratio: Load up to which the plain rule holds.
    """

    stretch_ratio: float = 0.0
    relaxed_load_ratio: float = 0.5


def relay_threshold_s(
    *, second_token_slo_s: float, relay_load_ratio: float, params: RelayThresholdParams
) -> float:
    """The WAN time up to which a request goes without a relay."""
    if params.stretch_ratio <= 0:
        return second_token_slo_s
    above = max(0.0, min(1.0, relay_load_ratio) - params.relaxed_load_ratio) / (1 - params.relaxed_load_ratio)
    return second_token_slo_s * (1 + params.stretch_ratio * above)
