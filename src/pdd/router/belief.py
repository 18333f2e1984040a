"""What each far cache is believed to hold. A hint for predicting the delta: the offer decides."""

from collections import OrderedDict
from collections.abc import Iterable

MAX_KEYS = 1_000_000
"""About 150 MB; at 32 tokens a chunk it covers 32 million tokens of cache."""


class CacheBelief:
    """Chunk keys believed to be in one engine's store, least recently used first out."""

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._max_keys = max_keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[bytes]) -> None:
        """The keys are there now, and young."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def missing(self, keys: Iterable[bytes]) -> int:
        """How many of the keys are believed absent."""
        return sum(key not in self._keys for key in keys)

    def clear(self) -> None:
        """Nothing is believed to be there any more."""
        self._keys.clear()
