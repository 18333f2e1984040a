"""The emulator on loopback: what programs on both sides of it see."""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from pdd.config.schema import ForwardConfig, LinkConfig
from pdd.core.errors import ConfigurationError, ConnectError
from pdd.link.control import call_control, control_app
from pdd.link.emulator import LinkEmulator, split_address

TRIES = 4
"""Times are judged by the best of so many tries: a busy machine may only be slower than the line."""

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def site(
    handler: Handler, *, rate: str = "200mbit", delay: str = "15ms", forwards: int = 1
) -> AsyncIterator[tuple[LinkEmulator, list[tuple[str, int]]]]:
    """A server behind an emulated line: the line, and where its clients connect."""
    open_writers: list[asyncio.StreamWriter] = []

    async def track(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await handler(reader, writer)

    server = await asyncio.start_server(track, "127.0.0.1", 0)
    target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    config = LinkConfig(
        rate=rate,  # type: ignore[arg-type]  # parsed from text
        delay=delay,  # type: ignore[arg-type]
        forwards=tuple(ForwardConfig(listen="127.0.0.1:0", target=target) for _ in range(forwards)),
    )
    try:
        async with LinkEmulator(config) as link:
            yield link, [split_address(address) for address in link.addresses]
    finally:
        server.close()
        for writer in open_writers:
            writer.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    total = 0
    while data := await reader.read(2**20):
        total += len(data)
    writer.write(total.to_bytes(8, "big"))
    writer.write_eof()


async def upload_s(address: tuple[str, int], num_bytes: int) -> float:
    """Seconds until the server has said that it got all bytes."""
    reader, writer = await asyncio.open_connection(*address)
    started_s = time.monotonic()
    writer.write(bytes(num_bytes))
    writer.write_eof()
    assert int.from_bytes(await reader.readexactly(8), "big") == num_bytes
    writer.close()
    return time.monotonic() - started_s


async def round_trip_s(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    started_s = time.monotonic()
    writer.write(b"ping")
    assert await reader.readexactly(4) == b"ping"
    return time.monotonic() - started_s


async def test_a_round_trip_takes_twice_the_delay() -> None:
    async with site(echo) as (_, [address]):
        reader, writer = await asyncio.open_connection(*address)
        first_s = await round_trip_s(reader, writer)
        others_s = sorted([await round_trip_s(reader, writer) for _ in range(15)])
        writer.close()
    assert first_s >= 0.060  # connection set-up and the trip
    assert 0.030 <= others_s[0] < 0.038  # the best of them: a busy machine may only be slower


async def test_the_rate_holds_for_all_connections_together_and_is_shared_fairly() -> None:
    num_bytes = 4_000_000
    totals_s, apart_s = [], []
    async with site(swallow, forwards=2) as (link, [first, second]):
        for _ in range(TRIES):
            started_s = time.monotonic()
            times_s = await asyncio.gather(upload_s(first, num_bytes), upload_s(second, num_bytes))
            totals_s.append(time.monotonic() - started_s)
            apart_s.append(max(times_s) - min(times_s))
        state = link.state()
    ideal_s = 2 * num_bytes / 25e6
    assert ideal_s <= min(totals_s) <= ideal_s * 1.25 + 0.12
    assert min(apart_s) < 0.1 * ideal_s + 0.05
    assert [forward.to_target_bytes for forward in state.forwards] == [TRIES * num_bytes] * 2
    assert [forward.to_client_bytes for forward in state.forwards] == [TRIES * 8] * 2


async def test_the_directions_do_not_share() -> None:
    async def both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(4_000_000))
        await swallow(reader, writer)

    took_s = []
    async with site(both) as (_, [address]):
        for _ in range(TRIES):
            reader, writer = await asyncio.open_connection(*address)
            started_s = time.monotonic()
            writer.write(bytes(4_000_000))
            writer.write_eof()
            assert len(await reader.read(-1)) == 4_000_008
            took_s.append(time.monotonic() - started_s)
            writer.close()
    assert min(took_s) < 2 * 4_000_000 / 25e6


async def test_half_close_is_passed_on_and_the_other_direction_stays_open() -> None:
    async def count_then_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read(-1)  # ends only with the client's half-close
        writer.write(b"got %d" % len(data))
        writer.write_eof()

    async with site(count_then_answer) as (link, [address]):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"x" * 100_000)
        writer.write_eof()
        assert await reader.read(-1) == b"got 100000"
        writer.close()
        await until(lambda: link.state().forwards[0].connections == 0)


