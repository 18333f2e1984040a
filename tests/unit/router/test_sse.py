"""Events are found whatever the split of the bytes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.core.errors import RemoteProtocolError
from pdd.router.sse import MAX_LINE_BYTES, EventParser, LineBuffer, frame

STREAM = b': comment\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_any_split_gives_the_same_events(cuts: list[int]) -> None:
    parser = EventParser()
    payloads: list[bytes] = []
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in pairwise(edges):
        payloads += parser.feed(STREAM[start:end])
    assert payloads == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


def test_a_line_without_end_is_refused() -> None:
    lines = LineBuffer()
    lines.feed(b"x" * MAX_LINE_BYTES)
    with pytest.raises(RemoteProtocolError):
        lines.feed(b"x")


def test_a_frame_is_one_line() -> None:
    data = frame({"text": "a\nb 😀"})
    assert data == 'data: {"text":"a\\nb 😀"}\n\n'.encode()
