"""The model is identified by its content."""

import json
from pathlib import Path

import pytest

from pdd.core.fingerprint import FIELDS
from pdd.engine.identity import make_fingerprint, model_digest


def make_model(folder: Path, *, weights: bytes = bytes(100_000), **config: object) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8} | config))
    header = b'{"w":{"dtype":"F32"}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)
    return str(folder)


def test_copies_of_a_model_are_one_model_whatever_their_names(tmp_path: Path) -> None:
    one = make_model(tmp_path / "a", _name_or_path="here", transformers_version="5.1")
    two = make_model(tmp_path / "b", _name_or_path="there", transformers_version="5.2")
    assert model_digest(one) == model_digest(two)


@pytest.mark.parametrize("at", [0, 50_000, 99_999])
def test_other_weights_are_another_model(tmp_path: Path, at: int) -> None:
    weights = bytearray(100_000)
    weights[at] = 1
    assert model_digest(make_model(tmp_path / "a")) != model_digest(
        make_model(tmp_path / "b", weights=bytes(weights))
    )


def test_another_length_or_configuration_is_another_model(tmp_path: Path) -> None:
    base = model_digest(make_model(tmp_path / "a"))
    assert model_digest(make_model(tmp_path / "b", weights=bytes(100_001))) != base
    assert model_digest(make_model(tmp_path / "c", rope_theta=1e6)) != base


def test_a_model_that_is_not_here_is_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    digest = model_digest("nobody/nothing")
    assert digest.startswith("name:")
    assert digest != model_digest("nobody/something")


def test_a_broken_configuration_does_not_break_the_digest(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{ not json")
    assert model_digest(str(folder))


def test_a_fingerprint_has_every_field_peers_compare() -> None:
    fingerprint = make_fingerprint(
        model="m",
        dtype="float32",
        kv_layout="LBHNC",
        kv_groups="full",
        block_tokens=32,
        chunk_tokens=64,
        chunk_bytes=4096,
        hash_name="sha256_cbor/0",
        parallelism="tp=1",
        platform="cpu/AVX2",
    )
    assert tuple(fingerprint) == FIELDS
    assert all(isinstance(value, str) for value in fingerprint.values())
