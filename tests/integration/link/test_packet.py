"""The packet emulator with the kernel's own TCP and UDP at its sites."""

import contextlib
import errno
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from pdd.core.errors import ConfigurationError
from pdd.link.packet.pipe import LineSettings
from pdd.link.packet.process import PacketLine, refusal

WHY_NOT = refusal()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no network namespaces here: {WHY_NOT}")
RATE_BYTES_PER_S = 12.5e6
DELAY_S = 0.015


@pytest.fixture
def line() -> Iterator[PacketLine]:
    with PacketLine(LineSettings(rate_bytes_per_s=RATE_BYTES_PER_S, delay_s=DELAY_S)) as line:
        yield line


@contextlib.contextmanager
def connection(line: PacketLine) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection from site a to site b."""
    with line.make_socket("b") as listener, line.make_socket("a") as near:
        listener.bind((line.address("b"), 0))
        listener.listen()
        near.settimeout(20)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        far.settimeout(20)
        with far:
            yield near, far


@contextlib.contextmanager
def datagrams(line: PacketLine) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A UDP socket at each site, each of which knows the other."""
    near, far = (line.make_socket(site, kind=socket.SOCK_DGRAM) for site in ("a", "b"))
    with near, far:
        near.bind((line.address("a"), 0))
        far.bind((line.address("b"), 0))
        near.connect(far.getsockname())
        far.connect(near.getsockname())
        near.settimeout(5)
        far.settimeout(5)
        yield near, far


