"""What clients may send: every known field of OpenAI's and vLLM's request bodies, and the types we rely on.

A field that is not here is refused by name, since ignoring it would silently answer another question.
Fields typed ``Any`` are judged by the engine that renders the request.

Source:
    vllm/entrypoints/openai/{chat_completion,completion}/protocol.py@0.32.0.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from pdd.router.api.errors import BadRequestError
from pdd.wire import carried

MAX_CHOICES = 128
"""OpenAI's bound on ``n``."""
Stop = str | Annotated[list[str], msgspec.Meta(max_length=64)] | None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both endpoints."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    bad_words: list[str] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool = False
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    # Judged by the engine.
    add_special_tokens: Any = None
    allowed_token_ids: Any = None
    cache_salt: Any = None
    frequency_penalty: Any = None
    ignore_eos: Any = None
    length_penalty: Any = None
    logit_bias: Any = None
    logprob_token_ids: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    priority: Any = None
    prompt_logprobs: Any = None
    repetition_detection: Any = None
    repetition_penalty: Any = None
    request_id: str | None = None
    response_format: Any = None
    seed: Any = None
    session_id: Any = None
    stop_token_ids: Any = None
    stream_interval: Any = None
    structured_outputs: Any = None
    temperature: Any = None
    thinking_token_budget: Any = None
    top_k: Any = None
    top_p: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    user: Any = None
    vllm_xargs: dict[str, Any] | None = None
    watermarking: Any = None


