"""Lanes whose client is slow, whose sockets are closed, and which are many; nothing of them stays behind."""

import asyncio
import os
import re
import socket
import subprocess
import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from tests.kit.lanes import (
    ENGINE_AROUND,
    Lane,
    Wire,
    chunk,
    fast_path,
    hellos,
    lane,
    receive,
    rest_of,
    steady,
    told,
    told_of,
    write,
)

from pdd.router.fastpath.lanes import FastPath, Reason, lendable_fd

# ---- a client that reads late

LONG = hellos(60_000)
LONG_STREAM, LONG_TOLD = steady(LONG), told_of(LONG)
# Where each token's event ends in both streams, whose chunks end with an empty line and CRLF.
ENGINE_ENDS, CLIENT_ENDS = (
    [0, *(end.end() for end in re.finditer(rb"\n\n\r\n", stream))]
    for stream in (LONG_STREAM, LONG_TOLD.client)
)
SMALL_BYTES = 8192
READ_BYTES = 2**16
"""What the thread reads at once."""


def slow_lane(path: FastPath) -> AbstractContextManager[Lane]:
    """A lane whose sockets hold little."""
    return lane(path, engine_buffer_bytes=SMALL_BYTES, client_buffer_bytes=SMALL_BYTES)


async def blocked(run: Lane) -> int:
    """How much of the long stream went out until the engine waited for the lane, and that for its client."""
    sent = 0
    while sent < len(LONG_STREAM):
        try:
            sent += run.engine.theirs.send(LONG_STREAM[sent : sent + READ_BYTES])
        except BlockingIOError:
            news = run.path.look(run.number)
            run.note(news)
            if news.unsent:
                return sent
            await asyncio.sleep(0)
    raise AssertionError("the lane has read everything, and its client nothing")


async def test_a_client_that_reads_late_holds_back_its_engine_and_loses_nothing() -> None:
    async with fast_path() as path:
        with slow_lane(path) as run:
            sent = await blocked(run)
            assert sent < run.engine.buffer_bytes() + run.client.buffer_bytes() + 2 * READ_BYTES
            _, got = await asyncio.gather(
                write(run.engine.theirs, LONG_STREAM[sent:]),
                receive(run.client.theirs, len(LONG_TOLD.client)),
            )
            run.engine.theirs.close()
            assert (await run.ended()).reason is Reason.ENGINE_CLOSED
            await run.check(LONG_STREAM, LONG_TOLD, got=got)


async def test_a_lane_stopped_while_its_client_takes_nothing_gives_back_what_it_did_not_send() -> None:
    async with fast_path() as path:
        with slow_lane(path) as run:
            sent = await blocked(run)
            assert run.stop().unsent
            run.engine.theirs.shutdown(socket.SHUT_WR)
            await run.check(LONG_STREAM[:sent], told_of(LONG[: len(run.ids)]))


async def test_looks_agree_with_what_was_read_and_sent_at_one_moment() -> None:
    async with fast_path() as path:
        with slow_lane(path) as run:
            sent = await blocked(run)
            writing = asyncio.ensure_future(write(run.engine.theirs, LONG_STREAM[sent:]))
            got, num_unsent = b"", 0
            while len(got) < len(LONG_TOLD.client):
                news = path.look(run.number)
                run.note(news)
                num_unsent += bool(news.unsent)
                given = LONG_TOLD.client[len(got) : CLIENT_ENDS[len(run.ids)]]
                assert given.endswith(news.unsent)
                assert LONG_STREAM.startswith(news.unread, ENGINE_ENDS[len(run.ids)])
                got += await receive(run.client.theirs, min(1000, len(LONG_TOLD.client) - len(got)))
            assert num_unsent
            await writing
            run.engine.theirs.shutdown(socket.SHUT_WR)
            await run.check(LONG_STREAM, LONG_TOLD, got=got)


