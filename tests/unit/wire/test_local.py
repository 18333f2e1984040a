"""Engine and agent understand each other however the bytes are cut, and refuse what is not of the schema."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.core.errors import RemoteProtocolError
from pdd.wire import local

KEYS = st.lists(st.binary(min_size=1, max_size=40), max_size=5)
NUMBERS = st.integers(0, 2**31)
FROM_ENGINE = st.one_of(
    st.builds(
        local.BeginTransfer,
        request=st.text(max_size=8), transfer=st.text(max_size=8),
        targets=st.lists(st.text(max_size=4), max_size=3), prompt_tokens=NUMBERS,
    ),
    st.builds(
        local.StoreChunks,
        job=NUMBERS, request=st.text(max_size=8), keys=KEYS,
        slots=st.lists(NUMBERS, max_size=5), end_tokens=st.lists(NUMBERS, max_size=5),
    ),
    st.builds(local.LoadChunks, job=NUMBERS, keys=KEYS, slots=st.lists(NUMBERS, max_size=5)),
    st.builds(local.Touch, keys=KEYS),
    st.builds(local.FinishRequest, request=st.text(max_size=8)),
)  # fmt: skip


@given(st.lists(FROM_ENGINE, max_size=6), st.data())
def test_any_split_of_the_bytes_gives_the_same_messages(
    messages: list[local.Message], data: st.DataObject
) -> None:
    stream = b"".join(local.encode(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    decoder = local.EngineDecoder()
    decoded: list[local.Message] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoded += decoder.feed(stream[start:end])
    assert decoded == messages


@given(st.binary(max_size=200))
def test_garbage_is_a_remote_protocol_error_or_an_unfinished_message(garbage: bytes) -> None:
    decoder = local.AgentDecoder()
    try:
        decoder.feed(garbage)
    except RemoteProtocolError:
        return


def test_a_message_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(RemoteProtocolError, match="exceeds"):
        local.AgentDecoder().feed(struct.pack("<I", local.MAX_MESSAGE_BYTES + 1))


def test_the_two_directions_do_not_mix() -> None:
    with pytest.raises(RemoteProtocolError, match="malformed local message"):
        local.EngineDecoder().feed(local.encode(local.StoreDone(job=1)))
