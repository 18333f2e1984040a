"""The demo's results: a table for people, JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from pdd.core.units import format_bytes

JSON_FIELDS = (
    "id",
    "pipeline",
    "reason",
    "prompt_tokens",
    "output_tokens",
    "ttft_s",
    "second_token_s",
    "eager_tokens",
    "handoff_mode",
    "handoff_rounds",
    "stall_s",
    "max_itl_s",
    "wan_bytes",
    "wan_bytes_without_drc",
    "md_cached_tokens",
    "md_recomputed_tokens",
    "equal_to_reference",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One request: what it was called, how it ended, the router's record of it, and the comparison."""

    label: str
    error: str | None
    record: dict[str, Any]
    equal_to_reference: bool | None

    @property
    def ended_well(self) -> bool:
        """It was answered in full, and as the reference answers if that was asked."""
        complete = self.error is None and self.record.get("outcome") == "complete"
        return complete and self.equal_to_reference is not False


def table(results: Sequence[Result]) -> Table:
    """One row a request; times are seconds from the request's arrival."""
    shown = Table(title="What each request took (seconds from its arrival)", title_justify="left")
    for heading in ("request", "pipeline", "why"):
        shown.add_column(heading)
    for heading in (
        "prompt",
        "output",
        "first token",
        "second token",
        "WAN landed",
        "eager tokens",
        "handoff",
        "stall",
        "over the WAN",
        "without DRC",
    ):
        shown.add_column(heading, justify="right")
    if any(result.equal_to_reference is not None for result in results):
        shown.add_column("= reference")
    for result in results:
        shown.add_row(*_row(result, with_reference=len(shown.columns) > 13))
    return shown


def _row(result: Result, *, with_reference: bool) -> list[str]:
    record = result.record
    if result.error is not None:
        return [result.label, "[red]failed[/]", result.error]
    mode, rounds = record.get("handoff_mode"), record.get("handoff_rounds") or 0
    cells = [
        result.label,
        str(record.get("pipeline") or "-"),
        str(record.get("reason") or "-"),
        str(record.get("prompt_tokens")),
        str(record.get("output_tokens")),
        _seconds(record.get("ttft_s")),
        _seconds(record.get("second_token_s")),
        _seconds(record.get("wan_landed_s")),
        str(record.get("eager_tokens") or 0),
        f"{mode} ({rounds})" if mode else "-",
        _seconds(record.get("stall_s")),
        format_bytes(record.get("wan_bytes") or 0),
        format_bytes(record.get("wan_bytes_without_drc") or 0),
    ]
    if with_reference:
        cells.append({True: "yes", False: "[red]no[/]", None: "-"}[result.equal_to_reference])
    return cells


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def summary(results: Sequence[Result], *, elapsed_s: float) -> dict[str, Any]:
    """Totals over all requests.

    ``num_second_token_before_landed`` counts the requests whose user had the second token before the whole
    prompt's KV was at the other site: what the relay is for.
    """
    records = [result.record for result in results]
    wan_bytes = sum(record.get("wan_bytes") or 0 for record in records)
    without_drc = sum(record.get("wan_bytes_without_drc") or 0 for record in records)
    compared = [r.equal_to_reference for r in results if r.equal_to_reference is not None]
    return {
        "num_requests": len(results),
        "num_ended_well": sum(result.ended_well for result in results),
        "num_relayed": sum(record.get("pipeline") == "p-rld-md" for record in records),
        "num_second_token_before_landed": sum(map(_second_before_landed, records)),
        "wan_bytes": wan_bytes,
        "wan_bytes_without_drc": without_drc,
        "wan_bytes_ratio": wan_bytes / without_drc if without_drc else None,
        "equal_to_reference": all(compared) if compared else None,
        "elapsed_s": round(elapsed_s, 3),
    }


def _second_before_landed(record: dict[str, Any]) -> bool:
    second_s, landed_s = record.get("second_token_s"), record.get("wan_landed_s")
    return second_s is not None and landed_s is not None and second_s < landed_s


def summary_line(values: dict[str, Any]) -> str:
    """The summary in one sentence."""
    text = (
        f"{values['num_ended_well']} of {values['num_requests']} requests ended well, "
        f"{values['num_relayed']} of them relayed; {format_bytes(values['wan_bytes'])} crossed the WAN"
    )
    if values["wan_bytes_without_drc"]:
        text += f", {format_bytes(values['wan_bytes_without_drc'])} would have without the decode-side cache"
    if values["equal_to_reference"] is not None:
        same = "equal to" if values["equal_to_reference"] else "NOT all equal to"
        text += f"; answers are {same} those of a plain engine"
    return text + "."


def write_json(path: Path, results: Sequence[Result], values: dict[str, Any]) -> None:
    """The file holds ``requests``, one object each, and ``summary``."""
    requests = [
        {**{name: r.record.get(name) for name in JSON_FIELDS}, "equal_to_reference": r.equal_to_reference}
        for r in results
    ]
    path.write_text(json.dumps({"requests": requests, "summary": values}, indent=2) + "\n", encoding="utf-8")