async def test_an_end_that_a_slow_client_has_not_reached_keeps_what_it_did_not_take() -> None:
    stream = LONG_STREAM + chunk(b"data: [DONE]\n\n")
    async with fast_path() as path:
        with lane(path, client_buffer_bytes=SMALL_BYTES, unread=stream) as run:
            news = await run.ended()
            assert (news.reason, news.unread) == (Reason.OTHER_EVENT, chunk(b"data: [DONE]\n\n"))
            assert len(news.unsent) > len(LONG_TOLD.client) - run.client.buffer_bytes()
            run.engine.theirs.shutdown(socket.SHUT_WR)
            await run.check(stream, LONG_TOLD)


# ---- connections that are closed


async def test_a_client_that_is_gone_ends_the_lane_and_its_bytes_come_back() -> None:
    async with fast_path() as path:
        with lane(path) as run:
            run.client.reset()
            await write(run.engine.theirs, steady(hellos(3)))
            news = await run.ended()
            run.engine.theirs.shutdown(socket.SHUT_WR)
            assert news.reason is Reason.CLIENT_CLOSED
            assert run.ids == hellos(3)[: len(run.ids)]
            assert news.unsent == told_of(run.ids).client
            assert news.unread + await rest_of(run.engine.ours) == steady(hellos(3)[len(run.ids) :])


async def test_a_client_that_closes_ends_the_lane() -> None:
    async with fast_path() as path:
        with lane(path) as run:
            run.client.theirs.close()
            stream = b""
            while run.news is None:  # the first bytes after the end are still taken, and answered by a reset
                await write(run.engine.theirs, steady(hellos(1)))
                stream += steady(hellos(1))
                await run.caught_up()
                await asyncio.sleep(0)
            run.engine.theirs.shutdown(socket.SHUT_WR)
            assert run.news.reason is Reason.CLIENT_CLOSED
            assert run.news.unread + await rest_of(run.engine.ours) == stream[len(steady(run.ids)) :]


async def test_a_client_that_only_ends_its_own_stream_gets_all() -> None:
    ids = hellos(5)
    async with fast_path() as path:
        with lane(path) as run:
            run.client.theirs.shutdown(socket.SHUT_WR)
            await write(run.engine.theirs, steady(ids))
            got = await receive(run.client.theirs, len(told_of(ids).client))
            run.engine.theirs.shutdown(socket.SHUT_WR)
            await run.check(steady(ids), told_of(ids), got=got)


async def test_a_client_that_is_gone_while_it_took_nothing_ends_the_lane() -> None:
    async with fast_path() as path:
        with slow_lane(path) as run:
            await blocked(run)
            run.client.reset()
            assert (await run.ended()).reason is Reason.CLIENT_CLOSED
            assert run.news is not None
            assert told_of(run.ids).client.endswith(run.news.unsent)


@pytest.mark.parametrize("cut_bytes", [0, 1, 30])
async def test_an_engine_that_closes_leaves_what_was_no_whole_event(cut_bytes: int) -> None:
    stream = steady(hellos(4)) + steady(hellos(1))[:cut_bytes]
    async with fast_path() as path:
        with lane(path) as run:
            await write(run.engine.theirs, stream)
            run.engine.theirs.close()
            news = await run.ended()
            assert (news.reason, len(news.unread)) == (Reason.ENGINE_CLOSED, cut_bytes)
            await run.check(stream, told_of(hellos(4)))


async def test_an_engine_that_dies_loses_nothing_that_came() -> None:
    stream = steady(hellos(4))
    async with fast_path() as path:
        with lane(path) as run:
            await write(run.engine.theirs, stream + b"5")
            got = await receive(run.client.theirs, len(told_of(hellos(4)).client))
            run.engine.reset()
            news = await run.ended()
            assert (news.reason, news.unread) == (Reason.ENGINE_CLOSED, b"5")
            await run.check(stream + b"5", told_of(hellos(4)), got=got)


async def test_both_may_be_gone() -> None:
    async with fast_path() as path:
        with lane(path) as run:
            run.client.reset()
            await write(run.engine.theirs, steady(hellos(2)))
            run.engine.reset()
            news = await run.ended()
            assert news.reason in (Reason.CLIENT_CLOSED, Reason.ENGINE_CLOSED)
            assert news.unsent == told_of(run.ids).client


# ---- many lanes, and what stays of them


