"""A small stand-in for an engine: serves /health, has a child of its own, leaves a file behind.

Usage: fake_program.py PORT [--file F] [--stubborn] [--die-after S] [--die-at F] [--never-ready]
    [--detached-child] [--shared-memory]
"""

import argparse
import http.server
import multiprocessing.shared_memory
import pathlib
import signal
import subprocess
import sys
import threading
import time


class Handler(http.server.BaseHTTPRequestHandler):
    ready = True

    def do_GET(self) -> None:
        self.send_response(200 if self.ready else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--file", type=pathlib.Path)
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--detached-child", action="store_true")
    parser.add_argument("--die-after", type=float)
    parser.add_argument("--die-at", type=pathlib.Path, help="as soon as there is such a file")
    parser.add_argument("--shared-memory", action="store_true")
    arguments = parser.parse_args()
    if arguments.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if arguments.file:
        if arguments.file.exists():
            sys.exit(f"{arguments.file} is there already")
        arguments.file.write_text("left behind")
    subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=arguments.detached_child
    )
    shared = (
        multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
        if arguments.shared_memory
        else None
    )
    if shared and arguments.file:
        arguments.file.with_suffix(".shm").write_text(shared.name)
    for number in range(40):
        print(f"line {number}", flush=True)
    if arguments.die_after is not None or arguments.die_at is not None:
        threading.Thread(target=die, args=(arguments.die_after, arguments.die_at), daemon=True).start()
    Handler.ready = not arguments.never_ready
    http.server.HTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


def die(after_s: float | None, at: pathlib.Path | None) -> None:
    time.sleep(after_s or 0.0)
    while at is not None and not at.exists():
        time.sleep(0.02)
    print("boom: out of tokens", flush=True)
    import os

    os._exit(3)


if __name__ == "__main__":
    main()
