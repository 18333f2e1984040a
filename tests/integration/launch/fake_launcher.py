"""A launcher of two fake programs, run by the tests as a process of its own so that it can be killed.

Usage: fake_launcher.py DIR PORT PORT [--grace S] [fake_program.py's flags for both]

It says "up" once they are ready, and "stopping" for each that it begins to stop.
"""

import argparse
import asyncio
import pathlib
import sys

from pdd.launch.program import PortUse, Program
from pdd.launch.supervisor import Progress, Supervisor, run_supervised

FAKE = pathlib.Path(__file__).with_name("fake_program.py")


def fake(folder: pathlib.Path, port: int, grace_s: float, *flags: str) -> Program:
    file = folder / f"remains-{port}"
    return Program(
        name=f"fake-{port}",
        argv=(sys.executable, str(FAKE), str(port), "--file", str(file), *flags),
        ready_url=f"http://127.0.0.1:{port}/health",
        ports=(PortUse(host="127.0.0.1", port=port, key="test.port"),),
        files=(file,),
        grace_s=grace_s,
    )


def tell(progress: Progress) -> None:
    if progress.state == "stopping":
        print("stopping", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("ports", type=int, nargs=2)
    parser.add_argument("--grace", type=float, default=10.0)
    given, flags = parser.parse_known_args()

    async def run(supervisor: Supervisor) -> int:
        programs = [fake(given.folder, port, given.grace, *flags) for port in given.ports]
        await asyncio.gather(*map(supervisor.start, programs))
        supervisor.serving = True
        print("up", flush=True)
        await asyncio.Event().wait()
        return 0

    return run_supervised(run, log_dir=given.folder / "logs", on_progress=tell)


if __name__ == "__main__":
    sys.exit(main())
