"""What a continued engine request carries of the sampler's state: written by the router, read by the engines.

An engine that goes on with an answer gets prompt and tokens so far as its prompt. Penalties and seeds have to
know which of them were the answer, so their parameters travel in the request's ``extra_args``.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

KEY: Final = "pdd"
"""Of ``SamplingParams.extra_args``; clients must not set it."""
_PENALTIES: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")


class Carried(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The state of one answer's sampler, besides its tokens.

    Args:
        prompt_tokens: Tokens of the client's prompt; those behind it are the answer so far.
        seed: The client's seed; None if it gave none, or nothing is drawn.
        presence_penalty: Taken off every token of the answer so far.
        frequency_penalty: Taken off as often as the token is in the answer.
        repetition_penalty: Divides prompt and answer tokens; carried along, since it comes before the others.
    """

    prompt_tokens: int
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def penalises(self) -> bool:
        """Whether penalties are carried."""
        return bool(self.presence_penalty or self.frequency_penalty)


def carry(params: Mapping[str, Any], *, prompt_tokens: int, sent_tokens: int) -> dict[str, Any]:
    """The sampling parameters of an engine request that starts after ``sent_tokens`` of an answer.

    Penalties are the engine's own business until there is something it would take for prompt. A seed is
    always carried, so that all engines draw the same way.
    """
    params = dict(params)
    state: dict[str, Any] = {}
    if params.get("seed") is not None and params.get("temperature") != 0:
        state["seed"] = params["seed"]
    if sent_tokens and (params.get("presence_penalty") or params.get("frequency_penalty")):
        state |= {name: params.pop(name) for name in _PENALTIES if name in params}
    if not state:
        return params
    carried = msgspec.to_builtins(Carried(prompt_tokens=prompt_tokens, **state))
    return {**params, "extra_args": {**(params.get("extra_args") or {}), KEY: carried}}


def read_carried(extra_args: Mapping[str, Any] | None) -> Carried | None:
    """What was carried; None if nothing was.

    Raises:
        ValueError: If it is not what ``carry`` writes.
    """
    if not extra_args or KEY not in extra_args:
        return None
    try:
        return msgspec.convert(extra_args[KEY], Carried)
    except msgspec.ValidationError as error:
        raise ValueError(f"extra_args.{KEY}: {error}") from error
