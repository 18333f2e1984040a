"""The sending side: transfers ordered by the engine's requests, one leg per target.

One lock guards it. The store's lock, queues and outboxes may be taken under it, never the reverse, and
nothing is sent or received while it is held.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdd.agent.events import EventLog
from pdd.agent.outbound_leg import Leg
from pdd.agent.peer import PeerLink
from pdd.agent.send_queue import Urgency
from pdd.agent.store import ChunkStore
from pdd.wire import sender as tx

_log = logging.getLogger(__name__)
_HISTORY: Final = 1024
"""Ended transfers, and cancels that came before their transfer, that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A chunk of a request that is in the store now, leased by the caller for the length of the call."""

    key: bytes
    end_tokens: int


@dataclass(slots=True, eq=False, kw_only=True)
class OutboundTransfer:
    """The KV of one prompt on its way to its targets."""

    id: str
    rank: int
    """Its place among all that were begun."""
    num_expected: int
    num_tokens: int
    """Of the prompt that all chunks together hold."""
    begun_s: float
    urgency: Urgency
    keys: list[bytes] = field(default_factory=list)
    """Of the chunks so far, as far as the prefix is closed."""
    early: dict[int, bytes] = field(default_factory=dict)
    """Chunks seen before the ones in front of them."""
    leased: list[bytes] = field(default_factory=list)
    legs: dict[str, Leg] = field(default_factory=dict)

    @property
    def is_active(self) -> bool:
        """Whether any leg can still land."""
        return any(leg.machine.is_active for leg in self.legs.values())

    def stop(self, peers: Sequence[str] | None = None, *, reason: str, detail: str = "") -> list[str]:
        """The named legs, or all, have failed; returns which were open."""
        legs = [leg for leg in self.legs.values() if peers is None or leg.peer in peers]
        stopped = [leg for leg in legs if leg.machine.is_active]
        for leg in stopped:
            leg.stop(reason=reason, detail=detail)
        return [leg.peer for leg in stopped]


class Outbound:
    """All that this agent pushes to peers."""

    def __init__(self, store: ChunkStore, events: EventLog, *, chunk_tokens: int, piece_bytes: int) -> None:
        self.lock = threading.RLock()
        self._store = store
        self._events = events
        self._links: Mapping[str, PeerLink] = {}
        self._chunk_tokens = chunk_tokens
        self._piece_bytes = piece_bytes
        self._transfers: OrderedDict[str, OutboundTransfer] = OrderedDict()
        self._by_request: dict[str, OutboundTransfer] = {}
        self._early_cancels: OrderedDict[str, frozenset[str] | None] = OrderedDict()
        self._early_resumes: OrderedDict[str, None] = OrderedDict()
        self._num_begun = 0
        self.ended: Counter[str] = Counter()
        """Legs ended, by outcome (``landed`` or the reason), for metrics."""

    def set_links(self, links: Mapping[str, PeerLink]) -> None:
        """Legs go over these from now on; those over any other, held ones too, have failed."""
        with self.lock:
            self._links = links
            for leg in [leg for outgoing in self._transfers.values() for leg in outgoing.legs.values()]:
                if leg.link is not links.get(leg.peer):
                    detail = f"{leg.peer} has left the configuration, or moved in it"
                    leg.stop(reason="peer_down", detail=detail)

    def begin(
        self,
        *,
        request: str,
        transfer: str,
        targets: Sequence[str],
        prompt_tokens: int,
        urgency: Urgency,
        num_chunks: int | None = None,
    ) -> None:
        """Chunks of the request go to the targets from now on; if held, to other sites only after resume.

        ``num_chunks`` is how many there are, if not one for each ``chunk_tokens`` of the prompt.
        """
        with self.lock:
            known = self._transfers.get(transfer)
            if known is not None and known.is_active:
                _log.warning("transfer %s was ordered again while it is open; ignored", transfer)
                return
            self._num_begun += 1
            outgoing = OutboundTransfer(
                id=transfer,
                rank=self._num_begun,
                num_expected=prompt_tokens // self._chunk_tokens if num_chunks is None else num_chunks,
                num_tokens=prompt_tokens // self._chunk_tokens * self._chunk_tokens,
                begun_s=time.monotonic(),
                urgency=urgency,
            )
            self._transfers[transfer] = outgoing
            self._transfers.move_to_end(transfer)
            self._by_request[request] = outgoing
            for target in dict.fromkeys(targets):
                self._begin_leg(outgoing, target)
            self._trim()

    def stored(self, request: str, chunks: Sequence[StoredChunk]) -> None:
        """The chunks are offered to the request's targets, in prefix order as far as it is closed."""
        with self.lock:
            outgoing = self._by_request.get(request)
            if outgoing is None or not outgoing.is_active:
                return
            for chunk in chunks:
                index = chunk.end_tokens // self._chunk_tokens - 1
                is_ours = 0 <= index < outgoing.num_expected and index >= len(outgoing.keys)
                if is_ours and index not in outgoing.early and self._store.lease(chunk.key):
                    outgoing.leased.append(chunk.key)
                    outgoing.early[index] = chunk.key
            first = len(outgoing.keys)
            while (key := outgoing.early.pop(len(outgoing.keys), None)) is not None:
                outgoing.keys.append(key)
            if len(outgoing.keys) > first:
                for leg in outgoing.legs.values():
                    leg.grow(first)

    def not_stored(self, request: str) -> None:
        """A chunk of the request found no room in the store: its transfer cannot become whole."""
        counts = self._store.counts()
        detail = f"no room at the sender: {counts.leased} of {counts.slots} slots are leased"
        with self.lock:
            outgoing = self._by_request.get(request)
            if outgoing is not None:
                outgoing.stop(reason="store_full", detail=detail)

    def finished(self, request: str) -> None:
        """No more chunks come for the request; a transfer that lacks some has failed."""
        with self.lock:
            outgoing = self._by_request.pop(request, None)
            if outgoing is None or len(outgoing.keys) == outgoing.num_expected:
                return
            detail = f"{len(outgoing.keys)} of {outgoing.num_expected} chunks were seen by the request's end"
            outgoing.stop(reason="prefill_incomplete", detail=detail)

    def cancel(self, transfer: str, peers: Sequence[str] | None) -> list[str]:
        """The named legs, or all, are cancelled; returns which were open. Remembered if it came early."""
        with self.lock:
            outgoing = self._transfers.get(transfer)
            if outgoing is None:
                self._early_cancels[transfer] = None if peers is None else frozenset(peers)
                while len(self._early_cancels) > _HISTORY:
                    self._early_cancels.popitem(last=False)
                return [] if peers is None else list(peers)
            return outgoing.stop(peers, reason="cancelled")

    def resume(self, transfer: str) -> list[str]:
        """No leg of the transfer is held; returns which were. Remembered if it came before the order."""
        with self.lock:
            outgoing = self._transfers.get(transfer)
            if outgoing is None:
                self._early_resumes[transfer] = None
                while len(self._early_resumes) > _HISTORY:
                    self._early_resumes.popitem(last=False)
                return []
            return [leg.peer for leg in outgoing.legs.values() if leg.resume()]

    def end_old_holds(self, now_s: float, *, limit_s: float) -> None:
        """Legs held for longer go on: a router that died must not keep the sender's chunks for ever."""
        with self.lock:
            for outgoing in self._transfers.values():
                if outgoing.urgency.is_held and now_s - outgoing.begun_s > limit_s:
                    for leg in outgoing.legs.values():
                        if leg.resume():
                            _log.warning("transfer %s was held for %g s; it goes on", outgoing.id, limit_s)

    def describe(self, transfer: str) -> dict[str, object] | None:
        """The sender's view of a transfer for the control API, if it is known here."""
        with self.lock:
            outgoing = self._transfers.get(transfer)
            if outgoing is None:
                return None
            return {leg.peer: leg.describe() for leg in outgoing.legs.values()}

    def num_transfers(self) -> int:
        """Open transfers."""
        with self.lock:
            return sum(outgoing.is_active for outgoing in self._transfers.values())

    def close(self, *, reason: str, detail: str) -> None:
        """Every open leg has failed."""
        with self.lock:
            for outgoing in self._transfers.values():
                outgoing.stop(reason=reason, detail=detail)

    def _begin_leg(self, outgoing: OutboundTransfer, peer: str) -> None:
        link = self._links.get(peer)
        leg = Leg(
            transfer=outgoing,
            peer=peer,
            link=link,
            machine=tx.Sender(
                transfer=outgoing.id,
                chunk_bytes=self._store.chunk_bytes,
                piece_bytes=self._piece_bytes,
            ),
            events=self._events,
            on_ended=self._ended,
        )
        outgoing.legs[peer] = leg
        cancelled = self._early_cancels.get(outgoing.id, frozenset())
        if cancelled is None or peer in cancelled:
            leg.stop(reason="cancelled", detail="before it began")
        elif link is None:
            leg.stop(reason="unknown_peer", detail=f"no other engine is called {peer!r}")
        elif outgoing.num_expected == 0:
            leg.land_empty()
        elif outgoing.urgency.is_held and link.is_wan and outgoing.id not in self._early_resumes:
            leg.is_held = True
        else:
            link.attach(leg)

    def _ended(self, outgoing: OutboundTransfer, outcome: str) -> None:
        self.ended[outcome] += 1
        if not outgoing.is_active:
            leased, outgoing.leased = outgoing.leased, []
            self._store.release(leased)

    def _trim(self) -> None:
        while len(self._transfers) > _HISTORY:
            oldest = next((t for t, outgoing in self._transfers.items() if not outgoing.is_active), None)
            if oldest is None:
                return
            del self._transfers[oldest]
