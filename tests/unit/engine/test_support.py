"""What is refused while the engine starts, and that the reason says what to change."""

from types import SimpleNamespace
from typing import Any

import pytest

from pdd.core.errors import ConfigurationError
from pdd.engine.support import check_hash, check_supported

TIER = {"type": "PddTier", "hash_algo": "sha256_cbor", "hash_seed": "0"}


def config(*, groups: int = 1, engine_id: str = "pdd-md0-1a2b", tiers: Any = (TIER,), **parallel: int) -> Any:
    return SimpleNamespace(
        groups=("group",) * groups,
        model=SimpleNamespace(name="m"),
        engine_id=engine_id,
        extra_config={"secondary_tiers": list(tiers)},
        parallel=SimpleNamespace(**{"data_parallel_size": 1, "pp_size": 1, "tp_size": 1} | parallel),
    )


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def test_an_ordinary_engine_is_served() -> None:
    check_supported(config())
    check_supported(config(tp_size=4))


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (config(groups=2), "2 KV cache groups"),
        (config(data_parallel_size=2), "one engine per replica"),
        (config(engine_id="pdd-md0-1a2b_dp0"), "one engine per replica"),
        (config(pp_size=2), "pipeline parallelism"),
        (config(tiers=[TIER | {"hash_algo": "xxhash"}]), "sha256, sha256_cbor"),
        (config(tiers=[TIER | {"hash_seed": "7"}]), "PYTHONHASHSEED"),
    ],
)
def test_refusals_name_the_reason(refused: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        check_supported(refused)


def test_a_missing_seed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="None"):
        check_hash("sha256", "0", None)
