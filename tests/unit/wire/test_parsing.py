"""Messages to the parse process, however the bytes come."""

import pytest

from pdd.core.errors import LocalProtocolError, RemoteProtocolError
from pdd.wire import parsing
from pdd.wire.parsing import Close, Feed, MessageBuffer, Open, Parsed, Whole, pack

MESSAGES = [
    Open(1, {"messages": [{"role": "user", "content": "é"}]}, [1, 2]),
    Feed(1, "text", [3], finished=False),
    Whole(2, "", []),
    Parsed(1, {"content": "x"}, 4),
    Parsed(1, error="no"),
    Close(1),
]


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_messages_are_whole_however_they_are_cut(step: int) -> None:
    data = b"".join(map(pack, MESSAGES))
    buffer = MessageBuffer()
    got = [m for start in range(0, len(data), step) for m in buffer.feed(data[start : start + step])]
    assert got == MESSAGES


DEEP = b"\x84\xa1t\xa4open\xa6stream\x01\xa7request\x81\xa1a" + b"\x91" * 100_000


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        b"\x02\x00\x00\x00\x90\x90",
        len(DEEP).to_bytes(4, "little") + DEEP,
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        MessageBuffer().feed(data)


def test_what_the_other_side_would_not_take_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(LocalProtocolError, match=r"a message of 1.. bytes"):
        pack(Feed(1, "x" * 100, [], finished=False))
