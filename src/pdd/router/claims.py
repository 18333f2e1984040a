"""What answers take of one engine: how many run there or are about to, and what it has yet to compute."""

from collections.abc import Callable


class Claim:
    """One answer at an engine, from now until it is closed; closing it again changes nothing.

    Args:
        claims: All of the engine.
        computes_tokens: Prompt tokens, which no cache holds, that are to be computed for it.
        on_down: Told when the engine is down, if the answer runs there already.
    """

    __slots__ = ("_claims", "computes_tokens", "on_down")

    def __init__(self, claims: "Claims", *, computes_tokens: int, on_down: Callable[[], None] | None) -> None:
        self._claims = claims
        self.computes_tokens = computes_tokens
        self.on_down = on_down

    def close(self) -> None:
        """Nothing is taken any more."""
        self._claims.close(self)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class Claims:
    """All claims on one engine."""

    def __init__(self) -> None:
        self.pending_tokens = 0
        self._open: dict[Claim, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, *, computes_tokens: int = 0, on_down: Callable[[], None] | None = None) -> Claim:
        """One more answer counts at the engine."""
        claim = Claim(self, computes_tokens=computes_tokens, on_down=on_down)
        self._open[claim] = None
        self.pending_tokens += computes_tokens
        return claim

    def close(self, claim: Claim) -> None:
        """The answer counts no more."""
        if claim in self._open:
            del self._open[claim]
            self.pending_tokens -= claim.computes_tokens

    def tell_down(self) -> None:
        """What runs on the engine hears that it is down."""
        for claim in list(self._open):
            if claim.on_down is not None:
                claim.on_down()