def num_descriptors() -> int:
    """Of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_two_hundred_lanes_run_at_once() -> None:
    num_lanes, ids = 200, hellos(50)
    stream, expected = steady(ids), told_of(ids)
    async with fast_path() as path:
        with ExitStack() as stack:
            runs = [stack.enter_context(lane(path, unread=stream[:number])) for number in range(num_lanes)]
            for number, run in enumerate(runs):
                await write(run.engine.theirs, stream[number:])
                run.engine.theirs.shutdown(socket.SHUT_WR)
            for run in runs:
                await run.ended()
                await run.check(stream, expected)
            assert [run.num_taken_back for run in runs] == [1] * num_lanes


async def test_no_descriptor_stays_of_lanes_however_they_end() -> None:
    async with fast_path() as path:
        with ExitStack() as stack:
            runs = [stack.enter_context(lane(path)) for _ in range(8)]
            lent = num_descriptors()
            for run in runs[:4]:
                await write(run.engine.theirs, OTHER)
            for run in runs[:4]:
                await run.ended()
            for run in runs[4:]:
                run.stop()
            assert num_descriptors() == lent - 2 * len(runs)


async def test_no_descriptor_stays_of_a_closed_fast_path() -> None:
    before = num_descriptors()
    async with fast_path() as path:
        with ExitStack() as stack:
            runs = [stack.enter_context(lane(path)) for _ in range(3)]
            path.close()
            assert [run.num_taken_back for run in runs] == [1, 1, 1]
    assert num_descriptors() == before


OTHER = chunk(b"data: [DONE]\n\n")


async def test_closing_gives_back_what_lanes_had() -> None:
    ids, part = hellos(3), OTHER[:4]
    async with fast_path() as path:
        with lane(path, unread=steady(ids) + part) as run:
            path.close()
            assert run.news is not None
            assert run.news.reason is Reason.TAKEN_BACK
            assert run.news.unread == part
            run.engine.theirs.shutdown(socket.SHUT_WR)
            await run.check(steady(ids) + part, told_of(ids))


async def test_a_closed_fast_path_has_no_lanes_and_lends_none() -> None:
    async with fast_path() as path:
        with lane(path) as run:
            path.close()
            path.close()
            assert path.lend(run.ends(), run) is None
            with pytest.raises(LookupError):
                path.look(run.number)


async def test_a_lane_that_was_stopped_before_its_end_was_heard_is_given_back_once() -> None:
    async with fast_path() as path:
        with lane(path, unread=OTHER) as run, lane(path, unread=OTHER) as other:
            run.stop()
            await other.ended()
            assert run.num_taken_back == 1


async def test_the_end_of_a_lane_does_not_end_the_next_one_of_its_borrower() -> None:
    def begin_again(run: Lane) -> None:
        if run.news is None:
            run.stop()
            run.begin(run.ends())

    async with fast_path() as path:
        with lane(path, unread=OTHER) as one, lane(path, unread=OTHER) as two:
            one.when_over = partial(begin_again, two)
            two.when_over = partial(begin_again, one)
            await asyncio.gather(one.over.wait(), two.over.wait())
            again = one if one.news is None else two
            assert again.news is None
            await write(again.engine.theirs, steady(hellos(1)))
            await receive(again.client.theirs, len(told_of(hellos(1)).client))
            assert (again.news, again.num_taken_back) == (None, 1)


# ---- what cannot be lent


@pytest.mark.parametrize("side", ["engine", "client"])
async def test_a_socket_that_is_closed_is_not_lent(side: str) -> None:
    async with fast_path() as path:
        with lane(path) as run:
            before = num_descriptors()
            ends = run.ends()
            ends = replace(ends, engine_fd=-1) if side == "engine" else replace(ends, client_fd=-1)
            assert path.lend(ends, run) is None
            assert num_descriptors() == before


async def test_what_cannot_be_waited_for_is_not_lent(tmp_path: Path) -> None:
    async with fast_path() as path:
        with lane(path) as run, TemporaryFile(dir=tmp_path) as file:
            before = num_descriptors()
            assert path.lend(replace(run.ends(), engine_fd=file.fileno()), run) is None
            assert num_descriptors() == before


def long_around(num_bytes: int) -> tuple[bytes, bytes]:
    """What is around an event's tokens, so many bytes."""
    before, after = ENGINE_AROUND
    return before + b" " * (num_bytes - len(before) - len(after)), after


