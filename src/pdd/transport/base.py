"""The contract of a transport: what agents may rely on, whatever carries the bytes.

``tests/kit/transport_conformance.py`` is the contract as tests; every implementation passes it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from pdd.core.errors import ConnectionLostError

Buffer = bytes | bytearray | memoryview


class Stream(ABC):
    """One connection: ordered bytes in both directions.

    One thread may send while another receives. ``close`` may be called from any thread, at any time and
    more than once; it wakes calls that are blocked, and they raise ``ConnectionLostError``.
    """

    @property
    @abstractmethod
    def peer_address(self) -> str:
        """Where the other end is, for logs."""

    @property
    def peer_names(self) -> frozenset[str] | None:
        """Engine ids the other end has proved to be its own; None if the transport proves nothing."""
        return None

    def limit_rate(self, rate_bytes_per_s: float) -> None:  # noqa: B027  # a wish, not a duty
        """What is sent from now on is paced to the rate, where the transport can."""

    def segments(self) -> tuple[int, int] | None:
        """Data segments sent so far, and how many of them again; None if the transport cannot say."""
        return None

    @abstractmethod
    def send(self, buffers: Sequence[Buffer], *, timeout_s: float | None = None) -> int:
        """All bytes of the buffers were handed to the transport, in order; returns how many.

        Args:
            buffers: Sent as if joined. They are free for reuse afterwards.
            timeout_s: Longest wait for the peer to take more; None waits for ever.

        Raises:
            DeadlineError: If the wait was longer. The stream cannot be used any more.
            ConnectionLostError: If the connection ended.
        """

    @abstractmethod
    def recv_into(self, buffer: memoryview, *, timeout_s: float | None = None) -> int:
        """Between one and ``len(buffer)`` bytes are at the front of the buffer; 0 after a clean end.

        Args:
            buffer: Where the bytes go; not empty.
            timeout_s: Longest wait for the first byte; None waits for ever.

        Raises:
            DeadlineError: If the wait was longer. The stream is still usable.
            ConnectionLostError: If the connection ended other than cleanly, or was closed here.
        """

    @abstractmethod
    def close(self) -> None:
        """The connection is over for both ends."""

    def recv_exactly(self, buffer: memoryview) -> None:
        """The whole buffer is filled.

        Raises:
            ConnectionLostError: If the connection ended before.
        """
        filled = 0
        while filled < buffer.nbytes:
            num_bytes = self.recv_into(buffer[filled:])
            if num_bytes == 0:
                raise ConnectionLostError(f"{self.peer_address} closed the connection")
            filled += num_bytes


class Listener(ABC):
    """Takes connections at one address."""

    @property
    @abstractmethod
    def address(self) -> str:
        """``host:port`` that peers on this host can dial, with the port that was really bound."""

    @property
    def refusals(self) -> Mapping[str, int]:
        """How many connections were turned away before ``accept`` gave them out, by reason."""
        return {}

    @abstractmethod
    def accept(self) -> Stream:
        """The next connection.

        Raises:
            ConnectionLostError: If the listener was closed.
        """

    @abstractmethod
    def close(self) -> None:
        """No more connections are taken, and a blocked ``accept`` has been woken."""


class Transport(ABC):
    """Makes streams."""

    @abstractmethod
    def dial(self, address: str, *, timeout_s: float) -> Stream:
        """A connection to the address, whose name is resolved anew each time.

        Raises:
            ConnectError: If nobody answers there in time.
            UntrustedPeerError: If who answers is not trusted, or does not trust this side. The latter may
                also come later, from the first call that reads.
        """

    @abstractmethod
    def listen(self, address: str) -> Listener:
        """A listener at the address; port 0 takes any free one.

        Raises:
            ConnectError: If the address cannot be bound.
        """
