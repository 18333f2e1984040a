"""The landing store: states, leases, eviction, and any sequence of operations keeping its invariants."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.kit.scale import EXAMPLES

from pdd.agent.store import ChunkStore, Landing, Reservation
from pdd.core.errors import InvariantError, OverloadedError

CHUNK = 100


class Log:
    def __init__(self) -> None:
        self.keys: set[bytes] = set()


@pytest.fixture
def log() -> Log:
    return Log()


def make_store(log: Log, *, num_slots: int = 4) -> ChunkStore:
    return ChunkStore(
        chunk_bytes=CHUNK,
        capacity_bytes=num_slots * 128,
        on_added=log.keys.add,
        on_removed=log.keys.remove,
    )


@pytest.fixture
def store(log: Log) -> Iterator[ChunkStore]:
    store = make_store(log)
    yield store
    store.check_invariants()


def put(store: ChunkStore, key: bytes, *, leased: bool = False) -> None:
    landing = store.reserve(key)
    assert isinstance(landing, Landing)
    landing.row[:] = key[0]
    store.commit(landing)
    if not leased:
        store.release([key])


def test_a_chunk_is_visible_only_when_committed(store: ChunkStore, log: Log) -> None:
    landing = store.reserve(b"a")
    assert isinstance(landing, Landing)
    assert b"a" not in store
    assert not store.lease(b"a")
    landing.row[:] = 7
    store.commit(landing)
    assert b"a" in store
    assert log.keys == {b"a"}
    assert np.all(store.row(b"a") == 7)
    assert store.row(b"a").nbytes == CHUNK


def test_a_key_is_landed_once_at_a_time(store: ChunkStore) -> None:
    landing = store.reserve(b"a")
    assert isinstance(landing, Landing)
    assert store.reserve(b"a") is Reservation.BUSY
    store.abort(landing)
    assert isinstance(store.reserve(b"a"), Landing)


def test_a_visible_key_is_leased_instead(store: ChunkStore) -> None:
    put(store, b"a")
    assert store.reserve(b"a") is Reservation.HELD
    assert store.counts().leased == 1


def test_leases_are_counted(store: ChunkStore) -> None:
    put(store, b"a", leased=True)
    store.lease(b"a")
    store.release([b"a"])
    assert store.counts().leased == 1
    store.release([b"a"])
    assert store.counts().leased == 0
    with pytest.raises(InvariantError):
        store.release([b"a"])


def test_the_oldest_unleased_chunk_makes_room(store: ChunkStore, log: Log) -> None:
    for key in (b"a", b"b", b"c", b"d"):
        put(store, key)
    store.touch([b"a"])
    store.lease(b"b")
    put(store, b"e")
    assert log.keys == {b"a", b"b", b"d", b"e"}
    assert store.num_evicted == 1


def test_of_a_released_prefix_the_deepest_chunk_goes_first(store: ChunkStore, log: Log) -> None:
    for key in (b"a", b"b", b"c", b"d"):
        put(store, key, leased=True)
    store.release([b"a", b"b", b"c", b"d"])
    put(store, b"e")
    assert log.keys == {b"a", b"b", b"c", b"e"}


def test_nothing_leased_or_landing_makes_room(store: ChunkStore) -> None:
    put(store, b"a", leased=True)
    put(store, b"b", leased=True)
    landings = [store.reserve(key) for key in (b"c", b"d")]
    assert store.reserve(b"e") is Reservation.FULL
    assert store.reserve_anyway(b"e") is None
    assert isinstance(landings[0], Landing)
    store.abort(landings[0])
    assert isinstance(store.reserve(b"e"), Landing)


def test_an_aborted_slot_waits_for_its_writers(store: ChunkStore) -> None:
    landing = store.reserve(b"a")
    assert isinstance(landing, Landing)
    store.begin_write(landing)
    store.begin_write(landing)
    store.abort(landing)
    assert store.counts().used == 1
    store.end_write(landing)
    assert store.counts().used == 1
    store.end_write(landing)
    assert store.counts().used == 0


def test_a_local_copy_may_overtake_a_landing(store: ChunkStore) -> None:
    landing = store.reserve(b"a")
    copy = store.reserve_anyway(b"a")
    assert isinstance(landing, Landing)
    assert copy is not None
    copy.row[:] = 1
    store.commit(copy)
    landing.row[:] = 2
    store.commit(landing)
    assert np.all(store.row(b"a") == 1)
    assert store.counts().used == 1
    store.release([b"a"])
    store.release([b"a"])


def test_a_store_below_one_chunk_is_refused() -> None:
    with pytest.raises(OverloadedError):
        ChunkStore(chunk_bytes=100, capacity_bytes=99, on_added=lambda _: None, on_removed=lambda _: None)


KEYS = st.sampled_from([b"%c" % i for i in range(97, 105)])


class StoreMachine(RuleBasedStateMachine):
    """Anything in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.store = make_store(self.log)
        self.landings: list[Landing] = []
        self.leases: list[bytes] = []

    @rule(key=KEYS)
    def reserve(self, key: bytes) -> None:
        found = self.store.reserve(key)
        if isinstance(found, Landing):
            found.row[:] = key[0]
            self.landings.append(found)
        elif found is Reservation.HELD:
            self.leases.append(key)

    @rule(key=KEYS)
    def copy(self, key: bytes) -> None:
        landing = self.store.reserve_anyway(key)
        if landing is not None:
            landing.row[:] = key[0]
            self.store.commit(landing)
            self.leases.append(key)

    @rule(at=st.integers(0, 9), commit=st.booleans())
    def settle(self, at: int, commit: bool) -> None:
        if self.landings:
            landing = self.landings.pop(at % len(self.landings))
            if commit:
                self.store.commit(landing)
                self.leases.append(landing.key)
            else:
                self.store.abort(landing)

    @rule(at=st.integers(0, 9))
    def release(self, at: int) -> None:
        if self.leases:
            self.store.release([self.leases.pop(at % len(self.leases))])

    @rule(keys=st.lists(KEYS, max_size=3))
    def touch(self, keys: list[bytes]) -> None:
        self.store.touch(keys)

    @invariant()
    def consistent(self) -> None:
        self.store.check_invariants()
        counts = self.store.counts()
        assert self.log.keys == set(self.store.keys())
        assert counts.leased == len(set(self.leases))
        assert counts.used == len(self.log.keys) + len(self.landings)
        for key in set(self.leases):
            assert np.all(self.store.row(key) == key[0])


TestStoreMachine = StoreMachine.TestCase
# A busy machine is no fault of the store.
TestStoreMachine.settings = settings(
    max_examples=40 * EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
