"""Frames survive any split of their bytes; anything else is the peer's error and nothing worse."""

import contextlib
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdd.core.errors import LocalProtocolError, RemoteProtocolError
from pdd.wire import frames as f
from pdd.wire.codec import BF16_SPLIT, Bf16Codec
from pdd.wire.decoder import ControlReceived, DataEnd, DataHeader, FrameDecoder

CODEC = Bf16Codec()
u32 = st.integers(0, 2**32 - 1)
index = st.integers(0, f.MAX_CHUNKS - 1)
name = st.text(max_size=20)
keys = st.lists(st.binary(min_size=1, max_size=64), min_size=1, max_size=5)
control = st.one_of(
    st.builds(
        f.Hello,
        version=st.integers(0, 9),
        peer=name,
        session=name,
        stream=st.integers(0, 64),
        fingerprint=st.dictionaries(name, name, max_size=3),
        codecs=st.lists(name, max_size=3),
    ),
    st.builds(f.HelloOk, version=st.integers(0, 9), peer=name, unasked_bytes=u32, codec=name),
    st.builds(f.Refused, reason=name, fields=st.lists(name, max_size=3)),
    st.builds(f.Offer, number=u32, transfer=name, first=index, keys=keys),
    st.builds(
        f.Want,
        number=u32,
        indices=st.lists(index, max_size=5),
        pieces=st.lists(st.tuples(index, u32, u32), max_size=3),
        answered=st.integers(0, f.MAX_CHUNKS),
    ),
    st.builds(f.Ack, number=u32, indices=st.lists(index, max_size=5)),
    st.builds(f.End, number=u32, total=st.integers(1, f.MAX_CHUNKS)),
    st.builds(f.Landed, number=u32),
    st.builds(f.Failed, number=u32, reason=name, detail=name),
    st.builds(f.Cancel, number=u32),
    st.builds(f.Ping, nonce=u32),
    st.builds(f.Pong, nonce=u32),
)
payloads = st.binary(min_size=1, max_size=300) | st.integers(1, 300).map(bytes)
data = st.tuples(u32, u32, u32, payloads, st.booleans(), st.booleans())
messages = st.lists(st.one_of(control, data), max_size=8)


def encode(message: Any) -> bytes:
    if isinstance(message, f.Frame):
        return f.encode_control(message)
    number, at, offset, payload, is_unasked, may_be_coded = message
    coded = CODEC.encode(memoryview(payload))
    is_coded = may_be_coded and len(coded) < len(payload)
    header = f.encode_data_header(
        number=number,
        index=at,
        offset=offset,
        payload=memoryview(payload),
        is_unasked=is_unasked,
        coded_bytes=len(coded) if is_coded else None,
    )
    return header + (coded if is_coded else payload)


def make_decoder(**options: Any) -> FrameDecoder:
    """One that takes coded payloads."""
    decoder = FrameDecoder(**options)
    decoder.accept_peer(codec=BF16_SPLIT)
    return decoder


class Placer:
    """Keeps what was placed, and drops every third payload."""

    def __init__(self) -> None:
        self.placed: list[tuple[DataHeader, bytearray | None]] = []

    def __call__(self, header: DataHeader) -> memoryview | None:
        buffer = None if len(self.placed) % 3 == 2 else bytearray(header.length)
        self.placed.append((header, buffer))
        return None if buffer is None else memoryview(buffer)


def decode(chunks: list[bytes]) -> tuple[list[Any], list[Any]]:
    decoder, placer = make_decoder(), Placer()
    events: list[Any] = []
    for chunk in chunks:
        events += decoder.feed(chunk, placer)
    return events, placer.placed


