"""The connections of this agent to a peer that belong together: one control stream, several data streams."""

import threading
import time

from pdd.agent.connection import Identity
from pdd.agent.outbound import Leg
from pdd.agent.outbox import ControlOutbox
from pdd.agent.send_queue import SendQueue
from pdd.core.errors import ConnectionLostError
from pdd.transport.base import Stream
from pdd.wire.frames import HelloOk


class OutSession:
    """The connections to a peer that belong together."""

    def __init__(self, identity: Identity, control: Stream, *, name: str, accepted: HelloOk) -> None:
        self.identity = identity
        self.accepted = accepted
        self.control = control
        self.outbox = ControlOutbox(control, name=f"pdd-out-{name}")
        self.queue = SendQueue()
        self.legs: dict[int, Leg] = {}
        self.num_opened = 0
        self.heard_s = time.monotonic()
        self.moved_s = time.monotonic()
        self.is_silent = False
        self.reason = ""
        self._lock = threading.Lock()
        self._streams: list[Stream] = [control]
        self._num_failed = 0
        self._is_closed = False

    def add_stream(self, stream: Stream) -> None:
        """The stream is closed with the session.

        Raises:
            ConnectionLostError: If the session is closed already.
        """
        with self._lock:
            if not self._is_closed:
                self._streams.append(stream)
                return
        stream.close()
        raise ConnectionLostError("the session is closed")

    def segments(self) -> tuple[int, int]:
        """Data segments sent on all connections, and how many of them were sent again."""
        with self._lock:
            counts = [stream.segments() or (0, 0) for stream in self._streams]
        return sum(sent for sent, _ in counts), sum(again for _, again in counts)

    def data_stream_failed(self, num_streams: int) -> bool:
        """Whether none of the data streams is left to be hoped for."""
        with self._lock:
            self._num_failed += 1
            return self._num_failed >= num_streams

    def close(self, reason: str = "") -> None:
        """All connections are closed; the first reason given is kept."""
        with self._lock:
            self.reason = self.reason or reason
            if self._is_closed:
                return
            self._is_closed = True
            streams = list(self._streams)
        self.queue.close()
        self.outbox.close()
        for stream in streams:
            stream.close()
