"""Agent traces in the parent/shared encoding: one JSON object a line, gzip or plain.

Owns that format: ``ts, input_length, output_length, parent, shared`` and, for sessions, ``sess``; blocks of
64 tokens.
"""

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdd.core.errors import ConfigurationError
from pdd.sim.workload.stream import Workload

BLOCK_TOKENS = 64
SERVICE_BASE_S, SERVICE_TOKENS_PER_S = 1.0, 50.0
"""Service assumed where a trace records none, as in the synthetic generator."""


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file, gzip if its name ends in ``.gz``.

    Raises:
        ConfigurationError: If the file cannot be read to its end.
    """
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as file
        ):
            yield from enumerate(file, start=1)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read trace {path}: {error}") from error


def read_json_rows(path: Path, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file, each holding at least ``keys`` as numbers or lists.

    Raises:
        ConfigurationError: Naming file, line and what was expected.
    """
    rows: list[dict[str, Any]] = []
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise ConfigurationError(
                f"{path}, line {number}: expected one JSON object, found a cut or broken line"
            ) from None
        missing = [key for key in keys if key not in row] if isinstance(row, dict) else list(keys)
        if missing:
            raise ConfigurationError(
                f"{path}, line {number}: key {missing[0]!r} is missing; expected {', '.join(keys)}"
            )
        rows.append(row)
    if not rows:
        raise ConfigurationError(f"trace {path} is empty; expected one JSON object a line")
    return rows


def load_agent_trace(
    path: Path, *, seed: int, rate_per_s: float | None, requests: int | None, copies: int | None = None
) -> Workload:
    """The trace, its sessions re-started so that the mean rate is ``rate_per_s``.

    Gaps inside a session are kept; only session starts move, and sessions are repeated as often as the rate
    needs. Repeated sessions share what sessions of the trace share (tools, system prompt), nothing else.

    Args:
        path: File in the encoding above.
        seed: Of the new session starts.
        rate_per_s: Wanted rate; None keeps the recorded arrivals.
        requests: Keep about so many requests, by whole sessions (rate given) or by time (rate not given).
        copies: How often each session is repeated; default: the fewest that keep the load steady.
    """
    rows = read_json_rows(path, ("ts", "input_length", "output_length", "parent", "shared"))
    total = len(rows)
    if rate_per_s is None:
        kept = rows[: requests or total]
        dropped = (
            [f"{total - len(kept)} of {total} requests after the first {len(kept)}"]
            if len(kept) < total
            else []
        )
        links = [(int(row["parent"]), int(row["shared"])) for row in kept]
        return _workload(path.name, kept, [float(row["ts"]) for row in kept], [0] * len(kept), links, dropped)
    return _restarted(path, rows, seed=seed, rate_per_s=rate_per_s, requests=requests, copies=copies)


