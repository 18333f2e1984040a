"""Whose bytes go next on a link: the order of an agent's send queue, decided again for every piece.

``wan_order`` ranks a transfer once, when it comes, from what the router knows; this goes by what is left.

- **Unmasked first**: nobody decodes meanwhile, so the user waits for these (P-MD).
- **Masked next**, higher priority first: RLD answers while they cross.
- **Outliers last** (priority below 0): RLD will probably finish before they land.
- Within a class the **shortest remaining** transfer: it makes the most requests whole per second.
- **Nothing starves**: with each ``ageing_s`` of waiting a transfer rises by one class, and once it is among
  the first its remaining bytes count half as much with each more, so that at last it is the shortest.
- **Held** transfers do not go at all.

Source:
    Shortest remaining processing time with ageing; Silberschatz et al., Operating System Concepts, 5.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

UNMASKED: Final = 0
MASKED: Final = 1
OUTLIER: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderParams:
    """How fast waiting counts."""

    ageing_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingTransfer:
    """What is known of a transfer that has something to send on the link."""

    number: int
    rank: int
    """Position in the order in which transfers were begun."""
    remaining_bytes: int
    waiting_s: float
    """Since its first bytes could have gone."""
    priority: int = 0
    is_unmasked: bool = False
    is_held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTransfer:
    """Which transfer goes next, and why."""

    number: int
    reason: str
    """``unmasked``, ``masked``, ``outlier``, or ``aged`` if waiting brought it there."""


def choose_next(waiting: Sequence[WaitingTransfer], params: OrderParams) -> NextTransfer | None:
    """The transfer whose piece goes next; None if all are held."""
    eligible = [transfer for transfer in waiting if not transfer.is_held]
    if not eligible:
        return None
    first = min(eligible, key=lambda transfer: _key(transfer, params))
    rose = _class(first, params) < _own_class(first)
    reason = "aged" if rose else ("unmasked", "masked", "outlier")[_own_class(first)]
    return NextTransfer(number=first.number, reason=reason)


def _key(transfer: WaitingTransfer, params: OrderParams) -> tuple[int, int, float, int, int]:
    group = _class(transfer, params)
    # Priority tells masked transfers and outliers apart; who rose to the first class competes by size alone.
    priority = 0 if group == UNMASKED else -transfer.priority
    steps = max(0.0, transfer.waiting_s / params.ageing_s - _own_class(transfer))
    return group, priority, transfer.remaining_bytes * 0.5 ** min(steps, 60.0), transfer.rank, transfer.number


def _own_class(transfer: WaitingTransfer) -> int:
    if transfer.is_unmasked:
        return UNMASKED
    return MASKED if transfer.priority >= 0 else OUTLIER


def _class(transfer: WaitingTransfer, params: OrderParams) -> int:
    return max(UNMASKED, _own_class(transfer) - int(transfer.waiting_s / params.ageing_s))
