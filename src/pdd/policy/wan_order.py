"""In which order transfers use the line between the sites.

A transfer is *masked* while a relay decodes for its request: nobody waits for it. Unmasked ones (P-MD) hold
a client up.

Formula:
    ``rank_s = enqueued_s + patience_ratio * transfer_s + (masked_grace_s if masked else 0)``; the lowest
    rank goes first. Short transfers overtake long ones, unmasked overtake masked, and nothing starves: a
    transfer is overtaken only by those that come within ``patience_ratio`` times its own length (plus the
    grace) after it.

Example:
    A masked transfer of 2 s that came at 10 s, patience 10, grace 5 s, has rank 35; an unmasked one of 0.1
    s that comes at 30 s has rank 31 and goes first; one that comes at 35 s does not.
"""

from dataclasses import dataclass
from typing import Literal

Order = Literal["first-come", "shortest-unmasked-first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WanOrderParams:
    """Parameters of the order.

    Args:
        order: ``first-come`` ignores length and mask.
        patience_ratio: How many times its own length a transfer may be overtaken for; 0 ignores length.
        masked_grace_s: How much later a masked transfer counts as having come.
    """

    order: Order
    patience_ratio: float = 10.0
    masked_grace_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferView:
    """One transfer as its sender sees it.

    Args:
        enqueued_s: When it joined the queue.
        transfer_s: Its missing bytes over the line's rate.
        masked: A relay decodes for its request meanwhile.
        relay_load_ratio: How full that relay is; a full one wants its transfers sooner.
    """

    enqueued_s: float
    transfer_s: float
    masked: bool
    relay_load_ratio: float = 0.0


def transfer_rank_s(transfer: TransferView, params: WanOrderParams) -> float:
    """The rank; lower goes first, ties in order of arrival."""
    if params.order == "first-come":
        return transfer.enqueued_s
    rank_s = transfer.enqueued_s + params.patience_ratio * transfer.transfer_s
    if transfer.masked:
        rank_s += params.masked_grace_s * max(0.0, 1.0 - transfer.relay_load_ratio)
    return rank_s
