"""Connections to the data port that were refused: counted by reason, the latest kept with their words."""

import logging
import threading
from collections import Counter, deque
from typing import Final

from pdd.core.errors import DeadlineError, PddError, ProtocolError

_log = logging.getLogger(__name__)
_NUM_RECENT: Final = 16
_MAX_DETAIL: Final = 500


class Refusals:
    """Noted from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._recent: deque[dict[str, str]] = deque(maxlen=_NUM_RECENT)

    def note(self, reason: str, *, address: str, peer: str = "", detail: str = "") -> None:
        """The refusal is counted, kept and logged."""
        with self._lock:
            self._counts[reason] += 1
            self._recent.append(
                {"reason": reason, "address": address, "peer": peer, "detail": detail[:_MAX_DETAIL]}
            )
        who = f"{peer} at {address}" if peer else address
        _log.warning("connection of %s refused (%s): %s", who, reason, detail)

    def note_error(self, error: PddError, *, address: str) -> None:
        """As ``note``, for a connection that ended before it said who it is."""
        if isinstance(error, DeadlineError):
            reason = "hello_timeout"
        else:
            reason = "garbage" if isinstance(error, ProtocolError) else "lost"
        self.note(reason, address=address, detail=str(error))

    def counts(self) -> dict[str, int]:
        """Refusals since the start, by reason."""
        with self._lock:
            return dict(self._counts)

    def recent(self) -> list[dict[str, str]]:
        """The latest, oldest first."""
        with self._lock:
            return list(self._recent)
