"""What is known through the agent, and when a job ends, without a socket."""

import pytest

from pdd.core.errors import RemoteProtocolError
from pdd.engine.mirror import FinishedJob, LinkState, Mirror
from pdd.wire.local import (
    LOCAL_VERSION,
    BeginTransfer,
    FinishRequest,
    KeysChanged,
    LoadChunks,
    LoadDone,
    Refused,
    StoreChunks,
    StoreDone,
    Touch,
    Welcome,
)

ORDER = BeginTransfer(request="r", transfer="t", targets=["md0"], prompt_tokens=64)
STORE = StoreChunks(job=1, request="r", keys=[b"a"], slots=[0], end_tokens=[32])
LOAD = LoadChunks(job=2, keys=[b"a", b"b"], slots=[0, 1])


def up(*keys: bytes) -> Mirror:
    mirror = Mirror()
    mirror.greeted()
    mirror.handle(Welcome(version=LOCAL_VERSION, keys=list(keys)))
    return mirror


def test_the_mirror_starts_with_the_store_and_follows_it() -> None:
    mirror = up(b"a", b"b")
    mirror.handle(KeysChanged(added=[b"c"], removed=[b"a"]))
    assert mirror.keys == {b"b", b"c"}


def test_a_key_removed_and_added_in_one_message_is_there() -> None:
    mirror = up(b"a")
    mirror.handle(KeysChanged(added=[b"a"], removed=[b"a"]))
    assert mirror.keys == {b"a"}


def test_jobs_without_an_agent_fail_at_once() -> None:
    mirror = Mirror()
    assert mirror.submit_store(STORE) == []
    assert mirror.submit_load(LOAD) == []
    assert not mirror.has_open_jobs
    assert mirror.take_finished() == [
        FinishedJob(job=1, ok=False),
        FinishedJob(job=2, ok=False, loaded=frozenset()),
    ]
    assert mirror.take_finished() == []


def test_jobs_end_with_the_agents_answer() -> None:
    mirror = up()
    assert mirror.submit_store(STORE) == [STORE]
    assert mirror.submit_load(LOAD) == [LOAD]
    assert mirror.take_finished() == []
    mirror.handle(StoreDone(job=1))
    mirror.handle(LoadDone(job=2, loaded=[b"a", b"b"]))
    assert mirror.take_finished() == [
        FinishedJob(job=1, ok=True),
        FinishedJob(job=2, ok=True, loaded=frozenset({b"a", b"b"})),
    ]


def test_a_load_may_succeed_in_part_and_never_beyond_its_keys() -> None:
    mirror = up()
    mirror.submit_load(LOAD)
    mirror.handle(LoadDone(job=2, loaded=[b"b", b"never asked for"]))
    assert mirror.take_finished() == [FinishedJob(job=2, ok=False, loaded=frozenset({b"b"}))]


def test_jobs_end_when_the_agent_is_gone_and_not_when_it_only_misbehaves() -> None:
    mirror = up(b"a")
    mirror.submit_store(STORE)
    mirror.submit_load(LOAD)
    mirror.end()
    assert mirror.keys == set()
    assert mirror.has_open_jobs
    mirror.lost()
    assert [job.ok for job in mirror.take_finished()] == [False, False]
    assert mirror.state is LinkState.AWAY


def test_orders_are_repeated_to_an_agent_that_comes_later() -> None:
    mirror = Mirror()
    assert mirror.begin(ORDER) == []
    mirror.greeted()
    assert mirror.handle(Welcome(version=LOCAL_VERSION, keys=[])) == [ORDER]
    mirror.lost()
    mirror.greeted()
    assert mirror.handle(Welcome(version=LOCAL_VERSION, keys=[])) == [ORDER]
    assert mirror.finish("r") == [FinishRequest(request="r")]
    assert mirror.finish("r") == []


def test_only_requests_with_an_order_are_finished() -> None:
    assert up().finish("no order") == []


def test_only_chunks_in_the_store_are_touched_in_the_given_order() -> None:
    mirror = up(b"a", b"b")
    assert mirror.touch([b"b", b"x", b"a"]) == [Touch(keys=[b"b", b"a"])]
    assert mirror.touch([b"x"]) == []


@pytest.mark.parametrize(
    "message",
    [
        Refused(reason="another engine is connected"),
        Welcome(version=LOCAL_VERSION, keys=[]),
        StoreDone(job=99),
        StoreDone(job=2),
        LoadDone(job=1, loaded=[]),
        LoadDone(job=99, loaded=[]),
    ],
)
def test_what_the_agent_may_not_say(message: object) -> None:
    mirror = up()
    mirror.submit_store(STORE)
    mirror.submit_load(LOAD)
    with pytest.raises(RemoteProtocolError):
        mirror.handle(message)  # type: ignore[arg-type]


def test_another_version_is_refused() -> None:
    mirror = Mirror()
    mirror.greeted()
    with pytest.raises(RemoteProtocolError, match="version 99"):
        mirror.handle(Welcome(version=99, keys=[]))


def test_nothing_counts_before_the_welcome() -> None:
    mirror = Mirror()
    mirror.greeted()
    with pytest.raises(RemoteProtocolError):
        mirror.handle(KeysChanged(added=[b"a"], removed=[]))
