"""Whether RLD finishes an answer before its KV could cross the WAN, so that nothing should be sent.

Formula:
    ``decode_s = (bound_tokens - 1) * relay_itl_s``; an outlier if ``decode_s < margin_ratio * wan_time_s``.
    ``bound_tokens`` is the smaller of ``max_tokens`` and what nine of ten answers of a tenant stayed within;
    the WAN time is that of the uncached part alone, so a long prompt that MD holds is no outlier.

The next turn of a conversation is none either, even if MD holds nothing of it: a prompt that some engine
of the fleet knows by at least ``returning_ratio`` comes back, and what crosses now is saved on every later
turn. Else a conversation of short answers on a slow line would never fill MD's cache.

An outlier's WAN transfer is held at P, last in priority. An answer that outgrows a bound from history was
predicted wrongly: from then on its transfer goes like any other.

Example:
    46 MB missing on a 25 MB/s line with 30 ms RTT take 1.87 s. An answer of at most 20 tokens on an RLD that
    makes one in 30 ms takes 0.57 s, below 0.8 * 1.87 s: an outlier. One of 100 tokens (2.97 s) is none, nor
    is the second turn, of which RLD knows nine chunks in ten.
"""

import math
from dataclasses import dataclass
from typing import Literal

OutlierReason = Literal["shorter_than_wan", "longer_than_wan", "returns", "no_relay", "no_wan", "off"]
LAST_PRIORITY = -1
"""Behind every transfer that somebody waits for (``pdd.policy.wan_order``: below 0 are outliers)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierInput:
    """Everything the choice looks at.

    Args:
        relayed: The pipeline has a relay, by policy and not by force.
        predicted_wan_s: As the pipeline was decided on; infinite if the line is down.
        max_tokens: Tokens asked for.
        history_tokens: What nine of ten answers of this tenant stayed within, or None if too few are known.
        relay_itl_s: Time RLD takes for one token, as measured.
        margin_ratio: How much shorter than the WAN time the decode has to be; 0 turns the filter off.
        known_ratio: Believed share of the prompt at the engine of P's site that knows most of it.
        returning_ratio: From this share on the prompt is a conversation's next turn.
    """

    relayed: bool
    predicted_wan_s: float
    max_tokens: int
    history_tokens: int | None
    relay_itl_s: float
    margin_ratio: float
    known_ratio: float
    returning_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierDecision:
    """Whether the request ends on RLD, and why.

    ``hold_tokens`` is how many tokens RLD may make before the transfer is let go after all.
    """

    is_outlier: bool
    reason: OutlierReason
    predicted_decode_s: float
    hold_tokens: int


def decide_outlier(facts: OutlierInput) -> OutlierDecision:
    """The outlier filter for one request."""
    bound = min(facts.max_tokens, facts.history_tokens or facts.max_tokens)
    decode_s = max(0, bound - 1) * facts.relay_itl_s

    def decision(reason: OutlierReason) -> OutlierDecision:
        is_outlier = reason == "shorter_than_wan"
        return OutlierDecision(
            is_outlier=is_outlier,
            reason=reason,
            predicted_decode_s=decode_s,
            hold_tokens=bound if is_outlier else 0,
        )

    if not facts.margin_ratio:
        return decision("off")
    if not facts.relayed:
        return decision("no_relay")
    if not math.isfinite(facts.predicted_wan_s):
        return decision("no_wan")
    if facts.known_ratio >= facts.returning_ratio:
        return decision("returns")
    if decode_s < facts.margin_ratio * facts.predicted_wan_s:
        return decision("shorter_than_wan")
    return decision("longer_than_wan")
