"""The one HTTP chunk that most reads are."""

import pytest

from pdd.router.http_client import whole_chunk


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (b"5\r\nhello\r\n", b"hello"),
        (b"1a\r\n" + b"x" * 26 + b"\r\n", b"x" * 26),
        (b"00005\r\nhello\r\n", b"hello"),
        (b"2\r\n\r\n\r\n", b"\r\n"),
        (b"0\r\n\r\n", b""),
        (b"5\r\nhello\r\n0\r\n\r\n", b""),
        (b"5\r\nhello\r\n5\r\nhello\r\n", b""),
        (b"5\r\nhell", b""),
        (b"6\r\nhello\r\n", b""),
        (b"5;a=b\r\nhello\r\n", b""),
        (b"-5\r\nhello\r\n", b""),
        (b"xyz\r\nhello\r\n", b""),
        (b"\r\nhello\r\n", b""),
        (b"hello", b""),
        (b"", b""),
    ],
)
def test_only_one_whole_chunk_is_taken_at_once(data: bytes, body: bytes) -> None:
    assert whole_chunk(data) == body
