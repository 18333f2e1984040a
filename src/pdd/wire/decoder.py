"""Turns received bytes into frames, however they were split, without owning a socket.

Pulled: ``buffer()`` is where the next bytes belong, ``advance(n)`` says that n arrived. A payload goes
straight to the place the caller names after a ``DataHeader``, so a transport can receive into the store.
Pushed: ``feed(data, place)`` copies; it is the same machine, which the tests use to prove that any split
of the bytes gives the same events.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import msgspec
import xxhash

from pdd.core.errors import LocalProtocolError, RemoteProtocolError
from pdd.wire.codec import BF16_SPLIT, Bf16Codec
from pdd.wire.frames import (
    DATA_CHECK,
    DATA_FIELDS,
    DATA_FLAGS,
    DATA_HEADER_BYTES,
    FLAG_CODED,
    FLAG_UNASKED,
    KIND_CONTROL,
    KIND_DATA,
    MAGIC,
    MAX_CONTROL_BYTES,
    MAX_PIECE_BYTES,
    PREFIX,
    ControlFrame,
    head_check,
)

_SCRATCH_BYTES: Final = 256 * 2**10
_TLS_MAGIC: Final = (0x0316, 0x0315)
"""First two bytes of a TLS handshake and of a TLS alert record, read as a magic (RFC 8446, section 5.1)."""
_HEAD_BYTES: Final = PREFIX.size + DATA_FIELDS.size


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReceived:
    """A control frame arrived whole; ``num_bytes`` is all it took on the wire."""

    frame: ControlFrame
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataHeader:
    """A DATA frame's header arrived and is good; its payload of ``length`` bytes follows.

    If it is coded, it takes ``wire_length`` bytes on the wire instead.
    """

    number: int
    index: int
    offset: int
    length: int
    wire_length: int
    is_unasked: bool = False
    is_coded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DataEnd:
    """A DATA frame's payload arrived; ``intact`` if its checksum is right, never for a dropped one."""

    header: DataHeader
    intact: bool


Event = ControlReceived | DataHeader | DataEnd
Place = Callable[[DataHeader], memoryview | None]


class _Part(Enum):
    PREFIX = auto()
    CONTROL_BODY = auto()
    DATA_FIELDS = auto()
    UNPLACED = auto()
    PAYLOAD = auto()
    BROKEN = auto()


