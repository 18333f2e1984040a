"""Every policy by name, with the types of what it is asked: recorded decisions can be made again.

The router writes down name, arguments and decision; whoever reads them asks the same function again and
must get the same answer. That is what lets a simulator stand for the router.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pdd.policy.admission import EntryInput, decide_admission, decide_entry
from pdd.policy.handoff import HandoffParams, Mode, decide_handoff
from pdd.policy.outlier import OutlierInput, decide_outlier
from pdd.policy.pipeline import PipelineInput, decide_pipeline
from pdd.policy.placement import place
from pdd.policy.snapshot import EngineView


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A pure function and the types of its arguments."""

    decide: Callable[..., Any]
    arguments: Mapping[str, Any]


POLICIES: Mapping[str, Policy] = {
    "entry": Policy(decide=decide_entry, arguments={"facts": EntryInput}),
    "placement": Policy(
        decide=place,
        arguments={"engines": list[EngineView], "prompt_tokens": int, "affinity_weight_ratio": float},
    ),
    "admission": Policy(decide=decide_admission, arguments={"prefills": int, "relays": int, "mains": int}),
    "pipeline": Policy(decide=decide_pipeline, arguments={"facts": PipelineInput}),
    "outlier": Policy(decide=decide_outlier, arguments={"facts": OutlierInput}),
    "handoff": Policy(
        decide=decide_handoff,
        arguments={
            "gap_tokens": int,
            "relay_load_ratio": float,
            "previous": Mode,
            "params": HandoffParams,
        },
    ),
}


def plain(value: Any) -> Any:
    """Arguments or a decision as JSON values; JSON has no infinity, so it is a word."""
    return _worded(msgspec.to_builtins(value))


def _worded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _worded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_worded(item) for item in value]
    return "inf" if value == float("inf") else value


def decide_again(policy: str, arguments: Mapping[str, Any]) -> Any:
    """What the policy says to recorded arguments now, as JSON values.

    Raises:
        KeyError: If there is no such policy, or an argument is missing.
        msgspec.ValidationError: If an argument is not of its type.
    """
    known = POLICIES[policy]
    typed = {
        name: msgspec.convert(arguments[name], kind, strict=False) for name, kind in known.arguments.items()
    }
    return plain(known.decide(**typed))
