"""The engine's end of the Unix socket, against an agent of the test kit."""

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.kit.fake_agent import FakeAgent

from pdd.core.errors import ConfigurationError
from pdd.engine.agent_link import RECONNECT_S, AgentLink
from pdd.engine.mirror import FinishedJob
from pdd.wire.local import (
    LOCAL_VERSION,
    BeginTransfer,
    FinishRequest,
    Hello,
    KeysChanged,
    LoadChunks,
    StoreChunks,
    StoreDone,
    Touch,
)

ROW_BYTES, CHUNK_BYTES, NUM_SLOTS = 4096, 4000, 8
HELLO = Hello(
    version=LOCAL_VERSION,
    engine_id="md0",
    fingerprint={"model": "m"},
    chunk_bytes=CHUNK_BYTES,
    chunk_tokens=32,
    primary_row_bytes=ROW_BYTES,
    num_primary_slots=NUM_SLOTS,
)
LOGGER = logging.getLogger("pdd.test")


def eventually(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """The condition holds, at the latest after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)


class Primary:
    """A primary tier: shared memory with rows."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("primary")
        os.ftruncate(self.fd, ROW_BYTES * NUM_SLOTS)
        self.memory = mmap.mmap(self.fd, ROW_BYTES * NUM_SLOTS)

    def write(self, slot: int, byte: int) -> None:
        self.memory[slot * ROW_BYTES : slot * ROW_BYTES + CHUNK_BYTES] = bytes([byte]) * CHUNK_BYTES

    def read(self, slot: int) -> set[int]:
        return set(self.memory[slot * ROW_BYTES : slot * ROW_BYTES + CHUNK_BYTES])


@pytest.fixture
def primary() -> Iterator[Primary]:
    memory = Primary()
    yield memory
    memory.memory.close()
    os.close(memory.fd)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    fake = FakeAgent(tmp_path / "agent.sock").start()
    yield fake
    fake.stop()


@pytest.fixture
def link(tmp_path: Path, primary: Primary) -> Iterator[AgentLink]:
    made = AgentLink(tmp_path / "agent.sock", hello=lambda: HELLO, primary_fd=primary.fd, logger=LOGGER)
    made.start()
    yield made
    made.close()


def finished(link: AgentLink, count: int) -> list[FinishedJob]:
    jobs: list[FinishedJob] = []

    def enough() -> bool:
        jobs.extend(link.take_finished())
        return len(jobs) >= count

    eventually(enough)
    return jobs


def test_chunks_go_to_the_store_and_come_back(agent: FakeAgent, link: AgentLink, primary: Primary) -> None:
    eventually(lambda: link.connected)
    assert agent.hello == HELLO
    primary.write(2, 7)
    primary.write(5, 9)
    link.store(StoreChunks(job=1, request="r", keys=[b"a", b"b"], slots=[2, 5], end_tokens=[32, 64]))
    assert finished(link, 1) == [FinishedJob(job=1, ok=True)]
    assert link.holds(b"a")
    assert link.holds(b"b")
    primary.write(2, 0)
    link.load(LoadChunks(job=2, keys=[b"b", b"a"], slots=[0, 1]))
    assert finished(link, 1) == [FinishedJob(job=2, ok=True, loaded=frozenset({b"a", b"b"}))]
    assert (primary.read(0), primary.read(1)) == ({9}, {7})


def test_a_chunk_announced_before_the_question_is_found(agent: FakeAgent, link: AgentLink) -> None:
    eventually(lambda: link.connected)
    for number in range(200):
        key = number.to_bytes(4, "little")
        agent.send(KeysChanged(added=[key], removed=[]))
        # The agent has written it, so the very next question must see it, whatever the other thread does.
        assert link.holds(key)


def test_orders_touches_and_ends_reach_the_agent_in_order(agent: FakeAgent, link: AgentLink) -> None:
    order = BeginTransfer(request="r", transfer="t", targets=["md0"], prompt_tokens=64)
    link.begin(order)
    eventually(lambda: link.connected)
    agent.send(KeysChanged(added=[b"a"], removed=[]))
    assert link.holds(b"a")
    link.touch([b"x", b"a"])
    link.finish("r")
    link.finish("never ordered")
    agent.wait_for(FinishRequest)
    assert agent.received[1:] == [order, Touch(keys=[b"a"]), FinishRequest(request="r")]


def test_open_jobs_fail_when_the_agent_dies_and_the_link_comes_back(tmp_path: Path, link: AgentLink) -> None:
    first = FakeAgent(tmp_path / "agent.sock", answer_jobs=False).start()
    eventually(lambda: link.connected)
    order = BeginTransfer(request="r", transfer="t", targets=["md0"], prompt_tokens=64)
    link.begin(order)
    link.store(StoreChunks(job=1, request="r", keys=[b"a"], slots=[0], end_tokens=[32]))
    link.load(LoadChunks(job=2, keys=[b"a"], slots=[1]))
    first.wait_for(LoadChunks)
    assert link.take_finished() == []
    assert not link.wait_for_jobs(0.05)
    first.stop()
    assert [job.ok for job in finished(link, 2)] == [False, False]
    assert link.wait_for_jobs(0.0)
    link.store(StoreChunks(job=3, request="r", keys=[b"a"], slots=[0], end_tokens=[32]))
    assert link.take_finished() == [FinishedJob(job=3, ok=False)]
    second = FakeAgent(tmp_path / "agent.sock").start()
    try:
        eventually(lambda: link.connected)
        assert second.wait_for(BeginTransfer) == [order]
    finally:
        second.stop()


def test_reconnecting_is_at_most_once_a_second(tmp_path: Path, link: AgentLink) -> None:
    start_s = time.monotonic()  # nobody could connect before
    agent = FakeAgent(tmp_path / "agent.sock", refuse="another engine is connected").start()
    try:
        agent.wait_for(Hello, count=2)
        time.sleep(1.5)
        num_hellos = len(agent.wait_for(Hello))
        assert num_hellos <= 1 + (time.monotonic() - start_s) / RECONNECT_S
        assert not link.connected
    finally:
        agent.stop()


def test_a_stuck_agent_blocks_nothing_on_this_side(tmp_path: Path, primary: Primary) -> None:
    gate = threading.Event()

    class Stuck(FakeAgent):
        def carry_out_store(self, job: StoreChunks) -> None:
            gate.wait(60)
            super().carry_out_store(job)

    agent = Stuck(tmp_path / "agent.sock").start()
    link = AgentLink(tmp_path / "agent.sock", hello=lambda: HELLO, primary_fd=primary.fd, logger=LOGGER)
    link.start()
    try:
        eventually(lambda: link.connected)
        keys = [bytes([i]) * 36 for i in range(100)]
        for job in range(500):
            # Four kilobytes each: far more than a Unix socket buffers.
            link.store(StoreChunks(job=job, request="r", keys=keys, slots=[0] * 100, end_tokens=[32] * 100))
        assert agent.chunks == {}  # all were taken while the agent had not carried out one
        assert not gate.is_set()
        gate.set()
        assert {job.ok for job in finished(link, 500)} == {True}
    finally:
        gate.set()
        link.close()
        agent.stop()


def test_an_agent_that_breaks_the_protocol_ends_jobs_only_when_it_is_gone(
    agent: FakeAgent, link: AgentLink
) -> None:
    agent.answer_jobs = False
    eventually(lambda: link.connected)
    link.store(StoreChunks(job=1, request="r", keys=[b"a"], slots=[0], end_tokens=[32]))
    agent.wait_for(StoreChunks)
    connection = agent._connection
    assert connection is not None
    # A second thread keeps the agent's end open after this side has stopped talking.
    kept = connection.dup()
    agent.send(StoreDone(job=77))
    eventually(lambda: not link.connected)
    assert link.take_finished() == []
    kept.shutdown(2)
    kept.close()
    assert finished(link, 1) == [FinishedJob(job=1, ok=False)]


def test_an_engine_that_cannot_say_hello_yet_is_asked_again(
    tmp_path: Path, agent: FakeAgent, primary: Primary
) -> None:
    answers: list[Hello | None] = [HELLO, None, None]
    link = AgentLink(
        tmp_path / "agent.sock", hello=lambda: answers.pop(), primary_fd=primary.fd, logger=LOGGER
    )
    link.start()
    eventually(lambda: link.connected)
    link.close()
    assert agent.hello == HELLO


def test_an_engine_that_must_not_connect_never_does(
    tmp_path: Path, agent: FakeAgent, primary: Primary, caplog: pytest.LogCaptureFixture
) -> None:
    def never() -> Hello:
        raise ConfigurationError("other hash algorithm")

    link = AgentLink(tmp_path / "agent.sock", hello=never, primary_fd=primary.fd, logger=LOGGER)
    with caplog.at_level(logging.INFO):
        link.start()
        eventually(lambda: "other hash algorithm" in caplog.text)
    link.close()
    assert agent.received == []


def test_trouble_is_said_once(tmp_path: Path, primary: Primary, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        link = AgentLink(tmp_path / "nobody.sock", hello=lambda: HELLO, primary_fd=primary.fd, logger=LOGGER)
        link.start()
        time.sleep(2.3)
        link.close()
    assert caplog.text.count("cannot connect") == 1


def test_closing_is_prompt_and_leaves_no_descriptor(
    tmp_path: Path, agent: FakeAgent, primary: Primary
) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    links = []
    for _ in range(3):
        link = AgentLink(tmp_path / "agent.sock", hello=lambda: HELLO, primary_fd=primary.fd, logger=LOGGER)
        link.start()
        links.append(link)
    for link in links:
        link.close()
    # Their threads were woken: close gives up on one that was not, and goes on without.
    assert not any(link._thread.is_alive() for link in links)
    agent.drop_connection()
    eventually(lambda: descriptors() <= before + 1)
