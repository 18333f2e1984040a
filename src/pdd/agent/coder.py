"""The wire codec of one link: codes pieces when told or when it pays, and measures what it brings."""

import os
import threading
import time
from typing import Final, Literal

from pdd.policy.coding import CodingParams, CodingSnapshot, decide_coding
from pdd.wire.codec import BF16_SPLIT, Bf16Codec

CodecMode = Literal["off", "on", "auto"]

_PARAMS: Final = CodingParams()
_TRIAL_PERIOD: Final = 64
"""In ``auto`` one piece of so many is coded to see what it would bring: 1 to 2 % of the coder's work."""
_WEIGHT: Final = 1 / 8
_MIN_PIECE_BYTES: Final = 4096
"""Smaller pieces do not pay for the frame around their exponents."""


def offered_codecs(mode: CodecMode) -> list[str]:
    """What a side with this setting can speak, for HELLO."""
    return [] if mode == "off" else [BF16_SPLIT]


class LinkCoder:
    """Shared by the data threads of a link; each brings its own codec."""

    def __init__(self, mode: CodecMode, *, num_threads: int) -> None:
        self._mode = mode
        self._num_threads = min(num_threads, os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._num_pieces = 0
        self._coder_rate: float | None = None
        self._ratio: float | None = None
        self._sent_ratio = 1.0
        """KV bytes a byte on the line, of the last pieces."""
        self.num_saved_bytes = 0

    @property
    def ratio(self) -> float | None:
        """KV bytes a coded byte; None before the first."""
        return self._ratio

    def encode(
        self, codec: Bf16Codec, payload: memoryview, *, rate_bytes_per_s: float | None
    ) -> bytes | None:
        """The coded piece, or None if it is to go in clear.

        Args:
            codec: The calling thread's.
            payload: The piece.
            rate_bytes_per_s: KV a second that crosses now, as measured.
        """
        if payload.nbytes < _MIN_PIECE_BYTES or not self._is_wanted(rate_bytes_per_s):
            self._note_sent(1.0)
            return None
        start_s = time.thread_time()
        coded = codec.encode(payload)
        self._measure(payload.nbytes, len(coded), time.thread_time() - start_s)
        is_shorter = len(coded) < payload.nbytes
        self._note_sent(payload.nbytes / len(coded) if is_shorter else 1.0)
        if not is_shorter:
            return None
        with self._lock:
            self.num_saved_bytes += payload.nbytes - len(coded)
        return coded

    def _is_wanted(self, rate_bytes_per_s: float | None) -> bool:
        if self._mode != "auto":
            return self._mode == "on"
        with self._lock:
            self._num_pieces += 1
            line = None if rate_bytes_per_s is None else rate_bytes_per_s / self._sent_ratio
            coder = None if self._coder_rate is None else self._coder_rate * self._num_threads
            snapshot = CodingSnapshot(
                line_rate_bytes_per_s=line, coder_rate_bytes_per_s=coder, ratio=self._ratio
            )
            return self._num_pieces % _TRIAL_PERIOD == 1 or decide_coding(snapshot, _PARAMS).is_coded

    def _measure(self, num_bytes: int, num_coded: int, took_s: float) -> None:
        with self._lock:
            rate, ratio = num_bytes / max(took_s, 1e-6), num_bytes / num_coded
            self._coder_rate = rate if self._coder_rate is None else _blend(self._coder_rate, rate)
            self._ratio = ratio if self._ratio is None else _blend(self._ratio, ratio)

    def _note_sent(self, ratio: float) -> None:
        with self._lock:
            self._sent_ratio = _blend(self._sent_ratio, ratio)


def _blend(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old)
