"""Request bodies: what is known, what is refused, and that vLLM knows no field that we do not."""

from typing import Any

import msgspec
import pytest

from pdd.router.api.body import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    forwarded,
    parse_json,
    read_chat,
    read_completion,
)
from pdd.router.api.errors import BadRequestError

MESSAGES = [{"role": "user", "content": "hi"}]
NOT_OF_THESE_ENDPOINTS = {
    # Extras of vLLM's answer shape and of its multimodal and RL paths; asking for them names them in a 400.
    "mm_payload",
    "return_mm_kwargs",
    "return_prompt_text",
    "return_token_offsets",
    "routed_experts_prompt_start",
}


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    value: Any = "x" if name == "suffix" else True if name == "use_beam_search" else {"a": 1}
    values = {"messages": MESSAGES, name: value}
    read = read_chat
    if name not in ChatBody.__struct_fields__:
        values, read = {"prompt": "x", name: value}, read_completion  # type: ignore[assignment]
    with pytest.raises(BadRequestError) as caught:
        read(values)
    assert caught.value.param == name


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 900 + b"1" + b"}" * 900,
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequestError, match="JSON"):
        parse_json(raw)


def test_json_is_read_as_it_is() -> None:
    raw = '{"emoji": "\\ud83d\\ude00", "big": 18446744073709551615, "text": "ü"}'.encode()
    assert parse_json(raw) == {"emoji": "😀", "big": 2**64 - 1, "text": "ü"}


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ('{"seed": 18446744073709551616, "n": 36893488147419103232}', "seed"),
        ('{"a": -9223372036854775808, "top_k": -9223372036854775809}', "top_k"),
        ('{"a": 1, "tools": [{}, {"function": {"maximum": 1%s}}]}' % ("0" * 60), "tools[1].function.maximum"),
        ('{"prompt": [1, 2, 100000000000000000000]}', "prompt[2]"),
    ],
)
def test_integers_that_do_not_fit_are_refused_by_name(raw: str, path: str) -> None:
    """They would pass here, and fail where they are packed for the parse process or inside an engine."""
    with pytest.raises(BadRequestError, match="more than 64 bits") as caught:
        parse_json(raw.encode())
    assert caught.value.param == path


def test_parameters_of_the_router_cannot_be_smuggled_in() -> None:
    with pytest.raises(BadRequestError) as caught:
        read_chat({"messages": MESSAGES, "vllm_xargs": {"kv_transfer_params": "x"}})
    assert caught.value.param == "vllm_xargs"


def test_the_field_at_fault_is_named_wherever_it_is() -> None:
    with pytest.raises(BadRequestError) as caught:
        read_chat({"messages": MESSAGES, "stream_options": {"include_usage": "yes"}, "stream": True})
    assert caught.value.param == "stream_options.include_usage"


def test_what_the_router_does_itself_is_not_forwarded() -> None:
    sent = forwarded({"messages": MESSAGES, "n": 3, "return_token_ids": True, "top_p": 0.5}, "served")
    assert sent == {"messages": MESSAGES, "top_p": 0.5, "model": "served"}


@pytest.mark.parametrize(
    ("ours", "module", "name"),
    [
        (ChatBody, "vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
        (CompletionBody, "vllm.entrypoints.openai.completion.protocol", "CompletionRequest"),
    ],
)
def test_every_field_of_vllm_is_known(ours: type[msgspec.Struct], module: str, name: str) -> None:
    protocol = pytest.importorskip(module, reason="vllm is not installed, so its fields cannot be compared")
    theirs = set(getattr(protocol, name).model_fields)
    assert theirs - set(ours.__struct_fields__) - NOT_OF_THESE_ENDPOINTS == set()
