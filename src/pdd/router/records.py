"""What is written down about each request, and the bounded ring it is kept in."""

from collections import OrderedDict
from dataclasses import dataclass, field, fields
from typing import Any

MAX_RECORDS = 4096
"""Enough to look back over minutes of traffic; a record is under a kilobyte."""


@dataclass(slots=True, kw_only=True)
class Record:
    """One request as the client experienced it. Times are seconds from its arrival unless named otherwise.

    ``wan_bytes`` are all bytes put on the WAN for it, ``wan_bytes_without_drc`` what the whole prompt's KV
    would have been (of a cancelled transfer: what was sent until then). ``md_recomputed_tokens`` are the
    tokens whose KV MD computed instead of finding it.
    """

    id: str
    arrived_s: float
    pipeline: str | None = None
    reason: str | None = None
    reason_detail: str | None = None
    prefill: str | None = None
    relay: str | None = None
    main: str | None = None
    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_cached_tokens: int | None = None
    output_tokens: int = 0
    ttft_s: float | None = None
    second_token_s: float | None = None
    rld_landed_s: float | None = None
    wan_landed_s: float | None = None
    handoff_s: float | None = None
    finished_s: float | None = None
    eager_tokens: int = 0
    outlier: bool = False
    handoff_mode: str | None = None
    handoff_rounds: int = 0
    stall_s: float | None = None
    max_itl_s: float | None = None
    median_itl_s: float | None = None
    predicted_wan_s: float | None = None
    wan_bytes: int = 0
    wan_bytes_without_drc: int = 0
    prefill_overlap_ratio: float | None = None
    md_cached_tokens: int | None = None
    md_recomputed_tokens: int | None = None
    shortfall_tokens: int = 0
    finish_reason: str | None = None
    outcome: str | None = None
    error: str | None = None
    failures: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """All fields but the arrival on the router's own clock."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "arrived_s"}


class RecordRing:
    """The latest records, by request id; an id that comes again replaces its older record."""

    def __init__(self, *, max_records: int = MAX_RECORDS) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._max_records = max_records

    def add(self, record: Record) -> None:
        """Keep the record, dropping the oldest beyond the bound."""
        self._records.pop(record.id, None)
        self._records[record.id] = record
        while len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> Record | None:
        """The record of a request; the id of an answer (``chatcmpl-…``) is known too."""
        for prefix in ("", "chatcmpl-", "cmpl-"):
            if request_id.startswith(prefix) and (
                record := self._records.get(request_id.removeprefix(prefix))
            ):
                return record
        return None

    def all(self) -> list[Record]:
        """All records, oldest first."""
        return list(self._records.values())
