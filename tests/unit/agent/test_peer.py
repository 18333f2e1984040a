"""A link to one peer, without a peer."""

import threading

from pdd.agent.events import EventLog
from pdd.agent.peer import PeerLink
from pdd.agent.store import ChunkStore
from pdd.config.schema import AgentConfig
from pdd.core.errors import ConnectError
from pdd.transport.base import Listener, Stream, Transport


class NobodyThere(Transport):
    """Each attempt to dial ends in vain, but not before it is told to."""

    def __init__(self) -> None:
        self.is_dialled = threading.Event()
        self.may_end = threading.Event()

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        """Nobody."""
        self.is_dialled.set()
        self.may_end.wait()
        raise ConnectError(f"nobody at {address}")

    def listen(self, address: str) -> Listener:
        """Not asked for."""
        raise NotImplementedError(address)


def make_link(transport: Transport, events: EventLog) -> PeerLink:
    store = ChunkStore(
        chunk_bytes=64, capacity_bytes=640, on_added=lambda _key: None, on_removed=lambda _key: None
    )
    return PeerLink(
        own_id="p0",
        peer="md0",
        address="old:1",
        is_wan=True,
        settings=AgentConfig(),
        fingerprint={},
        transport=transport,
        store=store,
        lock=threading.RLock(),
        events=events,
    )


def ended_attempt(*, is_closed: bool) -> int:
    """How many events a link has left once an attempt has ended, closed meanwhile or not."""
    transport, events = NobodyThere(), EventLog()
    link = make_link(transport, events)
    link.warm()
    transport.is_dialled.wait()
    if is_closed:
        link.close()
    transport.may_end.set()
    while not link.attempts:
        pass
    with link.lock:  # the attempt's news is out
        seq = events.seq
    link.close()
    return seq


def test_an_attempt_in_vain_is_reported() -> None:
    assert ended_attempt(is_closed=False) > 0


def test_an_attempt_of_a_closed_link_says_nothing_of_the_peer_which_may_have_moved() -> None:
    assert ended_attempt(is_closed=True) == 0
