import numpy as np
from tests.kit.bf16 import kv_like

from pdd.agent.coder import LinkCoder, offered_codecs
from pdd.wire.codec import BF16_SPLIT, Bf16Codec

CODEC = Bf16Codec()
KV = memoryview(kv_like(2**15, seed=3).tobytes())
NOISE = memoryview(np.random.default_rng(0).bytes(2**16))


def coded_of(coder: LinkCoder, payload: memoryview, *, rate: float | None, num: int) -> int:
    return sum(coder.encode(CODEC, payload, rate_bytes_per_s=rate) is not None for _ in range(num))


def test_on_codes_what_gets_shorter_and_nothing_else() -> None:
    coder = LinkCoder("on", num_threads=4)
    assert coded_of(coder, KV, rate=None, num=3) == 3
    assert coded_of(coder, NOISE, rate=None, num=3) == 0
    assert coded_of(coder, KV[:1000], rate=None, num=3) == 0
    assert coder.num_saved_bytes > 0.25 * 3 * KV.nbytes


def test_auto_codes_on_a_slow_line() -> None:
    coder = LinkCoder("auto", num_threads=4)
    assert coded_of(coder, KV, rate=1e6, num=100) == 100


def test_auto_only_tries_on_a_fast_line_and_before_any_rate_is_known() -> None:
    coder = LinkCoder("auto", num_threads=4)
    assert coded_of(coder, KV, rate=None, num=64) == 1
    assert coded_of(coder, KV, rate=1e12, num=128) == 2


def test_auto_does_not_code_what_does_not_get_shorter() -> None:
    coder = LinkCoder("auto", num_threads=4)
    assert coded_of(coder, NOISE, rate=1e6, num=128) == 0
    assert coder.ratio is not None
    assert coder.ratio < 1


def test_off_offers_nothing() -> None:
    assert offered_codecs("off") == []
    assert offered_codecs("on") == offered_codecs("auto") == [BF16_SPLIT]