@given(messages, st.data())
def test_any_split_gives_the_same_events(sent: list[Any], drawn: st.DataObject) -> None:
    stream = b"".join(map(encode, sent))
    cuts = sorted(drawn.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert decode(chunks) == decode([stream])


@given(messages)
def test_what_is_sent_is_what_is_received(sent: list[Any]) -> None:
    events, placed = decode([b"".join(map(encode, sent))])
    assert [e.frame for e in events if isinstance(e, ControlReceived)] == [
        m for m in sent if isinstance(m, f.Frame)
    ]
    pieces = [m for m in sent if not isinstance(m, f.Frame)]
    ends = [e for e in events if isinstance(e, DataEnd)]
    assert [(h.number, h.index, h.offset, h.length, h.is_unasked) for h, _ in placed] == [
        (*m[:3], len(m[3]), m[4]) for m in pieces
    ]
    for end, (_, buffer), piece in zip(ends, placed, pieces, strict=True):
        assert end.intact == (buffer is not None)
        assert buffer is None or bytes(buffer) == piece[3]


@given(messages)
def test_pulled_by_a_byte_at_a_time_as_pushed(sent: list[Any]) -> None:
    stream = b"".join(map(encode, sent))
    decoder, placer = make_decoder(), Placer()
    events: list[Any] = []
    for byte in stream:
        decoder.buffer()[0] = byte
        event = decoder.advance(1)
        if isinstance(event, DataHeader):
            decoder.place(placer(event))
        if event is not None:
            events.append(event)
    assert (events, placer.placed) == decode([stream])
    assert decoder.is_at_boundary


@given(st.binary(max_size=400))
def test_garbage_is_only_ever_a_remote_error(garbage: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode([garbage])


@given(messages.filter(bool), st.data())
def test_a_flipped_bit_is_seen(sent: list[Any], drawn: st.DataObject) -> None:
    stream = bytearray(b"".join(map(encode, sent)))
    bit = drawn.draw(st.integers(0, len(stream) * 8 - 1))
    whole, _ = decode([bytes(stream)])
    stream[bit // 8] ^= 1 << bit % 8
    try:
        events, placed = decode([bytes(stream)])
    except RemoteProtocolError:
        return
    # It went through: then it hit a payload, whose end says so, or the frame is now longer than the stream.
    dropped = {i for i, (_, buffer) in enumerate(placed) if buffer is None}
    ends = [e for e in events if isinstance(e, DataEnd)]
    hit = [i for i, end in enumerate(ends) if not end.intact and i not in dropped]
    assert hit or len(events) < len(whole) or dropped


@given(st.binary(max_size=200))
def test_a_body_that_is_no_message_is_a_remote_error(body: bytes) -> None:
    prefix = f.PREFIX.pack(f.MAGIC, f.KIND_CONTROL, 0, len(body), xxhash.xxh3_64_intdigest(body))
    with contextlib.suppress(RemoteProtocolError):
        decode([prefix + body])


@pytest.mark.parametrize(
    "prefix",
    [
        f.PREFIX.pack(0, f.KIND_CONTROL, 0, 1, 0),
        f.PREFIX.pack(f.MAGIC, 9, 0, 1, 0),
        f.PREFIX.pack(f.MAGIC, f.KIND_CONTROL, f.FLAG_UNASKED, 1, 0),
        f.PREFIX.pack(f.MAGIC, f.KIND_DATA, 128, 1, 0),
        f.PREFIX.pack(f.MAGIC, f.KIND_CONTROL, 0, 0, 0),
        f.PREFIX.pack(f.MAGIC, f.KIND_CONTROL, 0, f.MAX_CONTROL_BYTES + 1, 0),
        f.PREFIX.pack(f.MAGIC, f.KIND_DATA, 0, f.MAX_PIECE_BYTES + 1, 0),
    ],
)
def test_lengths_and_kinds_are_bounded_before_anything_is_kept(prefix: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode([prefix])


@pytest.mark.parametrize(
    "frame",
    [
        f.Offer(number=0, transfer="t", first=0, keys=[]),
        f.Offer(number=0, transfer="t", first=0, keys=[b"k" * 65]),
        f.Offer(number=0, transfer="t" * 257, first=0, keys=[b"k"]),
        f.Offer(number=2**32, transfer="t", first=0, keys=[b"k"]),
        f.Want(number=0, indices=[-1]),
        f.Ack(number=0, indices=[f.MAX_CHUNKS]),
        f.End(number=0, total=0),
        f.Failed(number=0, reason="r", detail="d" * 2049),
    ],
)
def test_fields_are_bounded(frame: f.Frame) -> None:
    with pytest.raises(RemoteProtocolError):
        decode([f.encode_control(frame)])


def test_frames_are_compact() -> None:
    """An ACK is a few bytes beside its prefix: overhead counts on the line."""
    assert len(f.encode_control(f.Ack(number=7, indices=[9]))) - f.PREFIX.size <= 6
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(f.Landed(number=3))) == [8, 3]
    assert f.DATA_HEADER_BYTES == 36


class TestDecoderUse:
    """Mistakes of this side are local errors."""

    def test_a_payload_must_be_placed(self) -> None:
        decoder = FrameDecoder()
        stream = encode((1, 2, 3, b"payload", False, False))
        for byte in stream[: f.DATA_HEADER_BYTES]:
            decoder.buffer()[0] = byte
            decoder.advance(1)
        with pytest.raises(LocalProtocolError):
            decoder.buffer()
        with pytest.raises(LocalProtocolError):
            decoder.place(memoryview(bytearray(3)))
        with pytest.raises(LocalProtocolError):
            FrameDecoder().place(None)

    def test_coded_payloads_must_be_agreed_on_and_shorter(self) -> None:
        payload = memoryview(bytes(1000))
        coded = CODEC.encode(payload)
        for decoder, num_bytes in ((FrameDecoder(), len(coded)), (make_decoder(), 1000), (make_decoder(), 0)):
            head = f.encode_data_header(number=1, index=0, offset=0, payload=payload, coded_bytes=num_bytes)
            with pytest.raises(RemoteProtocolError):
                decoder.feed(head, lambda _header: None)

    def test_nothing_is_taken_after_an_error(self) -> None:
        decoder = FrameDecoder()
        with pytest.raises(RemoteProtocolError):
            decoder.feed(bytes(16), lambda _header: None)
        with pytest.raises(LocalProtocolError):
            decoder.buffer()

    def test_data_only_asks_for_whole_headers_and_takes_no_control_frame(self) -> None:
        decoder, placer = FrameDecoder(), Placer()
        decoder.expect_data_only()
        assert decoder.buffer().nbytes == f.DATA_HEADER_BYTES
        events = decoder.feed(encode((1, 2, 3, b"payload", False, False)) * 2, placer)
        assert [type(event) for event in events] == [DataHeader, DataEnd] * 2
        assert decoder.buffer().nbytes == f.DATA_HEADER_BYTES
        with pytest.raises(RemoteProtocolError):
            decoder.feed(
                encode(f.Hello(version=1, peer="p", session="s" * 50, stream=0, fingerprint={})), placer
            )

    def test_a_peer_may_be_held_to_smaller_pieces(self) -> None:
        decoder = FrameDecoder(max_piece_bytes=4)
        with pytest.raises(RemoteProtocolError):
            decoder.feed(encode((1, 2, 3, b"12345", True, False)), lambda _header: None)
