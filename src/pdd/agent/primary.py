"""The engine's host memory as the agent sees it, through the descriptor that came with Hello."""

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from pdd.core.errors import RemoteProtocolError
from pdd.wire import local


class PrimaryTier:
    """The engine's host memory, mapped here."""

    def __init__(self, fd: int, hello: local.Hello) -> None:
        """The memory behind the descriptor is readable and writable here; the descriptor stays the caller's.

        Raises:
            RemoteProtocolError: If it is smaller than the engine says, or cannot be mapped.
        """
        if not 0 < hello.chunk_bytes <= hello.primary_row_bytes or hello.num_primary_slots < 1:
            raise RemoteProtocolError("the engine's primary tier has no sensible shape")
        num_bytes = hello.primary_row_bytes * hello.num_primary_slots
        size = os.fstat(fd).st_size
        if size < num_bytes:
            raise RemoteProtocolError(f"the engine's primary tier has {size} bytes, not {num_bytes}")
        try:
            memory = mmap.mmap(fd, num_bytes)
        except (OSError, ValueError) as error:
            raise RemoteProtocolError(f"the engine's primary tier cannot be mapped: {error}") from error
        rows = np.frombuffer(memory, dtype=np.uint8).reshape(hello.num_primary_slots, -1)
        self._rows: NDArray[np.uint8] | None = rows[:, : hello.chunk_bytes]

    def row(self, slot: int) -> NDArray[np.uint8]:
        """The payload bytes of one slot.

        Raises:
            RemoteProtocolError: If there is no such slot.
        """
        assert self._rows is not None
        if not 0 <= slot < len(self._rows):
            raise RemoteProtocolError(f"primary slot {slot} of {len(self._rows)}")
        row: NDArray[np.uint8] = self._rows[slot]
        return row

    def close(self) -> None:
        """The memory is no longer mapped here, as soon as the last row is forgotten."""
        self._rows = None