LONGEST_AROUND_BYTES = READ_BYTES - 4096 - len(b"010000" + 2 * b"\r\n")


async def test_an_event_may_be_nearly_as_long_as_what_is_read_at_once() -> None:
    around, ids = long_around(LONGEST_AROUND_BYTES), [0] * 2048
    content = around[0] + b"0," * 2047 + b"00" + around[1]
    longest = b"%06x\r\n%b\r\n" % (len(content), content)
    stream, expected = longest * 3, told([(longest, ids)] * 3)
    async with fast_path() as path:
        with lane(path) as run:
            run.stop()
            await write(run.engine.theirs, stream[len(longest) - 1 :])
            run.begin(run.ends(unread=stream[: len(longest) - 1], engine_around=around))
            run.engine.theirs.shutdown(socket.SHUT_WR)
            got = await receive(run.client.theirs, len(expected.client))
            await run.check(stream, expected, got=got)


async def test_longer_events_are_not_lent() -> None:
    async with fast_path() as path:
        with lane(path) as run:
            assert path.lend(run.ends(engine_around=long_around(LONGEST_AROUND_BYTES + 1)), run) is None


# ---- a process that has no room for a thread

NO_THREAD = """
import asyncio, resource, signal
from pathlib import Path
from tests.kit.lanes import VOCABULARY
from pdd.router.fastpath.lanes import FastPath

async def main():
    path = FastPath(VOCABULARY)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 2**21, resource.RLIM_INFINITY))
    try:
        path.start()
    except OSError as error:
        path.close()
        print(error, signal.pthread_sigmask(signal.SIG_BLOCK, []))

asyncio.run(main())
"""


async def test_a_thread_that_cannot_be_started_is_said_and_signals_still_come() -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        NO_THREAD,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
    )
    said, _ = await child.communicate()
    assert said == b"the native fast path's thread could not be started set()\n"


# ---- transports


class Recorder(asyncio.Protocol):
    """Keeps what comes."""

    def __init__(self) -> None:
        self.data = b""
        self.came = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self.data += data
        self.came.set()

    async def until(self, end: bytes) -> bytes:
        """What came, once it ends so."""
        while not self.data.endswith(end):
            self.came.clear()
            await self.came.wait()
        data, self.data = self.data, b""
        return data


async def transport_of(wire: Wire) -> tuple[asyncio.Transport, Recorder]:
    """The event loop's, for the router's side."""
    return await asyncio.get_running_loop().create_connection(Recorder, sock=wire.ours)


async def test_a_transport_whose_bytes_are_not_all_sent_is_not_lent() -> None:
    wire = Wire(SMALL_BYTES)
    transport, _ = await transport_of(wire)
    assert lendable_fd(transport) is not None
    data = bytes(10 * wire.buffer_bytes())
    transport.write(data)
    assert lendable_fd(transport) is None
    assert await receive(wire.theirs, len(data)) == data
    assert lendable_fd(transport) is not None
    transport.abort()
    assert lendable_fd(transport) is None
    wire.close()


async def test_a_lane_takes_turns_with_transports() -> None:
    ids, turns = hellos(30), 5
    async with fast_path() as path:
        with lane(path) as run:
            run.stop()
            (engine, heard), (client, _) = await transport_of(run.engine), await transport_of(run.client)
            for turn in range(1, turns + 1):
                assert (lendable_fd(engine), lendable_fd(client)) == (
                    run.engine.ours.fileno(),
                    run.client.ours.fileno(),
                )
                engine.pause_reading()
                run.begin(run.ends())
                await write(run.engine.theirs, steady(ids) + OTHER)
                client.write((await run.ended()).unsent + OTHER)
                engine.resume_reading()
                expected = told_of(ids).client + OTHER
                assert await receive(run.client.theirs, len(expected)) == expected
                await write(run.engine.theirs, b"more")
                assert run.stop().unread + await heard.until(b"more") == OTHER + b"more"
                assert len(run.ids) == turn * len(ids)
