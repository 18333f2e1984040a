"""One answer to compute: the rendered prompt, its sampling parameters, and the bodies engines get for it."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdd.core.errors import RemoteProtocolError
from pdd.policy.outlier import LAST_PRIORITY
from pdd.router.detokenize import TextOptions
from pdd.router.request.events import TokenId
from pdd.wire.carried import carry

VLLM_DEFAULT_MAX_TOKENS = 16
"""Rendered parameters leave out what has vLLM's default."""
_ROUTER_OWNED = (
    "stop",
    "include_stop_str_in_output",
    "output_kind",
    "output_text_buffer_length",
    "stream_interval",
)
"""The router sees the whole text, so these are its business; engines must not act on their part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A client's prompt as the engine rendered it.

    Args:
        token_ids: The prompt; packed, since a list of numbers takes nine times as much for as long as its
            stream.
        sampling_params: vLLM's parameters, as plain JSON values without defaults.
        carried: Other fields every engine needs: model, cache_salt, priority, features.
    """

    token_ids: Sequence[int]
    sampling_params: dict[str, Any]
    carried: dict[str, Any]

    @property
    def max_tokens(self) -> int:
        """Most tokens of the answer."""
        return int(self.sampling_params.get("max_tokens", VLLM_DEFAULT_MAX_TOKENS))

    @property
    def tenant(self) -> str:
        """Whose prompt it is, as far as the caches are told apart."""
        return str(self.carried.get("cache_salt") or "")

    @property
    def multimodal(self) -> bool:
        """Whether the prompt holds more than text."""
        return bool(self.carried.get("features"))


class _Rendering(msgspec.Struct):
    """What is read of an answer to a render request; the type of a struct is looked at once."""

    token_ids: list[TokenId]
    sampling_params: dict[str, Any]


def read_rendered(body: Mapping[str, Any]) -> Rendered:
    """The rendering out of an engine's answer to a render request.

    Raises:
        RemoteProtocolError: If it is none.
    """
    try:
        rendering = msgspec.convert(body, _Rendering)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError(f"an engine's rendering is not of the schema: {error!r}") from error
    carried = (
        "model",
        "cache_salt",
        "priority",
        "features",
        # Where a grammar begins, if the engine parses reasoning.
        "reasoning_ended",
        "reasoning_parser_kwargs",
    )
    params = {key: value for key, value in rendering.sampling_params.items() if key not in _ROUTER_OWNED}
    if isinstance(outputs := params.get("structured_outputs"), dict):
        # Private fields of the engine's own dataclass; it does not take them back.
        params["structured_outputs"] = {k: v for k, v in outputs.items() if not k.startswith("_")}
    return Rendered(
        token_ids=array("i", rendering.token_ids),
        sampling_params=params,
        carried={key: body[key] for key in carried if body.get(key) is not None},
    )


def transfer_id(prefix: str, attempt: int) -> str:
    """The id of an attempt's KV transfer."""
    return f"{prefix}-{attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One answer to compute.

    Args:
        request_id: The client's id of the request, found in every log.
        transfer_prefix: Unique over all requests of this router, and safe in a URL.
        rendered: The prompt and its parameters.
        text: The client's wishes about the text.
        max_tokens: Most tokens of the answer, within every engine's limit.
        timeout_s: Deadline, from the arrival of the request.
    """

    request_id: str
    transfer_prefix: str
    rendered: Rendered
    text: TextOptions
    max_tokens: int
    timeout_s: float = 600.0
    headers: Mapping[str, str] = field(default_factory=dict)

    def transfer_id(self, attempt: int) -> str:
        """The id of an attempt's KV transfer."""
        return transfer_id(self.transfer_prefix, attempt)

    def engine_headers(self, leg: int) -> dict[str, str]:
        """Headers that make the request findable in the engine's log, and unique in the engine."""
        return {**self.headers, "X-Request-Id": self.hop_id(leg)}

    def hop_id(self, leg: int) -> str:
        """The id of one engine request; it begins with the client's."""
        return f"{self.request_id}-{self.transfer_prefix[-8:]}-{leg}"

    def prefill_body(
        self,
        leg: int,
        sent: list[int],
        *,
        transfer: str | None,
        targets: tuple[str, ...],
        whole_on_main: bool,
        held: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """P's request: one token after ``sent``, and the order to push the prompt's KV to ``targets``."""
        params = self._params(len(sent), max_tokens=1)
        if whole_on_main:
            # Its token is dropped, so nothing that only shapes the choice of tokens is worth P's time.
            kept = ("prompt_logprobs", "max_tokens", "n", "detokenize")
            params = {key: params[key] for key in kept if key in params} | {"temperature": 0.0}
        if sent:
            params.pop("prompt_logprobs", None)
        body = self._body(leg, sent, params)
        if targets:
            order: dict[str, Any] = {
                "transfer": transfer,
                "targets": list(targets),
                "prompt_tokens": len(self.rendered.token_ids) + len(sent),
            }
            if len(targets) == 1:
                order["unmasked"] = True  # no relay decodes meanwhile: the client waits for this transfer
            if held:
                order |= {"hold": True, "priority": LAST_PRIORITY}
            body["kv_transfer_params"] = {"pdd": order}
        return body

    def decode_body(self, leg: int, sent: list[int]) -> dict[str, Any]:
        """A request that streams the answer from after ``sent`` on; it carries no KV parameters at all."""
        params = self._params(len(sent), max_tokens=self.max_tokens - len(sent))
        params.pop("prompt_logprobs", None)
        return {**self._body(leg, sent, params), "stream": True, "stream_options": {"include_usage": True}}

    def round_body(self, leg: int, sent: list[int]) -> dict[str, Any]:
        """A catch-up round: MD computes the KV of ``sent``, its one token is dropped."""
        return self._body(leg, sent, {"max_tokens": 1, "temperature": 0.0, "n": 1, "detokenize": False})

    def _params(self, num_sent: int, *, max_tokens: int) -> dict[str, Any]:
        params = dict(self.rendered.sampling_params)
        min_tokens = max(0, int(params.pop("min_tokens", 0)) - num_sent)
        if min_tokens:
            params["min_tokens"] = min(min_tokens, max_tokens)
        params = carry(params, prompt_tokens=len(self.rendered.token_ids), sent_tokens=num_sent)
        return {**params, "max_tokens": max_tokens, "n": 1, "detokenize": False}

    def _body(self, leg: int, sent: list[int], params: dict[str, Any]) -> dict[str, Any]:
        return {
            **self.rendered.carried,
            "request_id": self.hop_id(leg),
            "token_ids": [*self.rendered.token_ids, *sent],
            "sampling_params": params,
            "stream": False,
        }