async def test_a_reset_is_passed_on() -> None:
    reset = asyncio.Event()

    async def wait_for_reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(-1)
        except ConnectionResetError:
            reset.set()

    async with site(wait_for_reset) as (link, [address]):
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"x")
        await until(lambda: link.state().forwards[0].to_target_bytes == 1)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await asyncio.wait_for(reset.wait(), 5)
        await until(lambda: link.state().forwards[0].connections == 0)


async def test_nobody_at_the_target_resets_the_client() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        config = LinkConfig(
            rate=1e9, delay=0.001, forwards=(ForwardConfig(listen="127.0.0.1:0", target=f"127.0.0.1:{port}"),)
        )
        async with LinkEmulator(config) as link:
            reader, writer = await asyncio.open_connection(*split_address(link.addresses[0]))
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(-1), 5)
            writer.close()
            await until(lambda: link.state().forwards[0].connections == 0)


async def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    go_on = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        await swallow(reader, writer)

    async with site(slow, rate="8gbit", delay="1ms") as (link, [address]):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(bytes(300_000_000))
        await settled(lambda: link.state().forwards[0].to_target_bytes)
        assert link.state().forwards[0].to_target_bytes < 100_000_000
        go_on.set()
        writer.write_eof()
        assert int.from_bytes(await reader.readexactly(8), "big") == 300_000_000
        writer.close()


async def test_hold_freezes_bytes_and_resume_lets_them_go() -> None:
    async with site(echo, delay="1ms", forwards=2) as (link, [first, second]):
        reader, writer = await asyncio.open_connection(*first)
        await round_trip_s(reader, writer)
        link.hold(link.addresses[0])
        writer.write(b"held")
        other_reader, other_writer = await asyncio.open_connection(*second)
        await round_trip_s(other_reader, other_writer)  # the other forward goes on
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(4), 0.1)
        link.resume()
        assert await reader.readexactly(4) == b"held"
        writer.close()
        other_writer.close()


async def test_a_connection_made_while_held_is_established_after_resume() -> None:
    async with site(echo, delay="1ms") as (link, [address]):
        link.hold()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"ping")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(4), 0.05)
        link.resume()
        assert await reader.readexactly(4) == b"ping"
        writer.close()


async def test_cut_resets_both_ends_and_new_connections_work() -> None:
    ended = asyncio.Event()

    async def echo_until_reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await echo(reader, writer)
        except ConnectionResetError:
            ended.set()

    async with site(echo_until_reset, delay="1ms") as (link, [address]):
        reader, writer = await asyncio.open_connection(*address)
        await round_trip_s(reader, writer)
        assert link.cut() == 1
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        await asyncio.wait_for(ended.wait(), 5)
        writer.close()
        reader, writer = await asyncio.open_connection(*address)
        await round_trip_s(reader, writer)
        writer.close()


async def test_an_address_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = LinkConfig(
            name="wan", rate=1e6, delay=0, forwards=(ForwardConfig(listen=address, target=address),)
        )
        with pytest.raises(
            ConfigurationError, match=f"'wan' cannot listen at {address}: Address already in use"
        ):
            await LinkEmulator(config).start()


async def test_the_control_api_shows_and_changes_the_line() -> None:
    async with site(echo, delay="1ms") as (link, [_address]):
        runner = web.AppRunner(control_app(link), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        control = f"127.0.0.1:{runner.addresses[0][1]}"
        try:
            state = await asyncio.to_thread(call_control, control, "set", {"rate": "50mbit", "delay": "2ms"})
            assert (state["rate_bytes_per_s"], state["delay_s"]) == (6_250_000, 0.002)
            state = await asyncio.to_thread(call_control, control, "hold", {"forward": link.addresses[0]})
            assert state["forwards"][0]["held"] is True
            state = await asyncio.to_thread(call_control, control, "resume")
            assert state["forwards"][0]["held"] is False
            assert (await asyncio.to_thread(call_control, control, "state")) == state
            for action, body, words in (
                ("set", {"rate": "fast"}, "'fast' is not a rate"),
                ("set", {"rate": "0mbit"}, "must be above 0"),
                ("set", {"speed": "1mbit"}, "unknown field `speed`"),
                ("hold", {"forward": "127.0.0.1:1"}, "no forward listens at 127.0.0.1:1"),
            ):
                with pytest.raises(ConfigurationError, match=words):
                    await asyncio.to_thread(call_control, control, action, body)
        finally:
            await runner.cleanup()


def test_no_emulator_is_a_connect_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectError, match="no link emulator answers"):
            call_control(f"127.0.0.1:{unused.getsockname()[1]}", "state")


async def until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Returns once the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # nothing signals it
            await asyncio.sleep(0.005)


async def settled(value: Callable[[], int]) -> None:
    """Returns once the value has not changed for a while."""
    last = -1
    while value() != last:
        last = value()
        await asyncio.sleep(0.3)
