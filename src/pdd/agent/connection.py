"""Reading frames off a stream, and the handshake that opens every connection between two agents."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pdd.core.errors import (
    ConnectError,
    DeadlineError,
    IncompatiblePeerError,
    RemoteProtocolError,
    UntrustedPeerError,
)
from pdd.core.fingerprint import Fingerprint
from pdd.transport.base import Stream
from pdd.wire.decoder import ControlReceived, DataEnd, DataHeader, FrameDecoder
from pdd.wire.frames import (
    MAX_HELLO_BYTES,
    PROBE_VERSION,
    WIRE_VERSION,
    ControlFrame,
    Hello,
    HelloOk,
    Ping,
    Pong,
    Refused,
    encode_control,
)

Place = Callable[[DataHeader], memoryview | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What this agent says of itself in every handshake."""

    peer: str
    session: str
    fingerprint: Fingerprint
    codecs: Sequence[str] = ()


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
                buffer = decoder.buffer()  # the target, or where its coded bytes go first
                stream.recv_exactly(buffer)
                event = decoder.advance(buffer.nbytes)
        if isinstance(event, ControlReceived | DataEnd):
            yield event


class FrameCount:
    """Control frames received in a session, compared with what pings say was sent."""

    def __init__(self) -> None:
        self._num = 0

    def add(self, frame: ControlFrame) -> None:
        """One more frame has arrived.

        Raises:
            RemoteProtocolError: If the peer has sent more or fewer before it.
        """
        if isinstance(frame, Ping | Pong) and frame.sent != self._num:
            raise RemoteProtocolError(f"{frame.sent} control frames were sent, {self._num} arrived")
        self._num = (self._num + 1) % 2**32


def read_control(stream: Stream, decoder: FrameDecoder) -> Iterator[ControlReceived]:
    """As ``read_frames`` for a control connection, where every frame is counted.

    Raises:
        RemoteProtocolError: Also if a frame is DATA, or the peer's count of frames is another.
        TransportError: If the connection is lost.
    """
    count = FrameCount()
    for event in read_frames(stream, decoder, lambda _header: None):
        if not isinstance(event, ControlReceived):
            raise RemoteProtocolError("DATA on the control connection")
        count.add(event.frame)
        yield event


def read_control_frame(stream: Stream, decoder: FrameDecoder, *, timeout_s: float) -> ControlFrame:
    """The next frame, which must be a control frame.

    Raises:
        RemoteProtocolError: If it is anything else.
        DeadlineError: If all of it does not come in time, however its bytes trickle in.
        TransportError: If the connection is lost.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(f"{stream.peer_address} did not finish its first frame in {timeout_s:g} s")
        num_bytes = stream.recv_into(decoder.buffer(), timeout_s=left_s)
        if num_bytes == 0:
            raise RemoteProtocolError(
                f"{stream.peer_address} closed the connection during the handshake; does one side expect TLS?"
            )
        event = decoder.advance(num_bytes)
        if isinstance(event, ControlReceived):
            return event.frame
        if event is not None:
            raise RemoteProtocolError("DATA before the handshake")


def greeting_decoder() -> FrameDecoder:
    """A decoder for a peer that is not known yet."""
    return FrameDecoder(max_control_bytes=MAX_HELLO_BYTES)


def introduce(
    stream: Stream, identity: Identity, *, expected: str, stream_index: int, timeout_s: float
) -> tuple[FrameDecoder, HelloOk]:
    """The peer is the expected one and has accepted the connection; the decoder goes on after its answer.

    Raises:
        UntrustedPeerError: If another agent than the expected one answers.
        IncompatiblePeerError: If the peer's chunks mean something else.
        ConnectError: If the peer refuses for another reason.
        RemoteProtocolError: If it does not speak the protocol.
        TransportError: If the connection is lost or silent.
    """
    check_name(stream, expected)
    hello = Hello(
        version=WIRE_VERSION,
        peer=identity.peer,
        session=identity.session,
        stream=stream_index,
        fingerprint=dict(identity.fingerprint),
        codecs=list(identity.codecs),
        expected=expected,
    )
    stream.send([encode_control(hello)], timeout_s=timeout_s)
    decoder = greeting_decoder()
    answer = read_control_frame(stream, decoder, timeout_s=timeout_s)
    if isinstance(answer, HelloOk | Refused) and answer.peer and answer.peer != expected:
        raise UntrustedPeerError("wrong_name", _other(stream, expected, answer.peer))
    if isinstance(answer, Refused):
        if answer.reason in ("incompatible", "version"):
            raise IncompatiblePeerError(answer.fields)
        details = "".join(f"; {field}" for field in answer.fields)
        raise ConnectError(f"{stream.peer_address} refused: {answer.reason}{details}")
    if not isinstance(answer, HelloOk):
        raise RemoteProtocolError(f"{type(answer).__name__} instead of an answer to HELLO")
    decoder.accept_peer()
    return decoder, answer


def probe(stream: Stream, *, timeout_s: float) -> str:
    """The id of the agent that answers; no session is made.

    Raises:
        RemoteProtocolError: If what answers is no agent.
        TransportError: If the connection is lost or silent.
    """
    hello = Hello(version=PROBE_VERSION, peer="probe", session="", stream=0, fingerprint={})
    stream.send([encode_control(hello)], timeout_s=timeout_s)
    answer = read_control_frame(stream, greeting_decoder(), timeout_s=timeout_s)
    if not isinstance(answer, Refused):
        raise RemoteProtocolError(f"{type(answer).__name__} instead of an answer to a probe")
    return answer.peer


def check_name(stream: Stream, expected: str) -> None:
    """The other end has proved to be the expected engine's agent, if the transport proves names at all.

    Raises:
        UntrustedPeerError: If it has proved to be another.
    """
    names = stream.peer_names
    if names is not None and expected not in names:
        proved = ", ".join(sorted(names)) or "nobody"
        raise UntrustedPeerError("wrong_name", _other(stream, expected, proved))


def _other(stream: Stream, expected: str, found: str) -> str:
    return f"at {stream.peer_address} answers {found} instead of {expected}: is its address right?"
