"""The codec gives back what it was given, and takes nothing else for it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.bf16 import kv_like

from pdd.wire.codec import Bf16Codec

CODEC = Bf16Codec()


def decoded(coded: bytes, size: int) -> bytes | None:
    target = bytearray(size)
    return bytes(target) if CODEC.decode(memoryview(coded), memoryview(target)) else None


@given(st.binary(max_size=3000))
def test_any_bytes_of_any_length_come_back(data: bytes) -> None:
    assert decoded(CODEC.encode(memoryview(data)), len(data)) == data


@given(st.integers(0, 2**32), st.integers(1, 4096), st.sampled_from([0, 1]))
def test_numbers_come_back(seed: int, num: int, odd: int) -> None:
    data = kv_like(num, seed=seed).tobytes() + b"x" * odd
    assert decoded(CODEC.encode(memoryview(data)), len(data)) == data


def test_infinities_and_not_a_numbers_come_back() -> None:
    data = np.arange(2**16, dtype="<u2").tobytes()
    assert decoded(CODEC.encode(memoryview(data)), len(data)) == data


def test_keys_and_values_get_shorter() -> None:
    data = kv_like(2**18, seed=1).tobytes()
    assert len(CODEC.encode(memoryview(data))) < 0.75 * len(data)


@given(st.binary(max_size=400), st.integers(0, 300))
def test_garbage_is_refused_or_fills_the_target(garbage: bytes, size: int) -> None:
    result = decoded(garbage, size)
    assert result is None or len(result) == size


@pytest.mark.parametrize("size", [0, 1, 98, 99, 101, 102, 2**20])
def test_another_size_is_refused(size: int) -> None:
    assert decoded(CODEC.encode(memoryview(bytes(100))), size) is None


def test_a_frame_that_claims_to_be_huge_takes_no_memory() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(2**26))
    coded = len(bomb).to_bytes(4, "little") + bomb + bytes(50)
    assert decoded(coded, 100) is None
