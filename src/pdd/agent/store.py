"""The landing store: private host memory cut into chunk slots, addressed by content.

A slot is free, *landing* (somebody writes it; nobody may read it) or *visible* (whole, verified, under
its key). Visible chunks are evicted oldest first, never while leased. The store knows no network and no
engine; whoever writes slots verifies them before ``commit``.
"""

import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pdd.core.errors import InvariantError, OverloadedError

_ALIGN_BYTES: Final = 64
"""Slots start on cache lines."""

OnChange = Callable[[bytes], None]
"""Told of a key, under the store's lock."""


class Reservation(Enum):
    """What ``reserve`` found."""

    HELD = auto()
    """Already visible, and now leased once more."""
    BUSY = auto()
    """Somebody else is landing it."""
    FULL = auto()
    """No slot is free, and every visible chunk is leased."""


@dataclass(slots=True, eq=False)
class Landing:
    """A slot being written.

    While ``num_writers`` is not 0 the slot is not reused, even after ``abort``: a late write must not
    reach another chunk.
    """

    key: bytes
    slot: int
    row: NDArray[np.uint8]
    num_writers: int = 0
    is_aborted: bool = False


@dataclass(slots=True)
class _Entry:
    slot: int
    num_leases: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCounts:
    """How full the store is, in slots."""

    slots: int
    used: int
    leased: int


class ChunkStore:
    """All methods may be called from any thread; ``lock`` makes several of them one step.

    Args:
        chunk_bytes: Size of every chunk.
        capacity_bytes: Bound on the memory; it is touched, and so taken, only as it fills.
        on_added: Told of every key that becomes visible.
        on_removed: Told of every key that leaves.

    Raises:
        OverloadedError: If the capacity is below one chunk.
    """

    def __init__(
        self, *, chunk_bytes: int, capacity_bytes: int, on_added: OnChange, on_removed: OnChange
    ) -> None:
        stride = -(-chunk_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.num_slots = capacity_bytes // stride
        if self.num_slots < 1:
            raise OverloadedError(
                f"a store of {capacity_bytes} bytes has no room for a chunk of {chunk_bytes}"
            )
        self.chunk_bytes = chunk_bytes
        self.lock = threading.RLock()
        self._on_added = on_added
        self._on_removed = on_removed
        self._memory = mmap.mmap(-1, self.num_slots * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        rows = np.frombuffer(self._memory, dtype=np.uint8).reshape(self.num_slots, stride)
        self._rows: NDArray[np.uint8] = rows[:, :chunk_bytes]
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._visible: dict[bytes, _Entry] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._landing: dict[bytes, Landing] = {}
        self.num_evicted = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._visible

    def keys(self) -> list[bytes]:
        """All visible keys."""
        with self.lock:
            return list(self._visible)

    def counts(self) -> StoreCounts:
        """How full the store is."""
        with self.lock:
            return StoreCounts(
                slots=self.num_slots,
                used=self.num_slots - len(self._free),
                leased=len(self._visible) - len(self._idle),
            )

    def lease(self, key: bytes) -> bool:
        """The chunk is visible and stays so until a ``release``; False if it is not visible."""
        with self.lock:
            entry = self._visible.get(key)
            if entry is None:
                return False
            entry.num_leases += 1
            self._idle.pop(key, None)
            return True

    def release(self, keys: Sequence[bytes]) -> None:
        """One lease of each key has ended; those without one are the last to be evicted.

        Of keys in prefix order the deepest goes first: a suffix without its prefix is of no use.
        """
        with self.lock:
            for key in reversed(keys):
                entry = self._visible[key]
                if entry.num_leases < 1:
                    raise InvariantError(f"release of a chunk without lease: {key.hex()}")
                entry.num_leases -= 1
                if entry.num_leases == 0:
                    self._idle[key] = None

    def touch(self, keys: Sequence[bytes]) -> None:
        """Those of the keys that may be evicted are the last to be now, the deepest of them first."""
        with self.lock:
            for key in reversed(keys):
                if key in self._idle:
                    self._idle.move_to_end(key)

    def row(self, key: bytes) -> NDArray[np.uint8]:
        """The bytes of a chunk that the caller has leased."""
        with self.lock:
            row: NDArray[np.uint8] = self._rows[self._visible[key].slot]
            return row

    def reserve(self, key: bytes) -> Landing | Reservation:
        """A landing slot for the key, unless it is visible (then leased), being landed, or none is left."""
        with self.lock:
            if self.lease(key):
                return Reservation.HELD
            if key in self._landing:
                return Reservation.BUSY
            landing = self.reserve_anyway(key)
            if landing is None:
                return Reservation.FULL
            self._landing[key] = landing
            return landing

    def reserve_anyway(self, key: bytes) -> Landing | None:
        """A landing slot for a local copy of a chunk that a peer may be landing too; None if none is left."""
        with self.lock:
            if not self._free and not self._evict_one():
                return None
            slot = self._free.pop()
            return Landing(key=key, slot=slot, row=self._rows[slot])

    def commit(self, landing: Landing) -> None:
        """The chunk is visible, with one lease that the caller owns.

        The caller has verified the bytes. If the chunk became visible meanwhile, the slot is free again
        and the lease is on that one.
        """
        with self.lock:
            self._forget(landing)
            if self.lease(landing.key):
                self._free.append(landing.slot)
                return
            self._visible[landing.key] = _Entry(slot=landing.slot, num_leases=1)
            self._on_added(landing.key)

    def abort(self, landing: Landing) -> None:
        """The slot will be free as soon as nobody writes it."""
        with self.lock:
            self._forget(landing)
            landing.is_aborted = True
            if landing.num_writers == 0:
                self._free.append(landing.slot)

    def begin_write(self, landing: Landing) -> None:
        """The slot is not reused before ``end_write``."""
        with self.lock:
            landing.num_writers += 1

    def end_write(self, landing: Landing) -> None:
        """One writer has left."""
        with self.lock:
            landing.num_writers -= 1
            if landing.is_aborted and landing.num_writers == 0:
                self._free.append(landing.slot)

    def check_invariants(self) -> None:
        """Nothing, if the state is consistent and nothing is landing without a key.

        Raises:
            InvariantError: If not.
        """
        with self.lock:
            slots = [entry.slot for entry in self._visible.values()]
            slots += [landing.slot for landing in self._landing.values()] + self._free
            idle = {key for key, entry in self._visible.items() if entry.num_leases == 0}
            if len(slots) != len(set(slots)) or len(slots) > self.num_slots:
                raise InvariantError("a slot is in two places")
            if idle != set(self._idle):
                raise InvariantError("the eviction order is not the unleased chunks")

    def _forget(self, landing: Landing) -> None:
        if self._landing.get(landing.key) is landing:
            del self._landing[landing.key]

    def _evict_one(self) -> bool:
        if not self._idle:
            return False
        key, _ = self._idle.popitem(last=False)
        self._free.append(self._visible.pop(key).slot)
        self.num_evicted += 1
        self._on_removed(key)
        return True
