"""The demo's results: a table for people, JSON for programs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
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
    "median_itl_s",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the table; those that are not needed at first sight only appear where there is room."""

    heading: str
    cell: Callable[[Result], str]
    is_text: bool = False
    needs_room: bool = False


WIDE = 130
"""Characters from which every column fits."""


def table(results: Sequence[Result], *, width: int) -> Table:
    """One row a request; times are seconds from the request's arrival."""
    with_reference = any(result.equal_to_reference is not None for result in results)
    columns = [
        column
        for column in COLUMNS
        if (width >= WIDE or not column.needs_room) and (with_reference or column is not REFERENCE)
    ]
    shown = Table(
        title="What each request took, in seconds from its arrival",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        shown.add_column(column.heading, justify="left" if column.is_text else "right", vertical="bottom")
    for result in results:
        shown.add_row(*(column.cell(result) for column in columns))
    return shown


def _value(name: str) -> Callable[[Result], str]:
    return lambda result: str(result.record.get(name, "-"))


def _time(name: str) -> Callable[[Result], str]:
    return lambda result: _seconds(result.record.get(name))


def _bytes(name: str) -> Callable[[Result], str]:
    return lambda result: format_bytes(result.record.get(name) or 0)


def _ending(result: Result) -> str:
    return "[red]failed[/]" if result.error is not None else str(result.record.get("pipeline") or "-")


def _why(result: Result) -> str:
    return result.error or str(result.record.get("reason") or "-")


def _handoff(result: Result) -> str:
    mode, rounds = result.record.get("handoff_mode"), result.record.get("handoff_rounds") or 0
    return f"{mode} {rounds}" if rounds else str(mode or "-")


def _equal(result: Result) -> str:
    return {True: "yes", False: "[red]no[/]", None: "-"}[result.equal_to_reference]


REFERENCE = Column(heading="as\nref.", cell=_equal)
COLUMNS = (
    Column(heading="request", cell=lambda result: result.label, is_text=True),
    Column(heading="pipeline", cell=_ending, is_text=True),
    Column(heading="why", cell=_why, is_text=True, needs_room=True),
    Column(heading="prompt\ntokens", cell=_value("prompt_tokens"), needs_room=True),
    Column(heading="output\ntokens", cell=_value("output_tokens"), needs_room=True),
    Column(heading="first\ntoken", cell=_time("ttft_s")),
    Column(heading="second\ntoken", cell=_time("second_token_s")),
    Column(heading="WAN\nlanded", cell=_time("wan_landed_s")),
    Column(heading="eager\ntokens", cell=_value("eager_tokens")),
    Column(heading="handoff\n(rounds)", cell=_handoff, needs_room=True),
    Column(heading="stall", cell=_time("stall_s"), needs_room=True),
    Column(heading="over\nthe WAN", cell=_bytes("wan_bytes")),
    Column(heading="without\nDRC", cell=_bytes("wan_bytes_without_drc")),
    REFERENCE,
)


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


def handoff_lines(results: Sequence[Result], *, rtt_s: float) -> list[str]:
    """What each handoff cost its client, beside the goal of catch-up: twice the usual gap and a round trip.

    One-shot may take longer: MD computes all eager tokens anew in that gap.
    """
    lines = []
    for result in results:
        stall_s, usual_s = result.record.get("stall_s"), result.record.get("median_itl_s")
        if stall_s is not None and usual_s is not None:
            lines.append(
                f"{result.label}: at the handoff ({_handoff(result)}) the client waited {stall_s:.3f} s for "
                f"a token, {usual_s:.3f} s otherwise (median); twice that and a round trip are "
                f"{2 * usual_s + rtt_s:.3f} s"
            )
    return lines


def write_json(path: Path, results: Sequence[Result], values: dict[str, Any]) -> None:
    """The file holds ``requests``, one object each, and ``summary``."""
    requests = [
        {**{name: r.record.get(name) for name in JSON_FIELDS}, "equal_to_reference": r.equal_to_reference}
        for r in results
    ]
    path.write_text(json.dumps({"requests": requests, "summary": values}, indent=2) + "\n", encoding="utf-8")
