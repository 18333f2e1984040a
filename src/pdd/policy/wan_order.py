"""Whose bytes go next on a link: one order for the agents' send queues and for the simulator's line.

A transfer is *masked* while a relay decodes for its request: nobody waits for it. Unmasked ones (P-MD) hold
a client up. Outliers (priority below 0) will probably be finished by RLD before they land.

Formula:
    ``rank_s = since_s + ageing_s * (log2(remaining_bytes) + class_steps)``; the lowest rank goes first.
    ``class_steps`` is 0 for unmasked transfers, ``masked_steps * (1 - priority / 100)`` for masked ones (the
    fuller the relay, the higher the priority), and ``outlier_steps`` for outliers.

So the shortest remaining goes first, twice the bytes weighs as much as having come ``ageing_s`` later, and a
masked transfer counts as ``2 ** masked_steps`` times as long. Nothing starves: a transfer is overtaken only
by those that come within ``ageing_s * (log2 of its bytes + class_steps)`` after it. The rank of a transfer
that waits does not change, so a queue can be kept sorted; and it needs no measured rate of the line.
``first-come`` ignores everything but ``since_s``.

Example:
    A masked transfer of 64 MB at priority 0 that came at 10 s has rank 10 + 5 * (26 + 6) = 170 s. An unmasked
    one of 1 MB that comes at 60 s has rank 60 + 5 * 20 = 160 s and goes first; at 75 s it would not.

Source:
    Shortest remaining processing time with ageing; Silberschatz et al., Operating System Concepts, 5.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log2
from typing import Literal

Order = Literal["first-come", "shortest-unmasked-first"]
TransferClass = Literal["unmasked", "masked", "outlier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderParams:
    """Parameters of the order.

    Args:
        order: ``first-come`` ignores length and class.
        ageing_s: Waiting that weighs as much as half the remaining bytes.
        masked_steps: How many doublings of its length a masked transfer at priority 0 counts for.
        outlier_steps: The same for an outlier.
    """

    order: Order = "shortest-unmasked-first"
    ageing_s: float = 5.0
    masked_steps: float = 6.0
    outlier_steps: float = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingTransfer:
    """What is known of a transfer that has something to send on the link.

    Args:
        number: Names it; breaks the last tie.
        begun: Position in the order in which transfers were begun; breaks ties.
        remaining_bytes: Not yet sent.
        since_s: When its first bytes could have gone.
        priority: -100 to 100; below 0 is an outlier.
        is_unmasked: No relay decodes for its request.
        is_held: It does not go at all.
    """

    number: int
    begun: int
    remaining_bytes: float
    since_s: float
    priority: int = 0
    is_unmasked: bool = False
    is_held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTransfer:
    """Which transfer goes next, and why: its class, or ``aged`` if one of a better class waits as well."""

    number: int
    reason: str


def transfer_class(*, priority: int, is_unmasked: bool) -> TransferClass:
    """The class of a transfer."""
    if is_unmasked:
        return "unmasked"
    return "masked" if priority >= 0 else "outlier"


def transfer_rank_s(
    *, since_s: float, remaining_bytes: float, priority: int, is_unmasked: bool, params: OrderParams
) -> float:
    """The rank of one transfer; lower goes first."""
    if params.order == "first-come":
        return since_s
    steps = log2(max(1.0, remaining_bytes))
    if not is_unmasked:
        steps += (
            params.outlier_steps if priority < 0 else params.masked_steps * (1 - min(priority, 100) / 100)
        )
    return since_s + params.ageing_s * steps


def choose_next(waiting: Sequence[WaitingTransfer], params: OrderParams) -> NextTransfer | None:
    """The transfer whose piece goes next; None if all are held."""
    first, first_key = None, (inf, 0, 0)
    for transfer in waiting:
        if transfer.is_held:
            continue
        rank_s = transfer_rank_s(
            since_s=transfer.since_s,
            remaining_bytes=transfer.remaining_bytes,
            priority=transfer.priority,
            is_unmasked=transfer.is_unmasked,
            params=params,
        )
        key = (rank_s, transfer.begun, transfer.number)
        if first is None or key < first_key:
            first, first_key = transfer, key
    if first is None:
        return None
    overtook = any(_class_index(other) < _class_index(first) for other in waiting if not other.is_held)
    reason = "aged" if overtook else CLASSES[_class_index(first)]
    return NextTransfer(number=first.number, reason=reason)


CLASSES: tuple[TransferClass, ...] = ("unmasked", "masked", "outlier")


def _class_index(transfer: WaitingTransfer) -> int:
    return CLASSES.index(transfer_class(priority=transfer.priority, is_unmasked=transfer.is_unmasked))
