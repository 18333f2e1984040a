"""Feeds the frame parser whatever bytes reach new code in it, by coverage.

    python tests/fuzz/frame_parser.py [-atheris_runs=1000000] [CORPUS_DIR]

Needs ``atheris`` (``pip install atheris``); ``test_frame_parser.py`` runs it briefly where it is installed.
The property itself, ``check``, needs nothing, and Hypothesis uses it too.
"""

import sys

from pdd.core.errors import RemoteProtocolError
from pdd.wire.codec import BF16_SPLIT
from pdd.wire.decoder import DataHeader, Event, FrameDecoder
from pdd.wire.frames import MAX_HELLO_BYTES

MAX_BUFFER_BYTES = 4 * 2**20


def check(data: bytes) -> None:
    """Only ``RemoteProtocolError`` comes of the bytes, and the same events however they are split.

    The first byte decides the split and whether the peer is known yet.
    """
    if not data:
        return
    step, is_known, stream = data[0] % 61 + 1, data[0] < 128, data[1:]
    assert _pull(stream, len(stream) + 1, is_known=is_known) == _pull(stream, step, is_known=is_known)


def _pull(stream: bytes, step: int, *, is_known: bool) -> tuple[list[Event], str]:
    """The events of the bytes as they come in steps, and what the parser said against them at last."""
    decoder = FrameDecoder(max_piece_bytes=2**20, max_control_bytes=MAX_HELLO_BYTES)
    if is_known:
        decoder.accept_peer(codec=BF16_SPLIT)
    events: list[Event] = []
    rest = memoryview(stream)
    try:
        while rest:
            buffer = decoder.buffer()
            assert 0 < buffer.nbytes <= MAX_BUFFER_BYTES
            num_bytes = min(buffer.nbytes, rest.nbytes, step)
            buffer[:num_bytes] = rest[:num_bytes]
            rest = rest[num_bytes:]
            event = decoder.advance(num_bytes)
            if event is not None:
                events.append(event)
            if isinstance(event, DataHeader):
                decoder.place(memoryview(bytearray(event.length)) if event.index % 2 else None)
    except RemoteProtocolError as error:
        return events, str(error)
    return events, ""


def main() -> None:
    import atheris

    atheris.instrument_all()
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
