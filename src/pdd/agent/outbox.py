"""A thread that writes queued messages to one stream, so that nobody who has news ever waits for a peer."""

import logging
import threading
from collections import deque
from typing import Final

import msgspec

from pdd.core.errors import TransportError
from pdd.transport.base import Stream
from pdd.wire.frames import MAX_INDICES_PER_FRAME, Ack, ControlFrame, HelloOk, Ping, Pong, encode_control

_log = logging.getLogger(__name__)
ACK_PAUSE_S: Final = 0.005
"""ACKs follow each other by at least this; a thread woken for each chunk costs more than its bytes do."""
_MAX_QUEUED: Final = 65536
"""A peer this far behind does not read; its connection is closed."""


class ControlOutbox:
    """Frames of one session, in order; adjacent ACKs of one transfer travel as one."""

    def __init__(self, stream: Stream, *, name: str) -> None:
        self._stream = stream
        self._changed = threading.Condition()
        self._frames: deque[ControlFrame] = deque()
        self._num_sent = 0
        self._is_urgent = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, frame: ControlFrame) -> None:
        """The frame will be sent after all put before, unless the connection ends."""
        with self._changed:
            if self._is_closed:
                return
            last = self._frames[-1] if self._frames else None
            if isinstance(frame, Ack) and isinstance(last, Ack) and _can_join(last, frame):
                last.indices.extend(frame.indices)
                return
            self._frames.append(frame)
            self._is_urgent |= not isinstance(frame, Ack)
            is_stuck = len(self._frames) > _MAX_QUEUED
            self._changed.notify()
        if is_stuck:
            self._stream.close()

    def close(self) -> None:
        """Nothing more will be sent; the thread ends as soon as the stream lets it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            while frames := self._take():
                self._stream.send([encode_control(self._counted(frame)) for frame in frames])
        except TransportError as error:
            _log.debug("control stream: %s", error)
            self._stream.close()

    def _counted(self, frame: ControlFrame) -> ControlFrame:
        """The frame as it is sent: pings say how many went before them."""
        if isinstance(frame, HelloOk):
            return frame
        sent, self._num_sent = self._num_sent, (self._num_sent + 1) % 2**32
        return msgspec.structs.replace(frame, sent=sent) if isinstance(frame, Ping | Pong) else frame

    def _take(self) -> list[ControlFrame]:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or bool(self._frames))
            self._changed.wait_for(lambda: self._is_closed or self._is_urgent, ACK_PAUSE_S)
            frames = [] if self._is_closed else list(self._frames)
            self._frames.clear()
            self._is_urgent = False
            return frames


def _can_join(first: Ack, second: Ack) -> bool:
    is_short = len(first.indices) + len(second.indices) <= MAX_INDICES_PER_FRAME
    return first.number == second.number and is_short
