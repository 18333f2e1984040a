"""Numbers as keys and values are: bf16, normal within a channel, channels of unlike spread."""

import numpy as np
from numpy.typing import NDArray


def kv_like(num: int, *, seed: int) -> NDArray[np.uint16]:
    """``num`` bf16 numbers; synthetic."""
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(0.0, 1.0, 64))
    numbers = rng.normal(0.0, 1.0, (-(-num // 64), 64)) * spread
    bits = numbers.astype("<f4").view("<u4") >> 16
    cut: NDArray[np.uint16] = bits.astype("<u2").reshape(-1)[:num]
    return cut
