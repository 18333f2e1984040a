"""Parsers that do not exist."""

import pytest

from pdd.config.schema import ModelConfig
from pdd.core.errors import ConfigurationError
from pdd.parse.names import check_names


def check(**names: str) -> None:
    check_names(
        ModelConfig(path="m", name="m", **names),  # type: ignore[arg-type]
        tool_call_parsers=["hermes", "mistral"],
        reasoning_parsers=["deepseek_r1", "qwen3"],
        source="pdd.toml",
    )


def test_names_that_vllm_has_are_taken() -> None:
    check()
    check(tool_call_parser="mistral")
    check(tool_call_parser="hermes", reasoning_parser="qwen3")


def test_a_name_that_vllm_does_not_have_is_refused_with_file_key_and_what_it_has() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(tool_call_parser="qwen3", reasoning_parser="qwen4")
    first, second = str(caught.value).splitlines()
    assert first == "pdd.toml: model.tool_call_parser: vLLM has no parser 'qwen3'; it has hermes, mistral"
    assert second.startswith(
        "pdd.toml: model.reasoning_parser: vLLM has no parser 'qwen4'; it has deepseek_r1"
    )
