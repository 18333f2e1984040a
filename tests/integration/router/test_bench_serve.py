"""``vllm bench serve`` runs against the router unchanged."""

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from tests.kit.bed import running_bed

PROMPTS, OUTPUT_TOKENS = 6, 12
TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 100_000}


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM, whose client this is, is not here"
)
@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")]
)
async def test_vllm_bench_serve_counts_every_token(backend: str, endpoint: str, tmp_path: Path) -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.model.tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
        load = ("--dataset-name", "random", "--random-input-len", "64", "--num-prompts", str(PROMPTS))
        length = ("--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos", "--seed", "1")
        where = ("--base-url", bed.url, "--endpoint", endpoint, "--backend", backend)
        what = ("--model", "fake", "--tokenizer", str(tmp_path))
        out = (
            "--save-result",
            "--result-dir",
            str(tmp_path),
            "--result-filename",
            "out.json",
            "--disable-tqdm",
        )
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("vllm")),
            *("bench", "serve", *where, *what, *load, *length, *out),
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()[-3000:]
        result = json.loads((tmp_path / "out.json").read_text())
        assert result["completed"] == PROMPTS, said.decode()[-3000:]
        assert result["total_output_tokens"] == PROMPTS * OUTPUT_TOKENS
        assert not any(result.get("errors", []))
