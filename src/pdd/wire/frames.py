"""Frames between two agents: what they are, and how each is written.

A frame is a 16-byte prefix (magic, kind, flags, length, xxh3_64 of the body) and a body. The body of a
control frame is msgpack, tagged by type. A DATA frame has 20 more bytes of fixed header between prefix
and payload, with a check of their own: a header must be known to be good before its payload is written
to the slot it names.

``docs/reference/wire.md`` tells who sends what when.
"""

import struct
from typing import Annotated, Final

import msgspec
import xxhash
from msgspec import Meta

WIRE_VERSION: Final = 2
PROBE_VERSION: Final = 0
"""A HELLO of this version asks only who answers; it is always refused, as ``probe``."""
MAX_HELLO_BYTES: Final = 64 * 2**10
"""Bound on a control frame's body before a peer has been accepted."""
MAX_CONTROL_BYTES: Final = 4 * 2**20
"""Bound on one control frame's body."""
MAX_PIECE_BYTES: Final = 64 * 2**20
"""Bound on one DATA frame's payload, far above any sensible ``agent.piece_bytes``."""
MAX_KEYS_PER_OFFER: Final = 4096
MAX_INDICES_PER_FRAME: Final = 16384
MAX_CHUNKS: Final = 2**20
"""Bound on the chunks of one transfer: 2**20 chunks of 32 tokens are 33 million tokens."""

MAGIC: Final = 0x4450
"""``PD`` on the wire, little-endian."""
KIND_CONTROL: Final = 1
KIND_DATA: Final = 2
FLAG_UNASKED: Final = 1
"""On DATA: the payload was sent before the receiver has said that it lacks the chunk."""
FLAG_CODED: Final = 2
"""On DATA: the payload is coded (``pdd.wire.codec``); check and size are of the decoded one."""
DATA_FLAGS: Final = FLAG_UNASKED | FLAG_CODED
PREFIX: Final = struct.Struct("<HBBIQ")
"""magic, kind, flags (none on a control frame), body length in bytes, xxh3_64 of the body."""
DATA_FIELDS: Final = struct.Struct("<IIII")
"""transfer number, chunk index, offset in the chunk, size of the decoded payload."""
DATA_CHECK: Final = struct.Struct("<I")
"""Low 32 bits of xxh3_64 over prefix and fields."""
DATA_HEADER_BYTES: Final = PREFIX.size + DATA_FIELDS.size + DATA_CHECK.size

Number = Annotated[int, Meta(ge=0, lt=2**32)]
Index = Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)]
Key = Annotated[bytes, Meta(min_length=1, max_length=64)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=2048)]


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """Base of all control frames."""


class Hello(Frame, frozen=True, tag=1):
    """First frame of every connection, from the side that dialled.

    Connections with one ``session`` belong together: ``stream`` 0 carries control frames, the others
    DATA. ``fingerprint`` gives the meaning of the dialling side's chunk bytes, ``codecs`` names the codecs
    it can send payloads in. ``expected`` is whom it means to reach: another agent refuses before a session is
    made, which would replace the one this peer may rightly have there.
    """

    version: int
    peer: Name
    session: Name
    stream: Annotated[int, Meta(ge=0, le=1024)]
    fingerprint: Annotated[dict[Name, Text], Meta(max_length=64)]
    codecs: Annotated[list[Name], Meta(max_length=16)] = []
    expected: Name = ""


class HelloOk(Frame, frozen=True, tag=2):
    """The connection is accepted; ``peer`` is the accepting agent.

    ``unasked_bytes`` is the credit for DATA of chunks that the receiver has not answered yet, ``codec`` the
    one of HELLO's codecs that payloads may be in; empty: none.
    """

    version: int
    peer: Name
    unasked_bytes: Number = 0
    codec: Name = ""


class Refused(Frame, frozen=True, tag=3):
    """The connection is not accepted and will be closed.

    ``reason`` is ``version``, ``incompatible`` (``fields`` names what differs), ``not_ready`` (no engine
    has said yet what chunks are), ``identity`` (the certificate is another's), ``wrong_peer`` (another agent
    is meant), ``unknown_session`` or ``probe``. ``peer`` is the refusing agent.
    """

    reason: Name
    fields: Annotated[list[Text], Meta(max_length=64)]
    peer: Name = ""


