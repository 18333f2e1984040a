"""The receiving side: sessions of peers, the transfers in them, and the leases on what landed.

One lock guards all of it, the store's: machine steps take microseconds, and nothing is sent or received
while it is held. Frames go to a session's outbox; LANDED goes there only after the engine's socket has
taken the new keys, so that a request submitted after LANDED always finds them.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from pdd.agent.inbound_session import InboundSession, InboundTransfer
from pdd.agent.store import ChunkStore, Landing, Reservation
from pdd.transport.base import Stream
from pdd.wire import receiver as rx
from pdd.wire.frames import Landed

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Kept:
    peer: str
    keys: list[bytes]
    expires_s: float
    has_landed: bool


@dataclass(slots=True)
class InboundCounters:
    """Totals since the start, for metrics."""

    payload_bytes: int = 0
    landed: int = 0
    failed: int = 0
    corrupt_pieces: int = 0
    leases_expired: int = 0
    dropped_bytes: int = 0


class InboundHub:
    """All that peers push to this agent.

    Args:
        store: Where chunks land.
        lease_s: How long what landed, or what a lost session left, is kept for.
        flush_engine: Returns when the engine's socket has taken all keys made visible so far, or when it
            cannot be waited for any longer.
    """

    def __init__(self, store: ChunkStore, *, lease_s: float, flush_engine: Callable[[], None]) -> None:
        self.store = store
        self.counters = InboundCounters()
        self._lease_s = lease_s
        self._flush_engine = flush_engine
        self._sessions: dict[str, InboundSession] = {}
        self._kept: OrderedDict[str, list[_Kept]] = OrderedDict()
        self._waiters: dict[bytes, deque[tuple[InboundTransfer, int]]] = {}
        self._to_announce: list[InboundTransfer] = []
        self._is_closed = False

    def open_session(self, peer: str, session_id: str, control: Stream) -> InboundSession | None:
        """The peer's session, in place of any it had; None if the hub is closed."""
        session = InboundSession(self, peer=peer, session_id=session_id, control=control)
        with self.store.lock:
            if self._is_closed:
                session.close()
                return None
            stale = self._sessions.get(peer)
            self._sessions[peer] = session
        if stale is not None:
            _log.info("peer %s opened a new session; its old one is closed", peer)
            stale.close()
        return session

    def session(self, peer: str, session_id: str) -> InboundSession | None:
        """The session a data connection belongs to."""
        session = self._sessions.get(peer)
        return session if session is not None and session.session_id == session_id else None

    def release(self, transfer: str) -> bool:
        """No lease of the transfer is left; whether there was one. An open transfer is given up."""
        with self.store.lock:
            is_released = self._drop_kept(transfer)
            for session in list(self._sessions.values()):
                is_released |= session.give_up(
                    transfer, reason="cancelled", detail="released at the receiver"
                )
        self.announce()
        return is_released

    def expire_leases(self, now_s: float) -> None:
        """Leases that nobody released in time have ended."""
        with self.store.lock:
            for transfer, kept in list(self._kept.items()):
                expired = [lease for lease in kept if lease.expires_s <= now_s]
                if not expired:
                    continue
                for lease in expired:
                    kept.remove(lease)
                    self.store.release(lease.keys)
                    self.counters.leases_expired += lease.has_landed
                if not kept:
                    del self._kept[transfer]
                _log.warning("transfer %s: lease ended after %g s without release", transfer, self._lease_s)

    def drop_silent_sessions(self, now_s: float, *, timeout_s: float) -> None:
        """Sessions with open transfers that said nothing for so long are closed."""
        with self.store.lock:
            silent = [s for s in self._sessions.values() if s.is_active and now_s - s.heard_s > timeout_s]
        for session in silent:
            _log.warning("peer %s was silent for %g s; its session is closed", session.peer, timeout_s)
            session.close()

    def describe(self, transfer: str) -> dict[str, object] | None:
        """The receiver's view of a transfer for the control API, if it is known here."""
        with self.store.lock:
            for session in self._sessions.values():
                for inbound in session.transfers.values():
                    if inbound.transfer == transfer:
                        machine = inbound.machine
                        return {
                            "peer": session.peer,
                            "state": machine.state.name.lower(),
                            "chunks_offered": machine.num_offered,
                            "chunks_held": machine.num_held,
                        }
            return {"peer": None, "state": "kept"} if transfer in self._kept else None

    def num_transfers(self) -> int:
        """Open transfers."""
        with self.store.lock:
            return sum(t.machine.is_active for s in self._sessions.values() for t in s.transfers.values())

    def close(self) -> None:
        """All sessions are closed, and no new one is taken."""
        with self.store.lock:
            self._is_closed = True
            sessions = list(self._sessions.values())
        for session in sessions:
            session.close()

    def forget_session(self, session: InboundSession) -> None:
        """The session is no longer the peer's; called under the store's lock."""
        if self._sessions.get(session.peer) is session:
            del self._sessions[session.peer]

    def step(self, inbound: InboundTransfer, event: rx.Event) -> None:
        """The event's effects have happened; called under the store's lock, ``announce`` afterwards."""
        for effect in inbound.machine.step(event):
            self._apply(inbound, effect)
        if not inbound.machine.is_active:
            inbound.session.retire(inbound)

    def place_keys(self, inbound: InboundTransfer, first: int, keys: list[bytes]) -> None:
        """The offered keys were looked up, reserved or leased, and the machine has been told."""
        placements: list[rx.Placement] = []
        for index, key in enumerate(keys, start=first):
            placement = self._place(inbound, index, key)
            if placement is None:
                break
            placements.append(placement)
        self.step(inbound, rx.Offered(first=first, placements=tuple(placements)))
        if len(placements) < len(keys):
            self._refuse_full(inbound)

    def announce(self) -> None:
        """LANDED is queued for all that is whole; called without any lock."""
        with self.store.lock:
            whole, self._to_announce = self._to_announce, []
        if not whole:
            return
        self._flush_engine()
        for inbound in whole:
            inbound.session.outbox.put(Landed(number=inbound.machine.number))

    def _place(self, inbound: InboundTransfer, index: int, key: bytes) -> rx.Placement | None:
        found = self.store.reserve(key)
        if found is Reservation.FULL:
            return None
        if found is Reservation.HELD:
            inbound.leased[index] = key
            return rx.Placement.HELD
        if found is Reservation.BUSY:
            self._waiters.setdefault(key, deque()).append((inbound, index))
            return rx.Placement.ELSEWHERE
        assert isinstance(found, Landing)
        inbound.landings[index] = found
        return rx.Placement.LANDING

    def _refuse_full(self, inbound: InboundTransfer) -> None:
        counts = self.store.counts()
        detail = f"{counts.leased} of {counts.slots} slots are leased, the others are landing"
        self.step(inbound, rx.GiveUp(reason="store_full", detail=detail))

    def _apply(self, inbound: InboundTransfer, effect: rx.Effect) -> None:
        match effect:
            case rx.Send(frame=frame):
                inbound.session.outbox.put(frame)
            case rx.Commit(index=index):
                landing = inbound.landings.pop(index)
                self.store.commit(landing)
                inbound.leased[index] = landing.key
                self._tell_waiters_landed(landing.key)
            case rx.Abort(indices=indices):
                for landing in [inbound.landings.pop(index) for index in indices]:
                    self.store.abort(landing)
                    self._pass_on(landing.key)
            case rx.EndLeases(keep=keep):
                self._end_leases(inbound, keep=keep)
            case rx.Announce():
                self.counters.landed += 1
                self._to_announce.append(inbound)

    def _end_leases(self, inbound: InboundTransfer, *, keep: bool) -> None:
        keys = [inbound.leased[index] for index in sorted(inbound.leased)]
        inbound.leased.clear()
        has_landed = inbound.machine.state is rx.State.LANDED
        self.counters.failed += not (has_landed or keep)
        if keep and keys:
            expires_s = time.monotonic() + self._lease_s
            kept = _Kept(peer=inbound.session.peer, keys=keys, expires_s=expires_s, has_landed=has_landed)
            self._kept.setdefault(inbound.transfer, []).append(kept)
            return
        self.store.release(keys)
        self._drop_kept(inbound.transfer, peer=inbound.session.peer)

    def _drop_kept(self, transfer: str, *, peer: str | None = None) -> bool:
        """No lease that outlived its transfer is left, of one peer or of all; whether there was one."""
        kept = self._kept.pop(transfer, [])
        others = [lease for lease in kept if peer is not None and lease.peer != peer]
        for lease in kept:
            if lease not in others:
                self.store.release(lease.keys)
        if others:
            self._kept[transfer] = others
        return len(others) < len(kept)

    def _tell_waiters_landed(self, key: bytes) -> None:
        for waiter, index in self._waiters.pop(key, ()):
            if waiter.machine.is_active and self.store.lease(key):
                waiter.leased[index] = key
                self.step(waiter, rx.NowHeld(index=index))

    def _pass_on(self, key: bytes) -> None:
        """The landing of a key died: the first transfer that still waits for it lands it now."""
        waiters = self._waiters.get(key)
        while waiters:
            waiter, index = waiters.popleft()
            if not waiter.machine.is_active:
                continue
            found = self.store.reserve(key)
            if found is Reservation.HELD:
                waiter.leased[index] = key
                self.step(waiter, rx.NowHeld(index=index))
            elif isinstance(found, Landing):
                waiter.landings[index] = found
                self.step(waiter, rx.NowOurs(index=index))
                break
            elif found is Reservation.BUSY:
                waiters.appendleft((waiter, index))
                break
            else:
                self._refuse_full(waiter)
        if not waiters:
            self._waiters.pop(key, None)
