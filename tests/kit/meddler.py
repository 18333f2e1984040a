"""A TCP relay between two agents that can do what lines do: cut, hold, refuse, change bytes."""

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable

Tamper = Callable[[int, int, bytes], bytes]
"""(connection index, bytes relayed on it so far towards the target, data) -> data."""


class Meddler:
    """Listens on a port of its own; agents dial it in place of ``target``."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.tamper: Tamper | None = None
        self.refuse: Callable[[int], bool] = lambda _index: False
        self.num_accepted = 0
        self.num_answered = 0
        """Connections that a byte has come back on."""
        self.num_forward_bytes = 0
        self._lost_below = 0
        self._open = threading.Event()
        self._open.set()
        self._answers_open = threading.Event()
        self._answers_open.set()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def hold(self) -> None:
        """Bytes arrive, and nothing is passed on."""
        self._open.clear()

    def hold_answers(self) -> None:
        """As ``hold``, but only for what comes back."""
        self._answers_open.clear()

    def let_go(self) -> None:
        self._open.set()
        self._answers_open.set()

    def forget_connections(self) -> None:
        """What connections of now send is lost from now on, without a word; new ones work."""
        self._lost_below = self.num_accepted

    def cut(self) -> None:
        """All connections are reset; new ones can be made."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def reset_one(self, rng: random.Random) -> None:
        """One connection is reset, as by a firewall."""
        with self._lock:
            sock = rng.choice(self._sockets) if self._sockets else None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.let_go()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def _spawn(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            index = self.num_accepted
            self.num_accepted += 1
            if self.refuse(index):
                near.close()
                continue
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._sockets = [sock for sock in self._sockets if sock.fileno() >= 0] + [near, far]
            self._spawn(self._relay, near, far, index, "forward")
            self._spawn(self._relay, far, near, index, "back")

    def _relay(self, source: socket.socket, sink: socket.socket, index: int, direction: str) -> None:
        num_bytes = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if direction == "back" and not num_bytes:
                    self.num_answered += 1
                self._open.wait()
                if direction == "back":
                    self._answers_open.wait()
                if index < self._lost_below:
                    continue
                if direction == "forward":
                    if self.tamper is not None:
                        data = self.tamper(index, num_bytes, data)
                    self.num_forward_bytes += len(data)
                num_bytes += len(data)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        # Each socket is closed by the relay that reads it, when no call is on it any more.
        source.close()