def send_for_ever(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            sock.send(bytes(2**18))


def round_trips_s(line: PacketLine, num: int) -> list[float]:
    with datagrams(line) as (near, far):

        def echo() -> None:
            for _ in range(num):
                far.send(far.recv(64))

        thread = threading.Thread(target=echo, daemon=True)
        thread.start()
        trips_s = []
        for _ in range(num):
            start_s = time.perf_counter()
            near.send(b"ping")
            near.recv(64)
            trips_s.append(time.perf_counter() - start_s)
        thread.join(10)
        return trips_s


def test_the_round_trip_is_as_asked(line: PacketLine) -> None:
    trips_s = round_trips_s(line, 20)
    assert min(trips_s) >= 2 * DELAY_S
    # The best of twenty: what a busy machine adds to others is not the line's.
    assert min(trips_s) <= 2 * DELAY_S + 0.002, statistics.median(trips_s)


def test_tcp_fills_the_line_and_no_more(line: PacketLine) -> None:
    with connection(line) as (near, far):
        sender = threading.Thread(target=send_for_ever, args=(near,), daemon=True)
        sender.start()
        buffer = bytearray(2**20)
        # Slow start is over after a second.
        start_s = time.monotonic()
        while time.monotonic() - start_s < 0.7:
            far.recv_into(buffer)
        rates = []
        for _ in range(20):
            start_s, num_bytes = time.monotonic(), 0
            while num_bytes < 600_000:
                num_bytes += far.recv_into(buffer)
            rates.append(num_bytes / (time.monotonic() - start_s))
        # Of 1514 bytes of a full frame 1448 are payload. The median: a busy machine stops us now and then.
        assert statistics.median(rates) == pytest.approx(RATE_BYTES_PER_S * 1448 / 1514, rel=0.05)
        near.shutdown(socket.SHUT_RDWR)
        sender.join(10)


def test_the_asked_share_of_packets_is_lost(line: PacketLine) -> None:
    line.call("set", loss="10%")
    num = 3000

    def num_seen() -> int:
        state = line.call("state")["a_to_b"]
        return int(state["lost_segments"] + state["carried_segments"])

    with datagrams(line) as (near, far):
        far.settimeout(0.5)
        near.settimeout(None)
        arrived = 0
        is_sent = threading.Event()

        def count() -> None:
            nonlocal arrived
            is_last = False
            while not is_last:
                is_last = is_sent.is_set()
                with contextlib.suppress(TimeoutError):
                    while far.recv(64):
                        arrived += 1

        thread = threading.Thread(target=count)
        thread.start()
        num_sent = 0
        # A busy machine's receive buffers may drop some before the line sees them.
        while num_seen() < num:
            for _ in range(100):
                near.send(b"x")
            num_sent += 100
        is_sent.set()
        thread.join(60)
    state = line.call("state")["a_to_b"]
    assert state["lost_segments"] / num_seen() == pytest.approx(0.1, abs=0.025)
    # Here too.
    assert 0 < arrived <= min(num_sent - state["lost_segments"], state["carried_segments"])


def test_a_tcp_stream_survives_loss_in_superpackets(line: PacketLine) -> None:
    line.call("set", loss="1%", delay="1ms")
    payload = bytes(range(256)) * 8192
    with connection(line) as (near, far):
        threading.Thread(target=near.sendall, args=(payload,), daemon=True).start()
        received = bytearray()
        while len(received) < len(payload):
            received += far.recv(2**18)
        assert received == payload
    assert line.call("state")["a_to_b"]["lost_segments"] > 0


def test_a_cut_is_silent_and_a_resumed_line_goes_on(line: PacketLine) -> None:
    with connection(line) as (near, far):
        near.sendall(b"before")
        assert far.recv(64) == b"before"
        assert line.call("cut")["is_cut"] is True
        near.sendall(b"during")
        far.settimeout(0.3)
        with pytest.raises(TimeoutError):
            far.recv(64)
        line.call("resume")
        far.settimeout(20)
        assert far.recv(64) == b"during"  # TCP sends again what the cut swallowed


def test_a_cut_line_ends_a_connection_that_has_a_limit(line: PacketLine) -> None:
    with connection(line) as (near, _far):
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
        line.call("cut")
        near.sendall(b"lost")
        with pytest.raises(OSError, match="timed out") as error:
            near.recv(1)
        assert error.value.errno == errno.ETIMEDOUT


def test_an_idle_connection_is_dropped_without_a_word(line: PacketLine) -> None:
    with connection(line) as (near, far):
        line.call("set", idle_drop="400ms")  # only now: a busy machine may take longer to connect
        near.sendall(b"a")
        assert far.recv(1) == b"a"
        time.sleep(0.8)
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
        near.sendall(b"b")
        with pytest.raises(OSError, match="timed out"):
            near.recv(1)
    assert line.call("state")["middlebox_dropped_packets"] > 0
    line.call("set", idle_drop="0s")
    with connection(line) as (near, far):
        near.sendall(b"c")
        assert far.recv(1) == b"c"


def test_a_held_line_keeps_what_is_sent(line: PacketLine) -> None:
    with datagrams(line) as (near, far):
        line.call("hold")
        near.send(b"kept")
        far.settimeout(0.2)
        with pytest.raises(TimeoutError):
            far.recv(8)
        line.call("resume")
        assert far.recv(8) == b"kept"


def test_a_program_runs_at_a_site(line: PacketLine) -> None:
    code = "import socket; s = socket.socket(); s.bind(('10.77.0.2', 0)); print('bound')"
    ran = subprocess.run(line.command("b", [sys.executable, "-c", code]), capture_output=True, text=True)
    assert ran.stdout == "bound\n", ran.stderr


def test_the_command_line_runs_programs_at_a_site(line: PacketLine) -> None:
    code = "import socket; s = socket.socket(); s.bind(('10.77.0.1', 0)); print('bound')"
    argv = [sys.executable, "-m", "pdd.cli", "link", "--control", line.control, "enter"]
    ran = subprocess.run([*argv, "a", "--", sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "bound\n", ran.stderr
    ran = subprocess.run([*argv, "c", "--", "true"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "needs a site (a or b)" in ran.stderr


def test_changes_that_make_no_sense_are_refused(line: PacketLine) -> None:
    with pytest.raises(ConfigurationError, match="loss"):
        line.call("set", loss="100%")
    with pytest.raises(ConfigurationError, match="forward"):
        line.call("cut", forward="127.0.0.1:1")


def test_the_emulator_ends_with_its_owner() -> None:
    code = (
        "import os; from pdd.link.packet.process import PacketLine\n"
        "from pdd.link.packet.pipe import LineSettings\n"
        "line = PacketLine(LineSettings(rate_bytes_per_s=1e6, delay_s=0.0))\n"
        "print(line.call('state')['user_namespace'].split('/')[2], flush=True); os._exit(0)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    pytest.fail("the emulator outlived its owner")