class FrameDecoder:
    """One direction of one connection.

    Args:
        max_piece_bytes: Longest payload taken from this peer.
        max_control_bytes: Longest control body taken; ``accept_peer`` raises it to the protocol's bound.
    """

    def __init__(
        self, *, max_piece_bytes: int = MAX_PIECE_BYTES, max_control_bytes: int = MAX_CONTROL_BYTES
    ) -> None:
        self._max_piece_bytes = max_piece_bytes
        self._max_control_bytes = max_control_bytes
        self._first_bytes = PREFIX.size
        self._control = msgspec.msgpack.Decoder(ControlFrame)
        self._head = memoryview(bytearray(_HEAD_BYTES + DATA_CHECK.size))
        self._scratch: memoryview | None = None
        self._part = _Part.PREFIX
        self._target = self._head[: PREFIX.size]
        self._filled = 0
        self._drop_left = 0
        self._codec: Bf16Codec | None = None
        self._coded = memoryview(bytearray())
        self._decoded: memoryview | None = None
        """Where a coded payload goes once it is here; None for one that goes there at once."""
        self._checksum = 0
        self._header: DataHeader | None = None

    @property
    def is_at_boundary(self) -> bool:
        """Whether the connection may end here without a frame being cut."""
        return self._part is _Part.PREFIX and self._filled == 0

    def accept_peer(self, *, codec: str = "") -> None:
        """The peer is known: control frames may be as long as the protocol allows, payloads in the codec."""
        self._max_control_bytes = MAX_CONTROL_BYTES
        self._codec = Bf16Codec() if codec == BF16_SPLIT else None

    def expect_data_only(self) -> None:
        """A whole DATA header is asked for at once; a control frame is an error from the next frame on.

        Raises:
            LocalProtocolError: If a frame has already begun.
        """
        if not self.is_at_boundary:
            raise LocalProtocolError("the frame that has begun may be a control frame")
        self._first_bytes = DATA_HEADER_BYTES
        self._expect_prefix()

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty, and nothing beyond it may be received yet.

        Raises:
            LocalProtocolError: If a payload was not placed, or the connection is already broken.
        """
        if self._part in (_Part.UNPLACED, _Part.BROKEN):
            raise LocalProtocolError(f"no bytes can be taken while {self._part.name}")
        if self._part is _Part.PAYLOAD and self._drop_left:
            assert self._scratch is not None
            return self._scratch[: self._drop_left]
        return self._target[self._filled :]

    def advance(self, num_bytes: int) -> Event | None:
        """What the first ``num_bytes`` of ``buffer()``, now filled, complete.

        Raises:
            RemoteProtocolError: If the peer's bytes are no frame of this protocol.
        """
        if self._part is _Part.PAYLOAD and self._drop_left:
            self._drop_left -= num_bytes
            return None if self._drop_left else self._end_payload(intact=False)
        self._filled += num_bytes
        if self._filled < self._target.nbytes:
            return None
        try:
            return self._complete()
        except RemoteProtocolError:
            self._part = _Part.BROKEN
            raise

    def place(self, target: memoryview | None) -> None:
        """The announced payload will be written to ``target``, or dropped if that is None.

        Raises:
            LocalProtocolError: If no payload is announced, or the place has another length.
        """
        if self._part is not _Part.UNPLACED or self._header is None:
            raise LocalProtocolError("no payload is waiting for a place")
        self._part, self._filled, self._decoded = _Part.PAYLOAD, 0, None
        if target is None:
            self._scratch = self._scratch or memoryview(bytearray(_SCRATCH_BYTES))
            self._drop_left = self._header.wire_length
        elif target.nbytes != self._header.length:
            raise LocalProtocolError(f"place of {target.nbytes} bytes for a payload of {self._header.length}")
        elif self._header.is_coded:
            if self._coded.nbytes < self._header.wire_length:
                self._coded = memoryview(bytearray(self._header.wire_length))
            self._target, self._decoded = self._coded[: self._header.wire_length], target
        else:
            self._target = target

    def feed(self, data: bytes | bytearray | memoryview, place: Place) -> list[Event]:
        """All events completed by ``data``; payloads are copied to where ``place`` says.

        Raises:
            RemoteProtocolError: If the peer's bytes are no frame of this protocol.
        """
        events: list[Event] = []
        rest = memoryview(data)
        while rest:
            buffer = self.buffer()[: rest.nbytes]
            buffer[:] = rest[: buffer.nbytes]
            rest = rest[buffer.nbytes :]
            event = self.advance(buffer.nbytes)
            if event is not None:
                events.append(event)
            if isinstance(event, DataHeader):
                self.place(place(event))
        return events

    def _complete(self) -> Event | None:
        if self._part is _Part.PREFIX:
            self._begin_frame()
            return self._end_header() if self._filled == DATA_HEADER_BYTES else None
        if self._part is _Part.CONTROL_BODY:
            return self._end_control()
        if self._part is _Part.DATA_FIELDS:
            return self._end_header()
        return self._end_payload(intact=self._is_intact())

    def _is_intact(self) -> bool:
        """Whether the payload is in its place, decoded, and is what was sent."""
        if self._decoded is None:
            return xxhash.xxh3_64_intdigest(self._target) == self._checksum
        target, self._decoded = self._decoded, None
        assert self._codec is not None
        is_decoded = self._codec.decode(self._target, target)
        return is_decoded and xxhash.xxh3_64_intdigest(target) == self._checksum

    def _begin_frame(self) -> None:
        magic, kind, flags, length, self._checksum = PREFIX.unpack_from(self._head)
        if magic in _TLS_MAGIC:
            raise RemoteProtocolError("the peer speaks TLS, this side does not")
        if magic != MAGIC or flags & ~(DATA_FLAGS if kind == KIND_DATA else 0):
            raise RemoteProtocolError("the peer does not speak this protocol")
        is_control = kind == KIND_CONTROL and self._first_bytes == PREFIX.size
        if is_control and 0 < length <= self._max_control_bytes:
            self._part, self._target, self._filled = _Part.CONTROL_BODY, memoryview(bytearray(length)), 0
        elif kind == KIND_DATA and 0 < length <= self._max_piece_bytes:
            self._part, self._target = _Part.DATA_FIELDS, self._head
        else:
            raise RemoteProtocolError(f"frame of kind {kind} with {length} bytes")

    def _end_control(self) -> ControlReceived:
        body = self._target
        if xxhash.xxh3_64_intdigest(body) != self._checksum:
            raise RemoteProtocolError("control frame with a wrong checksum")
        try:
            frame = self._control.decode(body)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"malformed control frame: {error}") from error
        self._expect_prefix()
        return ControlReceived(frame=frame, num_bytes=PREFIX.size + body.nbytes)

    def _end_header(self) -> DataHeader:
        number, index, offset, size = DATA_FIELDS.unpack_from(self._head, PREFIX.size)
        (check,) = DATA_CHECK.unpack_from(self._head, _HEAD_BYTES)
        if check != head_check(self._head[:_HEAD_BYTES]):
            raise RemoteProtocolError("DATA header with a wrong check")
        _, _, flags, length, _ = PREFIX.unpack_from(self._head)
        is_coded = bool(flags & FLAG_CODED)
        if is_coded and self._codec is None:
            raise RemoteProtocolError("a coded payload, but no codec was agreed on")
        if not length <= size <= self._max_piece_bytes or is_coded != (length < size):
            raise RemoteProtocolError(f"payload of {size} bytes in {length}")
        self._header = DataHeader(
            number=number,
            index=index,
            offset=offset,
            length=size,
            wire_length=length,
            is_unasked=bool(flags & FLAG_UNASKED),
            is_coded=is_coded,
        )
        self._part = _Part.UNPLACED
        return self._header

    def _end_payload(self, *, intact: bool) -> DataEnd:
        assert self._header is not None
        event = DataEnd(header=self._header, intact=intact)
        self._expect_prefix()
        return event

    def _expect_prefix(self) -> None:
        self._part, self._target, self._filled = _Part.PREFIX, self._head[: self._first_bytes], 0
        self._header = None
