"""Messages between an engine's tier and the agent beside it, over one Unix socket.

No KV bytes pass here. With its ``Hello`` the engine hands over the file descriptor of its primary tier
(host memory shared by all its workers), and the agent copies chunks in and out of it by slot number.
So the engine's scheduler thread only ever queues small messages.

A message is a 4-byte little-endian length and that many bytes of msgpack, tagged by type.

Source:
    vllm/v1/kv_offload/tiering/base.py@0.32.0 (``SecondaryTierManager``) for the jobs mirrored here.
"""

import struct
from typing import Final

import msgspec

from pdd.core.errors import RemoteProtocolError

LOCAL_VERSION: Final = 2
MAX_MESSAGE_BYTES: Final = 64 * 2**20
"""Bound on one message; a snapshot of a million 36-byte keys fits."""

_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of all local messages."""


class Hello(Message, frozen=True, tag="hello"):
    """First message of an engine; its socket message also carries the primary tier's file descriptor.

    ``engine_id`` is vLLM's own, new with each start, for logs only: the socket says whose agent it is.
    ``primary_row_bytes`` is the distance between two slots of the primary tier, ``chunk_bytes`` how many
    of them are payload and go into the store; ``num_primary_slots`` is how many there are. ``sampler`` says
    how penalties and seeds of another engine go on (``pdd.wire.carried``); empty: they do not.
    """

    version: int
    engine_id: str
    fingerprint: dict[str, str]
    chunk_bytes: int
    chunk_tokens: int
    primary_row_bytes: int
    num_primary_slots: int
    sampler: str = ""


class BeginTransfer(Message, frozen=True, tag="begin"):
    """A prefill was accepted whose KV is to be pushed to ``targets`` (peer ids, most urgent first).

    ``prompt_tokens // chunk_tokens`` chunks make the transfer whole, unless ``num_chunks`` says another
    number: where the model has several KV cache groups, a stretch of the prompt has several chunks.
    ``priority``, ``unmasked`` and ``hold`` are the router's words on its place in the line to another site
    (``pdd.policy.wan_order``).
    """

    request: str
    transfer: str
    targets: list[str]
    prompt_tokens: int
    num_chunks: int | None = None
    priority: int = 0
    unmasked: bool = False
    hold: bool = False


class StoreChunks(Message, frozen=True, tag="store"):
    """Copy primary slots into the store; parallel lists, in prefix order.

    ``end_tokens`` says each chunk's place in the transfer, as the prompt position it ends at; several KV
    cache groups are counted one after the other, as if the prompt were so much longer. 0: stored, not sent.
    The slots stay untouched until ``StoreDone``.
    """

    job: int
    request: str
    keys: list[bytes]
    slots: list[int]
    end_tokens: list[int]


class LoadChunks(Message, frozen=True, tag="load"):
    """Copy chunks of the store into primary slots; parallel lists. Answered by ``LoadDone``."""

    job: int
    keys: list[bytes]
    slots: list[int]


class Touch(Message, frozen=True, tag="touch"):
    """These chunks were used: they move to the young end of the eviction order."""

    keys: list[bytes]


class FinishRequest(Message, frozen=True, tag="finish"):
    """No more chunks will come for the request, because it ended or was aborted."""

    request: str


class Welcome(Message, frozen=True, tag="welcome"):
    """The agent serves this engine; ``keys`` is all the store holds, so the engine's mirror starts equal."""

    version: int
    keys: list[bytes]


class Refused(Message, frozen=True, tag="refused"):
    """The agent cannot serve this engine and closes."""

    reason: str


class KeysChanged(Message, frozen=True, tag="keys"):
    """Chunks that entered or left the store since the last such message."""

    added: list[bytes]
    removed: list[bytes]


class StoreDone(Message, frozen=True, tag="stored"):
    """The agent no longer reads the job's primary slots."""

    job: int


class LoadDone(Message, frozen=True, tag="loaded"):
    """The agent no longer writes the job's primary slots; ``loaded`` are the keys that hold good bytes."""

    job: int
    loaded: list[bytes]


FromEngine = Hello | BeginTransfer | StoreChunks | LoadChunks | Touch | FinishRequest
FromAgent = Welcome | Refused | KeysChanged | StoreDone | LoadDone

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The message with its length in front, ready to send."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class _Decoder:
    """Turns bytes, however they are split, into messages."""

    def __init__(self, union: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray()

    def _take(self) -> list[object]:
        messages: list[object] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_MESSAGE_BYTES:
                raise RemoteProtocolError(f"local message of {length} bytes exceeds {MAX_MESSAGE_BYTES}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(memoryview(self._buffer)[start + _LENGTH.size : end]))
            except msgspec.MsgspecError as error:
                raise RemoteProtocolError(f"malformed local message: {error}") from error
            start = end
        del self._buffer[:start]
        return messages


class EngineDecoder(_Decoder):
    """Decodes what an engine sends; used by the agent."""

    def __init__(self) -> None:
        super().__init__(FromEngine)

    def feed(self, data: bytes | bytearray | memoryview) -> list[FromEngine]:
        """The messages completed by ``data``.

        Raises:
            RemoteProtocolError: If a message is too long or not of the schema.
        """
        self._buffer += data
        return self._take()  # type: ignore[return-value]  # the decoder's schema is FromEngine


class AgentDecoder(_Decoder):
    """Decodes what an agent sends; used by the engine's tier."""

    def __init__(self) -> None:
        super().__init__(FromAgent)

    def feed(self, data: bytes | bytearray | memoryview) -> list[FromAgent]:
        """The messages completed by ``data``.

        Raises:
            RemoteProtocolError: If a message is too long or not of the schema.
        """
        self._buffer += data
        return self._take()  # type: ignore[return-value]  # the decoder's schema is FromAgent
