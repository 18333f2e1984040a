"""Azure's 2023 LLM traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``; no prefix data, so nothing is ever
cached.
"""

from datetime import datetime
from pathlib import Path

from pdd.core.errors import ConfigurationError
from pdd.sim.workload.agent import read_lines
from pdd.sim.workload.stream import Workload

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def load_azure_trace(path: Path, *, rate_per_s: float | None, requests: int | None) -> Workload:
    """The trace, its clock stretched so that the mean rate is ``rate_per_s`` (None: as recorded)."""
    times: list[float] = []
    inputs: list[int] = []
    outputs: list[int] = []
    empty = 0
    for number, line in read_lines(path):
        if number == 1:
            if line.strip() != HEADER:
                raise ConfigurationError(f"{path}, line 1: expected the header {HEADER}")
            continue
        if requests and len(times) >= requests:
            break
        if line.strip():
            at, tokens_in, tokens_out = _row(line, path, number)
            if tokens_in < 1 or tokens_out < 1:
                empty += 1
                continue
            times.append(at)
            inputs.append(tokens_in)
            outputs.append(tokens_out)
    if not times:
        raise ConfigurationError(f"trace {path} is empty; expected rows below the header")
    start = times[0]
    span = times[-1] - start
    stretch = (len(times) - 1) / span / rate_per_s if rate_per_s and span else 1.0
    work = Workload(
        name=path.name,
        block_tokens=64,
        arrival_s=[(at - start) * stretch for at in times],
        input_tokens=inputs,
        output_tokens=outputs,
        parent=[-1] * len(times),
        shared_blocks=[0] * len(times),
        keeps_output=[False] * len(times),
        dropped=[f"{empty} requests without input or output"] if empty else [],
    )
    work.check(str(path))
    return work


def _row(line: str, path: Path, number: int) -> tuple[float, int, int]:
    try:
        stamp, tokens_in, tokens_out = line.strip().split(",")
        # The source writes seven digits of a second; datetime reads six.
        return datetime.fromisoformat(stamp[:26] + "+00:00").timestamp(), int(tokens_in), int(tokens_out)
    except ValueError:
        raise ConfigurationError(f"{path}, line {number}: expected {HEADER}, got {line.strip()!r}") from None
