"""Whether a relayed request will end before its KV lands: then sending the KV first is waste.

Formula:
    ``outlier = predicted_output_tokens / relay_tokens_per_s < predicted_wan_s``

Example:
    300 tokens at 40 a second take 7.5 s on RLD; if the WAN time is 9 s, the transfer is held and probably
    never sent.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierDecision:
    """Whether to hold the transfer, and the two times compared."""

    hold: bool
    reason: Literal["ends_on_relay", "lands_first"]
    decode_s: float
    wan_s: float


def decide_outlier(
    *, output_bound_tokens: float, relay_tokens_per_s: float, predicted_wan_s: float
) -> OutlierDecision:
    """Holds a transfer that would land after its request ended.

    Args:
        output_bound_tokens: Most tokens expected: ``max_tokens``, or a quantile of the tenant's history.
        relay_tokens_per_s: What RLD gives one request now.
        predicted_wan_s: As the pipeline policy predicts it.
    """
    decode_s = output_bound_tokens / relay_tokens_per_s
    hold = decode_s < predicted_wan_s
    return OutlierDecision(
        hold=hold, reason="ends_on_relay" if hold else "lands_first", decode_s=decode_s, wan_s=predicted_wan_s
    )
