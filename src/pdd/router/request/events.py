"""What happens to a request (events) and what is to be done about it (effects).

A *leg* is one HTTP request to an engine; it has a number that is never used twice, so that whatever
arrives late from a leg that was stopped can be told apart. An *attempt* is one run of the pipeline from
prefill on; its KV transfers carry its number.

What is made for every token is a ``msgspec.Struct``: a frozen dataclass takes four times as long to make.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from pdd.policy.handoff import CatchUp, Mode
from pdd.policy.pipeline import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why something did not work.

    Args:
        kind: Short name for logs and metrics, for example ``engine_lost``.
        message: What a person should read.
        status: HTTP status of the engine's answer, 0 if there was none.
        retryable: Another engine may do better; false for what the client got wrong.
        error_type: The engine's own error type, if it gave one.
        param: The request field complained about, if any.
    """

    kind: str
    message: str
    status: int = 0
    retryable: bool = True
    error_type: str = ""
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the policies chose, with the engines to fall back on in order.

    Args:
        pipeline: The pipeline of the first attempt.
        prefills: P engines, best first.
        relays: RLD engines, best first; empty if the request must not be relayed.
        relays_allowed: Whether engines found later may relay; false if the request must not be relayed.
        mains: MD engines, best first.
        max_tokens: Most tokens of the answer.
        prompt_tokens: Tokens of the prompt.
        hold_tokens: The WAN transfer is held until RLD has made so many tokens; 0 if it is not held.
        whole_on_main: Every token must come from one engine: P's token is dropped.
    """

    pipeline: Pipeline
    prefills: tuple[str, ...]
    relays: tuple[str, ...]
    mains: tuple[str, ...]
    max_tokens: int
    prompt_tokens: int
    whole_on_main: bool = False
    relays_allowed: bool = True
    hold_tokens: int = 0

    @property
    def first_targets(self) -> tuple[str, ...]:
        """The decode engines that the first attempt sends KV to."""
        if self.max_tokens <= 1:
            return ()
        relays = self.relays[:1] if self.pipeline == "p-rld-md" or not self.mains else ()
        return relays + self.mains[:1]


TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""As engines may say it; any other number would fail later, in a tokenizer that knows 32 bits."""


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One generated token as the engine reported it; ``logprobs`` is the engine's entry for it."""

    id: int
    logprobs: object = None


# ---- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The prompt is rendered and the policies have chosen."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """P computed the prompt and sampled one token."""

    leg: int
    token: Token
    finish: str | None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """The peer holds the KV of the attempt's prompt, under a lease."""

    attempt: int
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFailed:
    """The attempt's KV will not reach the peer.

    ``is_certain`` if the sending agent said so. Without news from it the transfer may still run, or begin:
    the agent that was restarted may have got the order before anyone knew that it is another process.
    """

    attempt: int
    peer: str
    reason: str
    is_certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStalled:
    """The attempt's KV does not move towards the peer now; it may yet land, or fail."""

    attempt: int
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesNow:
    """Which engines can be used at this moment, best first; replaces the plan's lists."""

    prefills: tuple[str, ...]
    relays: tuple[str, ...]
    mains: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseOver:
    """The answer has waited long enough for an engine to come back."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """A decode leg delivered tokens, in order; ``finish`` is set with its last."""

    leg: int
    tokens: tuple[Token, ...]
    finish: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDone:
    """A catch-up round is over: MD holds the KV of everything it was sent."""

    leg: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LegFailed:
    """A leg ended without finishing; it delivers nothing more."""

    leg: int
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffChosen:
    """The answer to ``ChooseHandoff``."""

    mode: Mode
    catch_up: CatchUp


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatched:
    """The text so far ends the answer: a stop string was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientGone:
    """Nobody reads the answer any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """The request's time is over."""


Event = (
    Planned
    | Prefilled
    | Landed
    | TransferFailed
    | TransferStalled
    | EnginesNow
    | PauseOver
    | Tokens
    | RoundDone
    | LegFailed
    | HandoffChosen
    | StopMatched
    | ClientGone
    | DeadlinePassed
)

# ---- effects


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPrefill:
    """Ask P for one token after the first ``position`` tokens of the answer, pushing KV to ``targets``.

    Those in ``held`` get it only after ``ResumeTransfer``.
    """

    leg: int
    attempt: int
    engine: str
    position: int
    targets: tuple[str, ...]
    held: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDecode:
    """Stream the answer from ``position`` on."""

    leg: int
    engine: str
    position: int
    role: Literal["relay", "main"]
    landed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRound:
    """Let MD compute the KV of the tokens before ``position``; its token is dropped."""

    leg: int
    engine: str
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopLeg:
    """Close the leg's HTTP request, which aborts it in the engine."""

    leg: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTransfer:
    """Tell P's agent to stop sending to the peer."""

    attempt: int
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeTransfer:
    """Tell P's agent to send what was held for the peer."""

    attempt: int
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseTransfer:
    """Tell the peer's agent that the lease of what landed may end."""

    attempt: int
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseHandoff:
    """Ask the policy how to hand over; answered by ``HandoffChosen`` at once."""

    relay: str
    gap_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """No engine is left: say in a moment which there are (``EnginesNow``), or in the end ``PauseOver``."""


class Emit(msgspec.Struct, frozen=True, kw_only=True):
    """Give the client these tokens; the first is token ``position`` of the answer."""

    position: int
    tokens: tuple[Token, ...]
    role: Literal["prefill", "relay", "main"]
    finish: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """The answer is whole."""

    finish: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The request ends with an error."""

    failure: Failure


Effect = (
    StartPrefill
    | StartDecode
    | StartRound
    | StopLeg
    | CancelTransfer
    | ResumeTransfer
    | ReleaseTransfer
    | ChooseHandoff
    | Pause
    | Emit
    | Complete
    | Fail
)
