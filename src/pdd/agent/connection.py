"""Reading frames off a stream, and the handshake that opens every connection between two agents."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdd.core.errors import ConnectError, IncompatiblePeerError, RemoteProtocolError
from pdd.core.fingerprint import Fingerprint
from pdd.transport.base import Stream
from pdd.wire.decoder import ControlReceived, DataEnd, DataHeader, FrameDecoder
from pdd.wire.frames import WIRE_VERSION, ControlFrame, Hello, HelloOk, Refused, encode_control

Place = Callable[[DataHeader], memoryview | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What this agent says of itself in every handshake."""

    peer: str
    session: str
    fingerprint: Fingerprint


def read_frames(stream: Stream, decoder: FrameDecoder, place: Place) -> Iterator[ControlReceived | DataEnd]:
    """Frames as they arrive, until the peer ends the connection between two of them.

    Raises:
        RemoteProtocolError: If what arrives is no frame, or is cut.
        TransportError: If the connection is lost.
    """
    while True:
        num_bytes = stream.recv_into(decoder.buffer())
        if num_bytes == 0:
            if decoder.is_at_boundary:
                return
            raise RemoteProtocolError(f"{stream.peer_address} closed the connection inside a frame")
        event = decoder.advance(num_bytes)
        if isinstance(event, DataHeader):
            target = place(event)
            decoder.place(target)
            if target is not None:
                stream.recv_exactly(target)
                event = decoder.advance(target.nbytes)
        if isinstance(event, ControlReceived | DataEnd):
            yield event


def read_control_frame(stream: Stream, decoder: FrameDecoder, *, timeout_s: float) -> ControlFrame:
    """The next frame, which must be a control frame.

    Raises:
        RemoteProtocolError: If it is anything else.
        TransportError: If it does not come in time.
    """
    while True:
        num_bytes = stream.recv_into(decoder.buffer(), timeout_s=timeout_s)
        if num_bytes == 0:
            raise RemoteProtocolError(f"{stream.peer_address} closed the connection during the handshake")
        event = decoder.advance(num_bytes)
        if isinstance(event, ControlReceived):
            return event.frame
        if event is not None:
            raise RemoteProtocolError("DATA before the handshake")


def introduce(stream: Stream, identity: Identity, *, stream_index: int, timeout_s: float) -> FrameDecoder:
    """The peer has accepted the connection; the decoder goes on from there.

    Raises:
        IncompatiblePeerError: If the peer's chunks mean something else.
        ConnectError: If the peer refuses for another reason.
        RemoteProtocolError: If it does not speak the protocol.
        TransportError: If the connection is lost or silent.
    """
    hello = Hello(
        version=WIRE_VERSION,
        peer=identity.peer,
        session=identity.session,
        stream=stream_index,
        fingerprint=dict(identity.fingerprint),
    )
    stream.send([encode_control(hello)], timeout_s=timeout_s)
    decoder = FrameDecoder()
    answer = read_control_frame(stream, decoder, timeout_s=timeout_s)
    if isinstance(answer, Refused):
        if answer.reason in ("incompatible", "version"):
            raise IncompatiblePeerError(answer.fields)
        raise ConnectError(f"{stream.peer_address} refused: {answer.reason}")
    if not isinstance(answer, HelloOk):
        raise RemoteProtocolError(f"{type(answer).__name__} instead of an answer to HELLO")
    return decoder