def _restarted(
    path: Path,
    rows: list[dict[str, Any]],
    *,
    seed: int,
    rate_per_s: float,
    requests: int | None,
    copies: int | None,
) -> Workload:
    sessions: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        sessions.setdefault(int(row.get("sess", index)), []).append(index)
    wanted = requests or len(rows)
    mean_length = len(rows) / len(sessions)
    span_s = wanted / rate_per_s
    # Sessions already running when the window opens: starts are spread over the longest session before it
    # as well.
    longest_s = max(
        float(rows[members[-1]]["ts"]) - float(rows[members[0]]["ts"]) for members in sessions.values()
    )
    starts = max(1, round(rate_per_s / mean_length * (span_s + longest_s)))
    rounds = copies or -(-starts // len(sessions))
    picker = random.Random(seed)
    order = [(copy, key) for copy in range(rounds) for key in sessions]
    picker.shuffle(order)
    picked = order[:starts]
    timed: list[tuple[float, int, int]] = []
    for number, (_, key) in enumerate(picked):
        begin = picker.uniform(-longest_s, span_s)
        first = float(rows[sessions[key][0]]["ts"])
        timed += [(begin + float(rows[index]["ts"]) - first, number, index) for index in sessions[key]]
    inside = sorted(item for item in timed if 0 <= item[0] < span_s)
    return _relink(
        path.name,
        rows,
        inside,
        [f"{len(timed) - len(inside)} requests of sessions that reach outside the window"],
    )


def _relink(
    name: str, rows: list[dict[str, Any]], timed: list[tuple[float, int, int]], dropped: list[str]
) -> Workload:
    """Maps parents to the new rows: inside a session to its own copy, else to the latest copy of the same
    content.
    """
    new_row: dict[tuple[int, int], int] = {}
    latest: dict[int, int] = {}
    kept, parents, shared_of = [], [], []
    warm: dict[int, int] = {}
    for row, (_, number, index) in enumerate(timed):
        source = rows[index]
        parent, shared = int(source["parent"]), int(source["shared"])
        found = -1
        while parent >= 0 and shared > 0:
            same_session = rows[parent].get("sess") == source.get("sess")
            found = new_row.get((number, parent), -1) if same_session else latest.get(parent, -1)
            if found >= 0:
                break
            # The parent fell outside the window: what it shares with its own parent may still be there.
            parent, shared = int(rows[parent]["parent"]), min(shared, int(rows[parent]["shared"]))
        kept.append(source)
        parents.append(found)
        shared_of.append(shared if found >= 0 else 0)
        original = int(source["parent"])
        if (
            original >= 0
            and rows[original].get("sess") == source.get("sess")
            and (number, original) not in new_row
        ):
            warm[row] = int(source["shared"])
        new_row[number, index] = row
        latest[index] = row
    links = list(zip(parents, shared_of, strict=True))
    work = _workload(name, kept, [item[0] for item in timed], [item[1] for item in timed], links, dropped)
    work.warm_blocks = warm
    return work


def _workload(
    name: str,
    rows: list[dict[str, Any]],
    arrivals: list[float],
    copies: list[int],
    links: list[tuple[int, int]],
    dropped: list[str],
) -> Workload:
    """Columns of rows in order of arrival; ``links`` are parent row and shared blocks in that order."""
    parents, shared = [link[0] for link in links], [link[1] for link in links]
    inputs = [max(1, int(row["input_length"])) for row in rows]
    after, gaps = _threads(rows, arrivals, copies)
    work = Workload(
        name=name,
        block_tokens=BLOCK_TOKENS,
        arrival_s=arrivals,
        input_tokens=inputs,
        output_tokens=[max(1, int(row["output_length"])) for row in rows],
        parent=parents,
        shared_blocks=shared,
        keeps_output=_keeps_output(rows, parents, shared, inputs),
        after=after,
        gap_s=gaps,
        dropped=dropped,
    )
    work.check(name)
    return work


def _threads(
    rows: list[dict[str, Any]], arrivals: list[float], copies: list[int]
) -> tuple[list[int], list[float]]:
    """For each row the one before it in the same thread of the same session, and the time between answer
    and request.

    A thread whose recorded requests overlap does not wait for its predecessor.
    """
    last: dict[tuple[int, Any, Any], int] = {}
    after, gaps = [], []
    for index, row in enumerate(rows):
        if "sess" not in row:
            after.append(-1)
            gaps.append(0.0)
            continue
        key = (copies[index], row["sess"], row.get("agent", ""))
        before = last.get(key, -1)
        last[key] = index
        gap = -1.0
        if before >= 0:
            output = int(rows[before]["output_length"])
            service_s = float(rows[before].get("api_time") or SERVICE_BASE_S + output / SERVICE_TOKENS_PER_S)
            gap = arrivals[index] - arrivals[before] - service_s
        # The recorded times have a resolution of 1 s.
        after.append(before if gap >= -1.0 else -1)
        gaps.append(max(gap, 0.0))
    return after, gaps


def _keeps_output(
    rows: list[dict[str, Any]], parents: list[int], shared: list[int], inputs: list[int]
) -> list[bool]:
    """A follow-up that keeps its whole predecessor also keeps its answer, unless hidden thinking ended the
    turn.
    """
    result = []
    for parent, blocks in zip(parents, shared, strict=True):
        if parent < 0:
            result.append(False)
            continue
        before = rows[parent]
        hidden = before.get("stop") == "end_turn" and "thinking" in before.get("output_types", ())
        result.append(blocks >= inputs[parent] // BLOCK_TOKENS and not hidden)
    return result
