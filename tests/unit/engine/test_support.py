"""What is refused while the engine starts, and that the reason says what to change."""

from types import SimpleNamespace
from typing import Any

import pytest

from pdd.core.errors import ConfigurationError, UnsupportedModelError
from pdd.engine.shape import SHAPE_KEY, CacheGroup, CacheShape, Kind
from pdd.engine.support import check_hash, check_shape, check_supported

FULL = CacheShape(groups=(CacheGroup(kind=Kind.FULL, block_tokens=32),))
TIER = {"type": "PddTier", "hash_algo": "sha256_cbor", "hash_seed": "0"}


def config(
    *, engine_id: str = "pdd-md0-1a2b", tiers: Any = (TIER,), shape: Any = True, **parallel: int
) -> Any:
    return SimpleNamespace(
        model=SimpleNamespace(name="m"),
        engine_id=engine_id,
        extra_config={"secondary_tiers": list(tiers)} | ({SHAPE_KEY: FULL} if shape else {}),
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
        (config(shape=False), "pdd serve --print"),
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


def group(kind: str, *, block_tokens: int = 32, **more: Any) -> CacheGroup:
    return CacheGroup(kind=kind, block_tokens=block_tokens, **more)


WINDOW = group(Kind.WINDOW, window_tokens=512)


@pytest.mark.parametrize(
    "shape",
    [
        FULL,
        CacheShape(groups=(WINDOW, WINDOW, group(Kind.FULL))),
        CacheShape(groups=(group(Kind.LATENT),), is_latent_model=True),
        CacheShape(groups=(group(Kind.LATENT),), is_latent_model=True, is_on_cpu=True, has_amx=True),
    ],
)
def test_families_people_serve_are_moved(shape: CacheShape) -> None:
    check_shape(shape, model="m", blocks_per_chunk=1)


@pytest.mark.parametrize(
    ("groups", "blocks_per_chunk", "reason"),
    [
        ((group(Kind.FULL), group("MambaSpec")), 1, "kind MambaSpec cannot be moved"),
        ((group("ChunkedLocalAttentionSpec"),), 1, "ChunkedLocalAttentionSpec"),
        ((group("full/latent"),), 1, "full/latent"),
        ((group(Kind.FULL), group(Kind.FULL, is_draft=True)), 1, "--speculative-config"),
        ((WINDOW, group(Kind.FULL, block_tokens=16)), 1, r"window\(512\): 32, full: 16"),
        ((WINDOW, group(Kind.FULL)), 2, r"kv.blocks_per_chunk = 1 \(it is 2\)"),
    ],
)
def test_other_models_are_refused_by_the_property_and_what_to_do(
    groups: tuple[CacheGroup, ...], blocks_per_chunk: int, reason: str
) -> None:
    shape = CacheShape(groups=groups)
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        check_shape(shape, model="org/m", blocks_per_chunk=blocks_per_chunk)
    assert "org/m" in str(refusal.value)
    assert "+".join(each.kind for each in groups).split("/")[0] in str(refusal.value).replace("(512)", "")


@pytest.mark.parametrize(("kind", "has_amx"), [(Kind.LATENT, False), (Kind.FULL, False), (Kind.FULL, True)])
def test_latent_attention_is_refused_where_the_cpu_backend_cannot_go_on(kind: Kind, has_amx: bool) -> None:
    """Also with MLA switched off, when keys and values are kept: a prompt's are then wrong there."""
    shape = CacheShape(groups=(group(kind),), is_latent_model=True, is_on_cpu=True, has_amx=has_amx)
    with pytest.raises(UnsupportedModelError, match="serve it on GPUs, or another model"):
        check_shape(shape, model="m", blocks_per_chunk=1)


def test_windows_that_are_not_all_kept_are_refused() -> None:
    shape = CacheShape(groups=(WINDOW, group(Kind.FULL)), keeps_all=False)
    with pytest.raises(UnsupportedModelError, match="retention interval"):
        check_shape(shape, model="m", blocks_per_chunk=1)
    check_shape(CacheShape(groups=(group(Kind.FULL),), keeps_all=False), model="m", blocks_per_chunk=1)


@pytest.mark.parametrize(
    ("window_tokens", "chunks"), [(1, 1), (32, 1), (33, 2), (64, 2), (80, 3), (1024, 32)]
)
def test_a_window_needs_the_chunks_it_reaches_into(window_tokens: int, chunks: int) -> None:
    assert group(Kind.WINDOW, window_tokens=window_tokens).window_chunks(32) == chunks
    assert group(Kind.FULL).window_chunks(32) is None
