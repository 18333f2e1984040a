"""What a peer's answers to offers have taught: which chunks it has, and how often it lacks those offered.

Called under the sending side's lock (``Outbound.lock``).
"""

from collections import OrderedDict
from typing import Final

from pdd.policy.unasked import PRIOR_LACKING_RATIO, Position, UnaskedParams, is_worth_sending

_MAX_KEYS: Final = 32768
"""About 4 MB a peer; older knowledge is forgotten, and such chunks are asked for again."""
_WEIGHT: Final = 1 / 32
"""Of one answer: a single surprise stops unasked sending until about 15 answers in a row say otherwise."""


class Answers:
    """Beliefs about one peer's store."""

    def __init__(self, params: UnaskedParams) -> None:
        self.params = params
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._lacking_ratio = dict(PRIOR_LACKING_RATIO)
        self.num_lacking_bytes = 0
        """Sent unasked and needed, for metrics."""
        self.num_held_bytes = 0
        """Sent, or queued for sending, unasked and in vain."""

    def is_surely_lacking(self, key: bytes, position: Position) -> bool:
        """Whether the chunk may be sent without asking."""
        return key not in self._held and is_worth_sending(self._lacking_ratio[position], self.params)

    def learn(self, key: bytes, position: Position | None, *, is_lacking: bool, was_unasked: bool) -> None:
        """The peer has answered for the chunk, which it has now or gets; what is in front may be unknown."""
        is_known = key in self._held and not was_unasked
        self.remember(key)
        if position is not None and not is_known:
            ratio = self._lacking_ratio[position]
            self._lacking_ratio[position] = ratio + _WEIGHT * (is_lacking - ratio)

    def remember(self, key: bytes) -> None:
        """The peer has the chunk, or it is on its way there: another transfer need not send it too.

        If it does not arrive after all, that costs the next transfer a question.
        """
        self._held[key] = None
        self._held.move_to_end(key)
        while len(self._held) > _MAX_KEYS:
            self._held.popitem(last=False)

    def count(self, num_bytes: int, *, is_lacking: bool) -> None:
        """So many unasked bytes were answered."""
        if is_lacking:
            self.num_lacking_bytes += num_bytes
        else:
            self.num_held_bytes += num_bytes
