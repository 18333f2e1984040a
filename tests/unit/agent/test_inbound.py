"""The receiving side under any interleaving of peers, transfers, cuts, releases and a full store."""

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.kit.scale import EXAMPLES

from pdd.agent.inbound import InboundHub
from pdd.agent.inbound_session import InboundSession, InboundTransfer, _Receiving
from pdd.agent.store import ChunkStore
from pdd.transport.base import Buffer, Stream
from pdd.wire.decoder import DataEnd, DataHeader
from pdd.wire.frames import Cancel, End, Offer
from pdd.wire.receiver import Placement, State

CHUNK = 64
HALF = CHUNK // 2
KEYS = [b"%d" % i for i in range(5)]
FAR_FUTURE_S = 1e12


class Sink(Stream):
    """A peer that takes everything and says nothing."""

    @property
    def peer_address(self) -> str:
        return "sink"

    def send(self, buffers: Sequence[Buffer], *, timeout_s: float | None = None) -> int:
        return sum(len(buffer) for buffer in buffers)

    def recv_into(self, buffer: memoryview, *, timeout_s: float | None = None) -> int:
        return 0

    def close(self) -> None:
        pass


class InboundMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = ChunkStore(
            chunk_bytes=CHUNK, capacity_bytes=4 * CHUNK, on_added=lambda _: None, on_removed=lambda _: None
        )
        self.hub = InboundHub(self.store, lease_s=60, flush_engine=lambda: None)
        self.number = 0
        self.writing: list[tuple[InboundSession, DataHeader, _Receiving]] = []

    def teardown(self) -> None:
        for session, header, receiving in self.writing:
            session._on_data(DataEnd(header=header, intact=False), receiving)
        self.hub.close()
        self.hub.expire_leases(FAR_FUTURE_S)
        self.store.check_invariants()
        counts = self.store.counts()
        assert counts.leased == 0
        assert counts.used == len(self.store.keys())

    def session(self, at: int) -> InboundSession:
        peer = f"p{at % 2}"
        known = self.hub._sessions.get(peer)
        return known or self.hub.open_session(peer, "s", Sink())  # type: ignore[return-value]

    def transfers(self, session: InboundSession) -> list[InboundTransfer]:
        return [inbound for inbound in session.transfers.values() if inbound.machine.is_active]

    def frame(self, session: InboundSession, frame: Offer | End | Cancel) -> None:
        with self.store.lock:
            session._on_frame(frame)
        self.hub.announce()

    @rule(at=st.integers(0, 1), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    def offer(self, at: int, keys: list[bytes]) -> None:
        self.number += 1
        offer = Offer(number=self.number, transfer=f"t{self.number % 5}", first=0, keys=keys)
        self.frame(self.session(at), offer)

    @rule(at=st.integers(0, 1), pick=st.integers(0, 9), key=st.sampled_from(KEYS))
    def offer_more(self, at: int, pick: int, key: bytes) -> None:
        session = self.session(at)
        still_open = [t for t in self.transfers(session) if t.machine.state is State.OPEN]
        if still_open:
            inbound = still_open[pick % len(still_open)]
            first = inbound.machine.num_offered
            number = inbound.machine.number
            self.frame(session, Offer(number=number, transfer=inbound.transfer, first=first, keys=[key]))

    @rule(at=st.integers(0, 1), pick=st.integers(0, 99), half=st.booleans(), intact=st.booleans())
    def receive(self, at: int, pick: int, half: bool, intact: bool) -> None:
        """A piece begins to arrive; it is done with ``arrive``, maybe after its transfer died."""
        session = self.session(at)
        wanted = [
            (inbound.machine.number, index)
            for inbound in self.transfers(session)
            for index in inbound.landings
            if inbound.machine._chunks[index].placement is Placement.LANDING
        ]
        if wanted:
            number, index = wanted[pick % len(wanted)]
            header = DataHeader(number=number, index=index, offset=HALF * half, length=HALF, wire_length=HALF)
            receiving = _Receiving()
            if session._place(header, receiving) is not None:
                self.writing.append((session, header, receiving))

    @rule(at=st.integers(0, 1), pick=st.integers(0, 99))
    def land(self, at: int, pick: int) -> None:
        """A wanted chunk of which nothing has come arrives whole."""
        session = self.session(at)
        wanted = [
            (inbound.machine.number, index)
            for inbound in self.transfers(session)
            for index in inbound.landings
            if not inbound.machine._chunks[index].pieces
        ]
        if wanted:
            number, index = wanted[pick % len(wanted)]
            header = DataHeader(number=number, index=index, offset=0, length=CHUNK, wire_length=CHUNK)
            receiving = _Receiving()
            assert session._place(header, receiving) is not None
            session._on_data(DataEnd(header=header, intact=True), receiving)

    @precondition(lambda self: self.writing)
    @rule(pick=st.integers(0, 9), intact=st.sampled_from([True, True, True, False]))
    def arrive(self, pick: int, intact: bool) -> None:
        session, header, receiving = self.writing.pop(pick % len(self.writing))
        session._on_data(DataEnd(header=header, intact=intact), receiving)

    @precondition(lambda self: self.writing)
    @rule()
    def abandon(self) -> None:
        session, _, receiving = self.writing.pop()
        session._abandon(receiving)
        session.close()

    @rule(at=st.integers(0, 1), pick=st.integers(0, 9), cancel=st.booleans())
    def finish(self, at: int, pick: int, cancel: bool) -> None:
        session = self.session(at)
        still_open = [t for t in self.transfers(session) if t.machine.state is State.OPEN]
        if still_open:
            machine = still_open[pick % len(still_open)].machine
            frame = (
                Cancel(number=machine.number)
                if cancel
                else End(number=machine.number, total=machine.num_offered)
            )
            self.frame(session, frame)

    @rule(at=st.integers(0, 1), chance=st.integers(0, 5))
    def cut(self, at: int, chance: int) -> None:
        if chance == 0:
            self.session(at).close()

    @rule(pick=st.integers(0, 4))
    def release(self, pick: int) -> None:
        self.hub.release(f"t{pick}")

    @rule(chance=st.integers(0, 5))
    def expire(self, chance: int) -> None:
        if chance == 0:
            self.hub.expire_leases(FAR_FUTURE_S)

    @rule(key=st.sampled_from(KEYS))
    def engine_stores(self, key: bytes) -> None:
        landing = self.store.reserve_anyway(key)
        if landing is not None:
            self.store.commit(landing)
            self.store.release([key])

    @invariant()
    def consistent(self) -> None:
        self.store.check_invariants()
        for key, waiters in self.hub._waiters.items():
            waiting = [inbound for inbound, _ in waiters if inbound.machine.is_active]
            assert not waiting or key in self.store._landing, "waits for a chunk that nobody lands"
        for session in self.hub._sessions.values():
            for inbound in session.transfers.values():
                inbound.machine.check_invariants()
                landing = inbound.machine._chunks if inbound.machine.is_active else []
                num_landing = sum(chunk.placement is Placement.LANDING for chunk in landing)
                assert len(inbound.landings) == num_landing
                if inbound.machine.is_active:
                    assert len(inbound.leased) == inbound.machine.num_held


TestInboundMachine = InboundMachine.TestCase
TestInboundMachine.settings = settings(
    max_examples=40 * EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
