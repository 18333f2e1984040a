"""``pdd bench codec``: what the wire codec makes of KV, and what it costs."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np

from pdd.core.errors import ConfigurationError
from pdd.policy.coding import CodingParams
from pdd.wire.codec import Bf16Codec

_PIECE_BYTES: Final = 2**20
_SYNTHETIC_BYTES: Final = 16 * 2**20
_CHANNELS: Final = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The parser takes the bench's flags."""
    parser.add_argument(
        "--file", type=Path, metavar="PATH", help="raw bf16 keys and values; default: synthetic ones"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of which medians count (default: 3)")
    parser.add_argument(
        "--json", action="store_true", help="print nothing but the last line, one JSON object"
    )


def run(arguments: argparse.Namespace) -> int:
    """The figures are printed; returns the exit status.

    Raises:
        ConfigurationError: If the file cannot be read, or holds nothing.
    """
    try:
        data = arguments.file.read_bytes() if arguments.file else _synthetic_kv()
    except OSError as error:
        raise ConfigurationError(f"{arguments.file}: {error.strerror}") from error
    if len(data) < 2:
        raise ConfigurationError(f"{arguments.file} holds no number")
    source = str(arguments.file) if arguments.file else "synthetic: normal, channels of unlike spread"
    figures = {"source": source, **measure_codec(data, rounds=arguments.rounds)}
    if not arguments.json:
        sys.stdout.writelines(f"{name} = {value}\n" for name, value in figures.items())
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0


def measure_codec(data: bytes, *, rounds: int) -> dict[str, float]:
    """Ratio and processor time of the codec on this data, a piece of a megabyte at a time, on one thread.

    ``auto_below_bytes_per_s`` is the line rate below which ``agent.codec = "auto"`` codes with one core.
    """
    codec = Bf16Codec()
    view = memoryview(data)
    pieces = [view[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]
    encode_s, decode_s = [], []
    for _ in range(rounds):
        start_s = time.process_time()
        coded = [codec.encode(piece) for piece in pieces]
        coded_s = time.process_time()
        targets = [memoryview(bytearray(piece.nbytes)) for piece in pieces]
        made_s = time.process_time()
        is_decoded = [codec.decode(memoryview(c), target) for c, target in zip(coded, targets, strict=True)]
        encode_s.append(coded_s - start_s)
        decode_s.append(time.process_time() - made_s)
        assert all(is_decoded)
        assert all(piece == target for piece, target in zip(pieces, targets, strict=True))
    gigabytes = len(data) / 1e9
    encode_rate = len(data) / statistics.median(encode_s)
    return {
        "bytes": len(data),
        "ratio": round(len(data) / sum(map(len, coded)), 4),
        "encode_cpu_s_per_gb": round(statistics.median(encode_s) / gigabytes, 3),
        "decode_cpu_s_per_gb": round(statistics.median(decode_s) / gigabytes, 3),
        "auto_below_bytes_per_s": round(encode_rate / CodingParams().min_gain_ratio),
    }


def _synthetic_kv() -> bytes:
    """bf16 numbers, normal within a channel, as keys and values roughly are."""
    rng = np.random.default_rng(0)
    spread = np.exp(rng.normal(0.0, 1.0, _CHANNELS))
    numbers = rng.normal(0.0, 1.0, (_SYNTHETIC_BYTES // 2 // _CHANNELS, _CHANNELS)) * spread
    bits = numbers.astype("<f4").view("<u4") >> 16
    data: bytes = bits.astype("<u2").tobytes()
    return data
