"""NIXL over TCP between the two sides of a place; absent where it is not installed."""

import json
import os
import subprocess
import sys
from types import TracebackType
from typing import IO, Any, Final, Self

from pdd.link.bench.place import Place
from pdd.link.packet.namespaces import SITE_DEVICE

_ENVIRONMENT: Final = {"UCX_TLS": "tcp,self", "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}


class NixlMissingError(Exception):
    """NIXL cannot be measured; the message says why."""


class NixlPair:
    """Two NIXL agents over UCX's TCP; usable as a context.

    Raises:
        NixlMissingError: If it is not installed, or does not start.
    """

    def __init__(self, place: Place, *, max_bytes: int) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        environment = {**os.environ, **_ENVIRONMENT}
        if place.line is not None:
            environment["UCX_NET_DEVICES"] = SITE_DEVICE
        try:
            ends = []
            for side, role in (("b", "target"), ("a", "initiator")):
                argv = [sys.executable, "-m", "pdd.link.bench.nixl_program", role, str(max_bytes)]
                process = subprocess.Popen(
                    place.command(side, argv, own_sysfs=place.line is not None),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
                self._processes.append(process)
                ends.append(_read(process))
            self._tell(json.dumps(ends[0]))
        except NixlMissingError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, num_bytes: int) -> float:
        """The bytes are in the other side's memory; seconds.

        Raises:
            NixlMissingError: If it failed.
        """
        self._tell(str(num_bytes))
        return float(_read(self._processes[1])["elapsed_s"])

    def close(self) -> None:
        """Both agents are gone."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

    def _tell(self, text: str) -> None:
        pipe = _pipe(self._processes[1].stdin)
        pipe.write(text + "\n")
        pipe.flush()


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    for row in _pipe(process.stdout):
        if row.startswith("{"):  # NIXL may greet first
            answer: dict[str, Any] = json.loads(row)
            return answer
    said = _pipe(process.stderr).read().strip().splitlines()
    raise NixlMissingError(said[-1] if said else "the program ended without a word")


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
