"""The contract of ``pdd.transport.base`` as tests; an implementation subclasses ``TransportConformance``."""

import threading
from collections.abc import Callable, Iterator

import pytest

from pdd.core.errors import ConnectError, ConnectionLostError, DeadlineError, TransportError
from pdd.launch.ports import free_ports
from pdd.transport.base import Listener, Stream, Transport

JOIN_S = 30.0
LARGE_BYTES = 8 * 2**20
"""More than any implementation holds in flight."""


def in_thread(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def received(stream: Stream, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    stream.recv_exactly(memoryview(buffer))
    return bytes(buffer)


class TransportConformance:
    """Every test here is a promise to what is built on streams."""

    def make_transport(self) -> Transport:
        raise NotImplementedError

    def listen_address(self) -> str:
        raise NotImplementedError

    def dead_address(self) -> str:
        """Where nobody listens."""
        return f"127.0.0.1:{free_ports(1)[0]}"

    @pytest.fixture
    def transport(self) -> Transport:
        return self.make_transport()

    @pytest.fixture
    def listener(self, transport: Transport) -> Iterator[Listener]:
        listener = transport.listen(self.listen_address())
        yield listener
        listener.close()

    @pytest.fixture
    def pair(self, transport: Transport, listener: Listener) -> Iterator[tuple[Stream, Stream]]:
        near = transport.dial(listener.address, timeout_s=10)
        far = listener.accept()
        yield near, far
        near.close()
        far.close()

    def test_bytes_arrive_in_order_in_both_directions(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        assert near.send([b"ab", bytearray(b""), memoryview(b"cd")]) == 4
        assert received(far, 4) == b"abcd"
        far.send([b"back"])
        assert received(near, 4) == b"back"

    def test_more_than_fits_in_flight_arrives(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        data = bytes(range(256)) * (LARGE_BYTES // 256)
        pieces = [memoryview(data)[i : i + 100_003] for i in range(0, len(data), 100_003)]
        thread = in_thread(lambda: near.send(pieces))
        assert received(far, len(data)) == data
        thread.join(JOIN_S)
        assert not thread.is_alive()

    def test_many_small_buffers_go_in_one_call(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        thread = in_thread(lambda: near.send([b"x"] * 5000))
        assert received(far, 5000) == b"x" * 5000
        thread.join(JOIN_S)

    def test_recv_takes_what_is_there(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        near.send([b"abc"])
        buffer = bytearray(10)
        assert 1 <= far.recv_into(memoryview(buffer)) <= 3

    def test_recv_never_writes_beyond_the_buffer(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        near.send([b"abcdef"])
        buffer = bytearray(b"......")
        assert far.recv_into(memoryview(buffer)[:2]) <= 2
        assert buffer[2:] == b"...."

    def test_the_end_is_zero_bytes_after_all_that_was_sent(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        near.send([b"last"])
        near.close()
        assert received(far, 4) == b"last"
        assert far.recv_into(memoryview(bytearray(1))) == 0

    def test_recv_exactly_says_when_the_end_comes_first(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        near.send([b"half"])
        near.close()
        with pytest.raises(ConnectionLostError):
            received(far, 8)

    def test_sending_to_a_closed_end_fails(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        far.close()

        def send_for_long() -> None:
            for _ in range(1000):
                near.send([bytes(2**16)])

        with pytest.raises(ConnectionLostError):
            send_for_long()

    def test_a_recv_deadline_leaves_the_stream_usable(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        with pytest.raises(DeadlineError):
            far.recv_into(memoryview(bytearray(1)), timeout_s=0.01)
        near.send([b"x"])
        assert received(far, 1) == b"x"

    def test_a_send_deadline_is_kept(self, pair: tuple[Stream, Stream]) -> None:
        near, _far = pair
        with pytest.raises(DeadlineError):
            near.send([bytes(4 * LARGE_BYTES)], timeout_s=0.05)

    def test_close_wakes_a_blocked_recv(self, pair: tuple[Stream, Stream]) -> None:
        near, _far = pair
        errors: list[BaseException] = []

        def receive() -> None:
            try:
                near.recv_into(memoryview(bytearray(1)))
            except TransportError as error:
                errors.append(error)

        thread = in_thread(receive)
        near.close()
        thread.join(JOIN_S)
        assert not thread.is_alive()
        assert isinstance(errors[0], ConnectionLostError)

    def test_close_wakes_a_blocked_send(self, pair: tuple[Stream, Stream]) -> None:
        near, far = pair
        errors: list[BaseException] = []

        def send() -> None:
            try:
                near.send([bytes(4 * LARGE_BYTES)])
            except TransportError as error:
                errors.append(error)

        thread = in_thread(send)
        received(far, 1)
        near.close()
        thread.join(JOIN_S)
        assert not thread.is_alive()
        assert isinstance(errors[0], ConnectionLostError)

    def test_close_may_be_repeated_and_ends_all_use(self, pair: tuple[Stream, Stream]) -> None:
        near, _far = pair
        near.close()
        near.close()
        with pytest.raises(ConnectionLostError):
            near.send([b"x"])
        with pytest.raises(ConnectionLostError):
            near.recv_into(memoryview(bytearray(1)))

    def test_dialling_where_nobody_listens_fails(self, transport: Transport) -> None:
        with pytest.raises(ConnectError):
            transport.dial(self.dead_address(), timeout_s=2)

    def test_an_address_in_use_cannot_be_bound(self, transport: Transport, listener: Listener) -> None:
        with pytest.raises(ConnectError):
            transport.listen(listener.address)

    def test_closing_a_listener_wakes_accept(self, listener: Listener) -> None:
        errors: list[BaseException] = []

        def accept() -> None:
            try:
                listener.accept()
            except TransportError as error:
                errors.append(error)

        thread = in_thread(accept)
        listener.close()
        listener.close()
        thread.join(JOIN_S)
        assert not thread.is_alive()
        assert isinstance(errors[0], ConnectionLostError)

    def test_a_closed_listener_cannot_be_dialled(self, transport: Transport, listener: Listener) -> None:
        address = listener.address
        listener.close()
        with pytest.raises(ConnectError):
            transport.dial(address, timeout_s=2)

    def test_connections_do_not_mix(self, transport: Transport, listener: Listener) -> None:
        dialled = [transport.dial(listener.address, timeout_s=10) for _ in range(5)]
        accepted = [listener.accept() for _ in range(5)]
        for i, stream in enumerate(dialled):
            stream.send([b"%d" % i])
        assert sorted(received(stream, 1) for stream in accepted) == [b"0", b"1", b"2", b"3", b"4"]
        for stream in (*dialled, *accepted):
            stream.close()
