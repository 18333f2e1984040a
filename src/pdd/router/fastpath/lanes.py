"""Lanes: answers whose tokens the native thread forwards, as the event loop sees them.

It owns the thread and the numbers of its lanes. It does not know what an answer is; whoever lends a lane's
sockets does, and gets them back with everything that came meanwhile.
"""

import asyncio
import ctypes
import os
from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from pdd.router.fastpath.library import LaneStruct, NewsStruct, load
from pdd.router.fastpath.vocabulary import Vocabulary

NAP_S = 0.0005
"""The thread rests so long after each turn: tokens of many lanes come together, and share its wakening."""
_RETURNED_AT_ONCE = 64


class Reason(IntEnum):
    """Why a lane stopped; the library's numbers."""

    RUNNING = 0
    OTHER_EVENT = 1
    ENGINE_CLOSED = 2
    CLIENT_CLOSED = 3
    TAKEN_BACK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The two sockets of a lane, and what surrounds the token IDs from one and the text to the other.

    Neither is read or written by anybody else while the lane runs.

    Args:
        engine_fd: The engine's socket, which stands before an HTTP chunk.
        unread: What was read from it and not used, from such a place on.
        engine_around: What is around the token IDs of an event.
        client_fd: The client's socket.
        client_around: What is around the text of an event.
        room: How many tokens the lane may take.
        last_s: When the last one came, on the monotonic clock.
    """

    engine_fd: int
    unread: bytes
    engine_around: tuple[bytes, bytes]
    client_fd: int
    client_around: tuple[bytes, bytes]
    room: int
    last_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a lane did since the last look.

    Args:
        reason: ``RUNNING``, or why it has stopped.
        ids: Tokens whose events were given to the client.
        held: The last so many of all its tokens have given no text yet: they end inside a character.
        unread: Read from the engine and not used.
        unsent: Bytes for the client that it has not taken; until it has, nothing more is read.
        last_s: When the last token came, on the monotonic clock.
        max_gap_s: Longest time between two events, the one before the first included.
        gaps_s: The times between the lane's first events, as far as they were not told yet.
    """

    reason: Reason
    ids: "array[int]"
    held: int
    unread: bytes
    unsent: bytes
    last_s: float
    max_gap_s: float
    gaps_s: "array[float]"


class Borrower(Protocol):
    """Has sockets of others in a lane, and gives them back when it is told to."""

    def heard_s(self) -> float:
        """When the engine was last heard, on the loop's clock; now if it is the client that is slow."""

    def note(self, news: News) -> None:
        """Tokens were given to the client."""

    def take_back(self) -> None:
        """The lane is over, by itself or by this; nothing happens if it was over before."""


def lendable_fd(transport: asyncio.WriteTransport) -> int | None:
    """The descriptor of a transport's socket, if bytes on it are what the protocols see and all are sent."""
    is_plain = transport.get_extra_info("sslcontext") is None
    if transport.is_closing() or transport.get_write_buffer_size() or not is_plain:
        return None
    socket = transport.get_extra_info("socket")
    return None if socket is None else int(socket.fileno())


class FastPath:
    """The native thread, between ``start`` and ``close``.

    Args:
        vocabulary: Texts of the model's tokens.

    Raises:
        ConfigurationError: If the library was not built.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._library = load()
        self._lanes: dict[int, Borrower] = {}
        self._news = NewsStruct()
        self._path = 0
        self._returned_fd = -1
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """The thread runs.

        Raises:
            OSError: If it cannot.
        """
        offsets = self._vocabulary.offsets
        self._path = self._library.pdd_fastpath_open(
            offsets.buffer_info()[0], len(offsets) - 1, self._vocabulary.data, int(NAP_S * 1e6)
        )
        if not self._path:
            raise OSError("the native fast path's thread could not be started")
        self._returned_fd = self._library.pdd_fastpath_returned_fd(self._path)
        self._loop.add_reader(self._returned_fd, self._take_returned)

    def close(self) -> None:
        """All lanes were taken back, and the thread has ended."""
        if self._path:
            self._loop.remove_reader(self._returned_fd)
            for number in list(self._lanes):
                self._give_back(number)
            self._library.pdd_fastpath_close(self._path)
            self._path = 0

    def lend(self, ends: Ends, borrower: Borrower) -> int | None:
        """The number of a new lane between the two sockets; None if there cannot be one.

        That is if the fast path is closed, the kernel has no descriptor left, or the events are very long.
        """
        if not self._path:
            return None
        (before, after), (client_before, client_after) = ends.engine_around, ends.client_around
        asked = LaneStruct(
            ends.engine_fd,
            ends.client_fd,
            before,
            after,
            client_before,
            client_after,
            len(before),
            len(after),
            len(client_before),
            len(client_after),
            ends.room,
            ends.last_s,
            ends.unread,
            len(ends.unread),
        )
        number = int(self._library.pdd_fastpath_lend(self._path, ctypes.byref(asked)))
        if number < 0:
            return None
        self._lanes[number] = borrower
        return number

    def stop(self, number: int) -> News:
        """What the lane did since the last look; it is over, and its sockets are their lenders' again."""
        news = self.look(number, stop=True)
        self._library.pdd_fastpath_forget(self._path, number)
        del self._lanes[number]
        return news

    def refresh(self) -> None:
        """All borrowers know of all their tokens."""
        for number, borrower in list(self._lanes.items()):
            borrower.note(self.look(number))

    def look(self, number: int, *, stop: bool = False) -> News:
        """What the lane did since the last look; it goes on, unless it is to stop."""
        if number not in self._lanes:
            raise LookupError(f"no lane {number}")
        news = self._news
        self._library.pdd_fastpath_look(self._path, number, stop, ctypes.byref(news))
        return News(
            reason=Reason(news.reason),
            ids=array("i", ctypes.string_at(news.ids, news.num_ids * 4)),
            held=news.held_tokens,
            unread=ctypes.string_at(news.unread, news.num_unread),
            unsent=ctypes.string_at(news.unsent, news.num_unsent),
            last_s=news.last_s,
            max_gap_s=news.max_gap_s,
            gaps_s=array("d", ctypes.string_at(news.gaps_s, news.num_gaps * 8)),
        )

    def _take_returned(self) -> None:
        try:
            os.read(self._returned_fd, 8)
        except BlockingIOError:
            return
        numbers = (ctypes.c_int64 * _RETURNED_AT_ONCE)()
        while count := self._library.pdd_fastpath_take_returned(self._path, numbers, _RETURNED_AT_ONCE):
            for number in numbers[:count]:
                self._loop.call_soon(self._give_back, number)

    def _give_back(self, number: int) -> None:
        if (borrower := self._lanes.get(number)) is not None:  # else it was stopped a moment ago
            borrower.take_back()
