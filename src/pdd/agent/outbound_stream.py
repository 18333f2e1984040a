"""One data connection of a session: it sends what is at the front of the session's queue."""

import logging
from collections.abc import Sequence

from pdd.agent.connection import introduce
from pdd.agent.outbound_session import OutboundSession
from pdd.agent.send_queue import Piece
from pdd.core.errors import ProtocolError, TransportError
from pdd.transport.base import Buffer, Stream
from pdd.wire.codec import BF16_SPLIT, Bf16Codec
from pdd.wire.frames import DATA_HEADER_BYTES, encode_data_header

_log = logging.getLogger(__name__)


class OutboundStream:
    """See the module; ``run`` is a thread's whole life."""

    def __init__(self, session: OutboundSession, index: int) -> None:
        self._session = session
        self._link = session.link
        self._index = index
        self._codec = Bf16Codec() if session.accepted.codec == BF16_SPLIT else None

    def run(self) -> None:
        """The session has ended, or goes on without this connection, which did not come about."""
        session, settings = self._session, self._link.settings
        try:
            stream = self._dial()
        except (TransportError, ProtocolError) as error:
            _log.warning("data stream %d to %s: %s", self._index, self._link.peer, error)
            session.stream_failed(error)
            return
        try:
            while pieces := session.queue.take(settings.piece_bytes, num_takers=settings.streams):
                self._send(stream, pieces)
        except TransportError as error:
            session.close(str(error))

    def _dial(self) -> Stream:
        settings = self._link.settings
        stream = self._link.dial()
        self._session.add_stream(stream)
        introduce(
            stream,
            self._session.identity,
            expected=self._link.peer,
            stream_index=self._index,
            timeout_s=settings.connect_timeout_s,
        )
        if settings.max_rate is not None:
            stream.limit_rate(settings.max_rate / settings.streams)
        return stream

    def _send(self, stream: Stream, pieces: Sequence[Piece]) -> None:
        """The pieces are on their way; chunks of a transfer that ended meanwhile may be gone and are not."""
        store = self._link.store
        leased = [piece for piece in pieces if store.lease(piece.key)]
        buffers: list[Buffer] = []
        try:
            for piece in leased:
                row = store.row(piece.key).data
                frame = self._frame(piece, row[piece.offset : piece.offset + piece.length])
                buffers += frame
                # Counted before it is sent: the peer's LANDED may be faster than this thread.
                self._session.sent(piece, wan_bytes=DATA_HEADER_BYTES + len(frame[1]))
            if buffers:
                stream.send(buffers)
                self._session.moved()
        finally:
            store.release([piece.key for piece in leased])

    def _frame(self, piece: Piece, payload: memoryview) -> tuple[bytes, bytes | memoryview]:
        coded = None
        if self._codec is not None:
            rate = self._link.rate.rate_bytes_per_s
            coded = self._link.coder.encode(self._codec, payload, rate_bytes_per_s=rate)
        header = encode_data_header(
            number=piece.number,
            index=piece.index,
            offset=piece.offset,
            payload=payload,
            is_unasked=piece.is_unasked,
            coded_bytes=None if coded is None else len(coded),
        )
        return header, payload if coded is None else coded
