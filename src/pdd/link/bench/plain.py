"""What ordinary TCP sockets reach: one stream, or several that share the bytes evenly.

``python -m pdd.link.bench.plain LISTENER_FD`` is the receiving program: on each connection it reads a length
and so many bytes, answers with one byte, and starts again.
"""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Final, Self

from pdd.link.bench.place import Place, cpu_s

BLOCK_BYTES: Final = 2**20


class PlainStreams:
    """Warm connections from side a to a receiver at side b; usable as a context.

    Args:
        place: Where the sides are.
        num: How many connections.
        congestion: Congestion control by its name in Linux; None leaves the system's.
    """

    def __init__(self, place: Place, num: int, *, congestion: str | None = None) -> None:
        self._sockets: list[socket.socket] = []
        with place.listener("b") as listener:
            listener.set_inheritable(True)
            argv = [sys.executable, "-m", "pdd.link.bench.plain", str(listener.fileno())]
            self.receiver = subprocess.Popen(argv, pass_fds=[listener.fileno()])
            for _ in range(num):
                sock = place.make_socket("a")
                self._sockets.append(sock)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if congestion is not None:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
                sock.connect(listener.getsockname())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sock in self._sockets:
            sock.close()
        self.receiver.terminate()
        self.receiver.wait()

    def send(self, num_bytes: int) -> float:
        """All bytes have arrived, and the receiver's word of it is back; seconds."""
        share = num_bytes // len(self._sockets)
        start_s = time.monotonic()
        threads = [threading.Thread(target=_send, args=(sock, share)) for sock in self._sockets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - start_s

    def receiver_cpu_s(self) -> float:
        """Processor seconds the receiver has used."""
        return cpu_s(self.receiver.pid)


def _send(sock: socket.socket, num_bytes: int) -> None:
    block = memoryview(bytes(BLOCK_BYTES))
    sock.sendall(num_bytes.to_bytes(8, "little"))
    while num_bytes > 0:
        part = block[: min(num_bytes, BLOCK_BYTES)]
        sock.sendall(part)
        num_bytes -= part.nbytes
    sock.recv(1)


def _receive(sock: socket.socket) -> None:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with sock, contextlib.suppress(OSError):
        while length := sock.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(length, "little")
            while left > 0:
                num_bytes = sock.recv_into(buffer[: min(left, BLOCK_BYTES)], 0, socket.MSG_WAITALL)
                if num_bytes == 0:
                    return
                left -= num_bytes
            sock.send(b".")


def main(listener_fd: int) -> None:
    """Connections are served until the process is ended."""
    with socket.socket(fileno=listener_fd) as listener:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=_receive, args=(sock,), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
