"""The fuzz target's property by Hypothesis always, and by coverage where atheris is installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.frame_parser import check
from tests.unit.wire.test_frames import encode, messages

HERE = Path(__file__).parent


@given(st.binary(max_size=300))
def test_garbage(data: bytes) -> None:
    check(data)


@settings(max_examples=300)
@given(st.data(), messages, st.integers(0, 255))
def test_good_frames_with_some_bytes_changed(data: st.DataObject, sent: list, first: int) -> None:
    stream = bytearray(b"".join(map(encode, sent)))
    for _ in range(data.draw(st.integers(0, 4)) if stream else 0):
        kind = data.draw(st.sampled_from(["flip", "drop", "insert"]))
        at = data.draw(st.integers(0, max(0, len(stream) - 1)))
        if kind == "flip" and stream:
            stream[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "drop":
            del stream[at : at + data.draw(st.integers(1, 40))]
        else:
            stream[at:at] = data.draw(st.binary(min_size=1, max_size=40))
    check(bytes([first]) + bytes(stream))


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed: coverage-guided fuzzing is optional",
)
def test_guided_by_coverage(tmp_path: Path) -> None:
    (tmp_path / "seed").write_bytes(b"\x07" + b"\x50\x44\x01\x00" + bytes(20))
    command = [sys.executable, str(HERE / "frame_parser.py"), "-atheris_runs=20000", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
