"""Every decision of the router with the snapshot it was made on: a bounded ring, and a file if wanted."""

import json
import logging
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pdd.policy.replay import POLICIES, plain

log = logging.getLogger(__name__)

MAX_DECISIONS = 8192
"""About seven a request, so a thousand requests."""
MAX_FILE_BYTES = 256 * 2**20
"""Then the file begins anew, and the one before is kept as ``.1``."""

D = TypeVar("D")


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """One decision as it was made; seven a request, and a dataclass takes four times as long."""

    at_s: float
    request: str
    policy: str
    arguments: Mapping[str, Any]
    decision: Any

    def as_json(self) -> dict[str, Any]:
        """As it is written and served."""
        return {
            "at_s": self.at_s,
            "request": self.request,
            "policy": self.policy,
            "arguments": plain(dict(self.arguments)),
            "decision": plain(self.decision),
        }


class DecisionLog:
    """Makes decisions and remembers them.

    Args:
        path: Where each is also written, one JSON object a line; none if empty.
    """

    def __init__(self, *, path: str = "") -> None:
        self._ring: deque[Decided] = deque(maxlen=MAX_DECISIONS)
        self._path = Path(path) if path else None

    def decide(self, policy: str, *, request: str, **arguments: Any) -> Any:
        """The decision of the policy of that name, written down."""
        decision = POLICIES[policy].decide(**arguments)
        entry = Decided(
            at_s=time.time(), request=request, policy=policy, arguments=arguments, decision=decision
        )
        self._ring.append(entry)
        if self._path is not None:
            self._write(self._path, entry)
        return decision

    def of(self, request: str | None = None) -> list[dict[str, Any]]:
        """The latest decisions, oldest first; of one request, or all."""
        return [entry.as_json() for entry in self._ring if request in (None, entry.request)]

    def _write(self, path: Path, entry: Decided) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry.as_json(), separators=(",", ":")) + "\n")
                is_full = file.tell() > MAX_FILE_BYTES
            if is_full:
                path.replace(path.with_name(path.name + ".1"))
        except OSError as error:
            log.error("decisions are not written to %s any more: %s", path, error.strerror)
            self._path = None