class Offer(Frame, frozen=True, tag=4):
    """The sender has chunks ``first``, ``first + 1``, ... of a transfer, under these keys.

    ``number`` stands for the transfer in all other frames of the session.
    """

    number: Number
    transfer: Name
    first: Index
    keys: Annotated[list[Key], Meta(min_length=1, max_length=MAX_KEYS_PER_OFFER)]


class Want(Frame, frozen=True, tag=5):
    """The receiver lacks these chunks whole, and these ``(index, offset, length)`` pieces once more.

    ``answered`` is how many of the offered chunks it has looked up by now; 0 in a WANT that answers no
    OFFER. What is below and was never wanted, the receiver has or gets elsewhere.
    """

    number: Number
    indices: Annotated[list[Index], Meta(max_length=MAX_INDICES_PER_FRAME)]
    pieces: Annotated[list[tuple[Index, Number, Number]], Meta(max_length=MAX_INDICES_PER_FRAME)] = []
    answered: Annotated[int, Meta(ge=0, le=MAX_CHUNKS)] = 0


class Ack(Frame, frozen=True, tag=6):
    """These wanted chunks are whole, verified and visible at the receiver."""

    number: Number
    indices: Annotated[list[Index], Meta(max_length=MAX_INDICES_PER_FRAME)]


class End(Frame, frozen=True, tag=7):
    """The transfer has ``total`` chunks, all offered."""

    number: Number
    total: Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]


class Landed(Frame, frozen=True, tag=8):
    """All chunks of the transfer are visible at the receiver's engine, and leased."""

    number: Number


class Failed(Frame, frozen=True, tag=9):
    """The receiver gave the transfer up and freed what was not whole."""

    number: Number
    reason: Name
    detail: Text = ""


class Cancel(Frame, frozen=True, tag=10):
    """The sender gave the transfer up; DATA still on its way is dropped."""

    number: Number


class Ping(Frame, frozen=True, tag=11):
    """Asks for a ``Pong`` with the same ``nonce``: round-trip time, and a sign of life.

    ``sent`` is how many control frames this side had sent in the session before it, handshake aside: a frame
    that was lost on the way shows within a ping.
    """

    nonce: Number
    sent: Number = 0


class Pong(Frame, frozen=True, tag=12):
    """Answer to ``Ping``; ``sent`` likewise, of the answering side."""

    nonce: Number
    sent: Number = 0


ControlFrame = Hello | HelloOk | Refused | Offer | Want | Ack | End | Landed | Failed | Cancel | Ping | Pong

_encoder = msgspec.msgpack.Encoder()


def encode_control(frame: ControlFrame) -> bytes:
    """The whole frame, ready to send."""
    body = _encoder.encode(frame)
    assert len(body) <= MAX_CONTROL_BYTES
    return PREFIX.pack(MAGIC, KIND_CONTROL, 0, len(body), xxhash.xxh3_64_intdigest(body)) + body


def encode_data_header(
    *,
    number: int,
    index: int,
    offset: int,
    payload: memoryview,
    is_unasked: bool = False,
    coded_bytes: int | None = None,
) -> bytes:
    """The 36 bytes that precede ``payload``, or what it was coded to, in a DATA frame."""
    flags = (FLAG_UNASKED if is_unasked else 0) | (0 if coded_bytes is None else FLAG_CODED)
    length = payload.nbytes if coded_bytes is None else coded_bytes
    prefix = PREFIX.pack(MAGIC, KIND_DATA, flags, length, xxhash.xxh3_64_intdigest(payload))
    head = prefix + DATA_FIELDS.pack(number, index, offset, payload.nbytes)
    return head + DATA_CHECK.pack(head_check(head))


def head_check(head: bytes | memoryview) -> int:
    """The check over prefix and fields of a DATA header."""
    return xxhash.xxh3_64_intdigest(head) & 0xFFFFFFFF
