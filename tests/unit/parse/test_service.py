"""What the parse process says of errors."""

from pdd.parse.service import said
from pdd.wire.parsing import MessageBuffer, Parsed, pack


def test_an_error_with_half_a_character_can_be_sent() -> None:
    text = said(ValueError("no such name: \ud83d"))
    assert text == "ValueError: no such name: \\ud83d"
    assert MessageBuffer().feed(pack(Parsed(1, error=text))) == [Parsed(1, error=text)]