class ChatBody(_Common, forbid_unknown_fields=True, kw_only=True):
    """``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    # Judged by the engine.
    add_generation_prompt: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    documents: Any = None
    include_reasoning: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    reasoning_effort: Any = None
    # Known to OpenAI's service, without a meaning here.
    metadata: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    # Refused with a reason.
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None


class CompletionBody(_Common, forbid_unknown_fields=True, kw_only=True):
    """``/v1/completions``."""

    prompt: Any = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None


B = TypeVar("B", ChatBody, CompletionBody)

UNSUPPORTED: Mapping[str, str] = {
    "functions": "functions is not supported; use tools",
    "function_call": "function_call is not supported; use tool_choice",
    "suffix": "suffix is not supported",
    "prompt_embeds": "prompt embeddings are not supported",
    "audio": "only text output is supported",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "web search is not supported",
    "logprob_token_ids": "logprob_token_ids is not supported",
    "use_beam_search": "beam search is not supported",
    "kv_transfer_params": "kv_transfer_params belongs to the router and must not be sent by clients",
    "ec_transfer_params": "ec_transfer_params belongs to the router and must not be sent by clients",
}
_MAX_INT, _MIN_INT = 2**64 - 1, -(2**63)
"""Of msgpack, in which a request reaches the parse process, and vLLM's API server hands it to its engine."""
_SPARE_DEPTH = 64
_packed = msgspec.msgpack.Encoder().encode
_NOT_FORWARDED = ("n", "best_of", "echo", "request_id", "return_token_ids", "return_tokens_as_token_ids")
_TOP_LOGPROBS_MAX = 20


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as an object.

    Raises:
        BadRequestError: If it is no JSON, no object, or holds what cannot be sent on. Python's own parser
            is not strict: what it lets pass (``NaN``, half a surrogate pair) cannot be sent on either.
    """
    try:
        value = msgspec.json.decode(raw)
        if not isinstance(value, dict):
            raise BadRequestError("the body must be a JSON object")
        _packed(_nested(value))  # a tenth of what reading it took
    except RecursionError as error:
        raise BadRequestError("the body's JSON is nested too deeply") from error
    except msgspec.DecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
    except OverflowError as error:
        path = _path_of_large_int(value)
        raise BadRequestError(f"{path}: an integer of more than 64 bits", param=path) from error
    return value


def _nested(value: Any) -> Any:
    """The value deeper down: whoever sends it on has more frames on the stack than who read it."""
    for _ in range(_SPARE_DEPTH):
        value = [value]
    return value


def _path_of_large_int(values: dict[str, Any]) -> str:
    """Where the first integer is that does not fit."""
    left: list[tuple[str, Any]] = [("", values)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{path}.{key}" if path else key, item) for key, item in reversed(value.items())]
        elif isinstance(value, list):
            left += [(f"{path}[{index}]", item) for index, item in reversed(list(enumerate(value)))]
        elif isinstance(value, int) and not _MIN_INT <= value <= _MAX_INT:
            return path
    return "(whole body)"


def read_chat(values: dict[str, Any], *, takes_tools: bool = False) -> ChatBody:
    """A checked chat request.

    Args:
        values: The body.
        takes_tools: A parser of tool calls is configured.

    Raises:
        BadRequestError: Naming the field that is wrong.
    """
    body = _convert(values, ChatBody)
    if not body.messages:
        raise BadRequestError("messages must not be empty", param="messages")
    if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
        raise BadRequestError("max_completion_tokens must be at least 1", param="max_completion_tokens")
    if not takes_tools:
        for name, wanted in (("tools", body.tools), ("tool_choice", body.tool_choice not in (None, "none"))):
            if wanted:
                why = "tool calls need model.tool_call_parser in the router's configuration"
                raise BadRequestError(why, param=name)
    if body.modalities not in (None, ["text"]):
        raise BadRequestError("only text output is supported", param="modalities")
    if body.echo:
        raise BadRequestError("echo is only supported by /v1/completions", param="echo")
    if body.top_logprobs is not None:
        if not 0 <= body.top_logprobs <= _TOP_LOGPROBS_MAX:
            raise BadRequestError(f"top_logprobs must be 0 to {_TOP_LOGPROBS_MAX}", param="top_logprobs")
        if body.top_logprobs and not body.logprobs:
            raise BadRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    _check_common(values, body)
    return body


def read_completion(values: dict[str, Any]) -> CompletionBody:
    """A checked completion request.

    Raises:
        BadRequestError: Naming the field that is wrong.
    """
    body = _convert(values, CompletionBody)
    if body.prompt is None or body.prompt in ("", []):
        raise BadRequestError("prompt must not be empty", param="prompt")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadRequestError("best_of other than n is not supported", param="best_of")
    if body.logprobs is not None and body.logprobs < 0:
        raise BadRequestError("logprobs must not be negative", param="logprobs")
    if body.echo and body.logprobs is not None:
        raise BadRequestError(
            "echo together with logprobs is not supported; use prompt_logprobs", param="echo"
        )
    _check_common(values, body)
    return body


def forwarded(values: dict[str, Any], model: str) -> dict[str, Any]:
    """The body the engine renders: what the client sent, less what the router does itself."""
    return {**{k: v for k, v in values.items() if k not in _NOT_FORWARDED}, "model": model}


def _check_common(values: dict[str, Any], body: ChatBody | CompletionBody) -> None:
    for name, why in UNSUPPORTED.items():
        if values.get(name):
            raise BadRequestError(why, param=name)
    smuggled = {"kv_transfer_params", "ec_transfer_params", carried.KEY} & set(body.vllm_xargs or ())
    if smuggled:
        why = f"{min(smuggled)} belongs to the router and must not be sent by clients"
        raise BadRequestError(why, param="vllm_xargs")
    if body.max_tokens is not None and body.max_tokens < 1:
        raise BadRequestError(f"max_tokens must be at least 1, got {body.max_tokens}", param="max_tokens")
    if body.n is not None and not 1 <= body.n <= MAX_CHOICES:
        raise BadRequestError(f"n must be 1 to {MAX_CHOICES}", param="n")
    if body.stream_options is not None and not body.stream:
        raise BadRequestError("stream_options needs stream to be true", param="stream_options")
    if any(not stop for stop in stops(body)):
        raise BadRequestError("stop must not contain an empty string", param="stop")


def stops(body: ChatBody | CompletionBody) -> tuple[str, ...]:
    """The stop strings."""
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def _convert(values: dict[str, Any], cls: type[B]) -> B:
    try:
        return msgspec.convert(values, cls)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        param = path.rstrip("`").removeprefix("$").lstrip(".") or None
        if "unknown field" in message or "missing required field" in message:
            param = message.split("`")[1]
        raise BadRequestError(f"{param}: {message}" if param else message, param=param) from error
