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


def payload_of(ids: str, rest: str = "null") -> bytes:
    return f'{{"choices":[{{"token_ids":[{ids}],"logprobs":null,"finish_reason":{rest}}}]}}'.encode()


def event_of(ids: str, rest: str = "null") -> bytes:
    return b"data: " + payload_of(ids, rest) + b"\n\n"


@pytest.mark.parametrize(
    ("data", "ids"),
    [
        (event_of("7"), [7]),
        (event_of("123456"), [123456]),
        (event_of("7,8"), [7, 8]),
        (event_of(""), []),
        (event_of("7,"), []),
        (event_of("7, 8"), []),
        (event_of("-7"), []),
        (event_of("1" * 30), []),
        (event_of("7", '"stop"'), []),
        (event_of("7") + event_of("8"), []),
        (event_of("7")[:-1], []),
        (b"", []),
    ],
)
def test_an_event_like_the_last_one_is_read_without_parsing_it(data: bytes, ids: list[int]) -> None:
    events = TokenEvents()
    assert events.read(data) == []
    events.learn(payload_of("42"))
    assert events.read(data) == ids


def test_what_holds_no_tokens_is_no_pattern() -> None:
    events = TokenEvents()
    for payload in (b"{}", payload_of(""), payload_of("a")):
        events.learn(payload)
        assert events.read(b"data: " + payload + b"\n\n") == []


def test_an_event_of_several_tokens_is_a_pattern_too() -> None:
    events = TokenEvents()
    events.learn(payload_of("1,2"))
    assert events.read(event_of("3")) == [3]
