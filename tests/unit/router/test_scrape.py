"""What is read from an engine's metrics."""

import pytest

from pdd.router.scrape import read_usage


@pytest.mark.parametrize(
    ("page", "ratio"),
    [
        (b"", None),
        (b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n', 0.25),
        (b"vllm:kv_cache_usage_perc 1e-1\n", 0.1),
        (b'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.5\n', 0.5),
        (b"# HELP vllm:kv_cache_usage_perc x\nvllm:kv_cache_usage_perc_other 0.9\n", None),
        (b"vllm:kv_cache_usage_perc what\n", None),
    ],
)
def test_the_fullest_cache_counts(page: bytes, ratio: float | None) -> None:
    assert read_usage(page) == ratio
