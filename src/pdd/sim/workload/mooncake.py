"""Mooncake traces: ``timestamp`` (ms), lengths and chained ``hash_ids``, one id a block of 512 tokens."""

from pathlib import Path

from pdd.core.errors import ConfigurationError
from pdd.sim.workload.agent import read_json_rows
from pdd.sim.workload.stream import Workload

BLOCK_TOKENS = 512


def load_mooncake_trace(path: Path, *, rate_per_s: float | None, requests: int | None) -> Workload:
    """The trace, its clock stretched so that the mean rate is ``rate_per_s`` (None: as recorded).

    Equal timestamps are spread evenly up to the next one: the source advances in steps of seconds.
    """
    rows = read_json_rows(path, ("timestamp", "input_length", "output_length", "hash_ids"))
    kept = rows[: requests or len(rows)]
    last_with: dict[int, int] = {}
    parents, shared = [], []
    for index, row in enumerate(kept):
        ids = row["hash_ids"]
        if not isinstance(ids, list):
            raise ConfigurationError(f"{path}, request {index}: hash_ids must be a list")
        whole = int(row["input_length"]) // BLOCK_TOKENS
        depth = 0
        while depth < min(whole, len(ids)) and ids[depth] in last_with:
            depth += 1
        parents.append(last_with[ids[depth - 1]] if depth else -1)
        shared.append(depth)
        for block in ids[:whole]:
            last_with[block] = index
    times = _spread([float(row["timestamp"]) / 1000 for row in kept])
    stretch = 1.0
    if rate_per_s is not None and times[-1] > times[0]:
        stretch = (len(times) - 1) / (times[-1] - times[0]) / rate_per_s
    dropped = (
        [f"{len(rows) - len(kept)} of {len(rows)} requests after the first {len(kept)}"]
        if len(kept) < len(rows)
        else []
    )
    work = Workload(
        name=path.name,
        block_tokens=BLOCK_TOKENS,
        arrival_s=[at * stretch for at in times],
        input_tokens=[max(1, int(row["input_length"])) for row in kept],
        output_tokens=[max(1, int(row["output_length"])) for row in kept],
        parent=parents,
        shared_blocks=shared,
        keeps_output=[False] * len(kept),
        dropped=dropped,
    )
    work.check(str(path))
    return work


def _spread(times: list[float]) -> list[float]:
    result: list[float] = []
    index = 0
    while index < len(times):
        end = index
        while end < len(times) and times[end] == times[index]:
            end += 1
        gap = (times[end] - times[index]) if end < len(times) else 0.0
        result += [times[index] + gap * (i - index) / (end - index) for i in range(index, end)]
        index = end
    return result
