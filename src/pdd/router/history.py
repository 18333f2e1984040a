"""How long the answers of each tenant were: the only hint at a length that a client did not bound itself."""

from collections import OrderedDict, deque

MAX_TENANTS = 1000
MAX_LENGTHS = 128
"""Recent answers only: what a tenant asks for changes."""
MIN_LENGTHS = 20
"""Below that, nine of ten means nothing."""


class OutputHistory:
    """Lengths of recent answers by tenant, bounded in both."""

    def __init__(self) -> None:
        self._lengths: OrderedDict[str, deque[int]] = OrderedDict()

    def note(self, tenant: str, num_tokens: int) -> None:
        """One more answer is known."""
        self._lengths.setdefault(tenant, deque(maxlen=MAX_LENGTHS)).append(num_tokens)
        self._lengths.move_to_end(tenant)
        while len(self._lengths) > MAX_TENANTS:
            self._lengths.popitem(last=False)

    def bound_tokens(self, tenant: str) -> int | None:
        """What nine of ten answers stayed within, or None if too few are known."""
        lengths = self._lengths.get(tenant, ())
        if len(lengths) < MIN_LENGTHS:
            return None
        return sorted(lengths)[len(lengths) * 9 // 10]
