"""A launcher of two fake programs, run by the tests as a process of its own so that it can be killed.

Usage: fake_launcher.py DIR PORT PORT [fake_program.py's flags for both]
"""

import asyncio
import pathlib
import sys

from pdd.launch.program import PortUse, Program
from pdd.launch.supervisor import Supervisor, run_supervised

FAKE = pathlib.Path(__file__).with_name("fake_program.py")


def fake(folder: pathlib.Path, port: int, *flags: str) -> Program:
    file = folder / f"remains-{port}"
    return Program(
        name=f"fake-{port}",
        argv=(sys.executable, str(FAKE), str(port), "--file", str(file), *flags),
        ready_url=f"http://127.0.0.1:{port}/health",
        ports=(PortUse(host="127.0.0.1", port=port, key="test.port"),),
        files=(file,),
        grace_s=1.0 if "--stubborn" in flags else 10.0,
    )


def main() -> int:
    folder, ports, flags = pathlib.Path(sys.argv[1]), [int(text) for text in sys.argv[2:4]], sys.argv[4:]

    async def run(supervisor: Supervisor) -> int:
        await asyncio.gather(*(supervisor.start(fake(folder, port, *flags)) for port in ports))
        supervisor.serving = True
        print("up", flush=True)
        await asyncio.Event().wait()
        return 0

    return run_supervised(run, log_dir=folder / "logs")


if __name__ == "__main__":
    sys.exit(main())
