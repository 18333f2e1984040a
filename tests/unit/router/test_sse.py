"""Events are found whatever the split of the bytes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.core.errors import RemoteProtocolError
from pdd.router.sse import MAX_LINE_BYTES, EventParser, LineBuffer, TokenEvents, frame

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


def event_of(token: str, rest: str = "null") -> bytes:
    return (
        f'data: {{"choices":[{{"token_ids":[{token}],"logprobs":null,"finish_reason":{rest}}}]}}\n\n'.encode()
    )


@pytest.mark.parametrize(
    ("data", "token"),
    [
        (event_of("7"), 7),
        (event_of("123456"), 123456),
        (event_of("7,8"), -1),
        (event_of(""), -1),
        (event_of("-7"), -1),
        (event_of("1" * 30), -1),
        (event_of("7", '"stop"'), -1),
        (event_of("7") + event_of("8"), -1),
        (event_of("7")[:-1], -1),
        (b"", -1),
    ],
)
def test_an_event_like_the_last_one_is_read_without_parsing_it(data: bytes, token: int) -> None:
    events = TokenEvents()
    assert events.read(data) == -1
    events.learn(event_of("42"))
    assert events.read(data) == token


def test_what_holds_no_single_token_is_no_pattern() -> None:
    events = TokenEvents()
    for data in (b"data: {}\n\n", event_of(""), event_of("1,2")):
        events.learn(data)
        assert events.read(data) == -1
