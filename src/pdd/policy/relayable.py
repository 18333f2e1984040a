"""Whether a request's state survives being continued by another engine from token IDs alone.

What does not survive is served by MD alone, from the first token on: P only computes the prompt's KV.
Otherwise a grammar would start in the middle of its sentence. Penalties and seeds go on exactly where all
engines run the same logits processors of PDD.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayDecision:
    """Whether a relay is possible.

    Args:
        reason: What forbids it, or None if the request can be relayed.
        whole_on_main: Even P's first token would differ; every token has to come from one engine.
    """

    reason: str | None
    whole_on_main: bool

    @property
    def relayable(self) -> bool:
        """Whether another engine may continue the answer."""
        return self.reason is None


RELAYABLE = RelayDecision(reason=None, whole_on_main=False)


def decide_relayable(
    sampling_params: Mapping[str, object],
    *,
    multimodal: bool = False,
    echo: bool = False,
    multi_token_bad_words: bool = False,
    sampler_state_carried: bool = True,
) -> RelayDecision:
    """What the sampling parameters of a rendered request allow.

    Args:
        sampling_params: As vLLM renders them; absent keys have vLLM's defaults.
        multimodal: The prompt holds images, audio or video.
        echo: The prompt is to be repeated in the answer.
        multi_token_bad_words: A bad word has several tokens, so it may straddle the handoff.
        sampler_state_carried: All engines continue penalties and seeds of one another.
    """
    stateful = _state_of_sampler(sampling_params, multi_token_bad_words, sampler_state_carried)
    if stateful is not None:
        return RelayDecision(reason=stateful, whole_on_main=True)
    if multimodal:
        return RelayDecision(reason="multimodal", whole_on_main=False)
    if sampling_params.get("prompt_logprobs") is not None:
        return RelayDecision(reason="prompt_logprobs", whole_on_main=False)
    if echo:
        return RelayDecision(reason="echo", whole_on_main=False)
    return RELAYABLE


def _state_of_sampler(params: Mapping[str, object], multi_token_bad_words: bool, carried: bool) -> str | None:
    """The first part of the sampler's state that token IDs alone do not carry."""
    if params.get("structured_outputs") is not None:
        return "structured_output"
    if multi_token_bad_words:
        return "bad_words"
    if not carried:
        for name in ("presence_penalty", "frequency_penalty"):
            if params.get(name):
                return name
        if params.get("seed") is not None and not _greedy(params):
            return "seed"
    for name in ("thinking_token_budget", "repetition_detection"):
        if params.get(name) is not None:
            return name
    return None


def _greedy(params: Mapping[str, object]) -> bool:
    """At temperature 0 nothing is drawn, so a seed changes nothing."""
    return params.get("temperature") == 0
