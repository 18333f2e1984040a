"""The connections of one peer that belong together, and the transfers it announced on them.

What happens to transfers, store and leases is the hub's (``inbound``); this reads the wire.
"""

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdd.agent.connection import read_control, read_frames
from pdd.agent.outbox import ControlOutbox
from pdd.agent.store import Landing
from pdd.core.errors import ProtocolError, RemoteProtocolError, TransportError
from pdd.transport.base import Stream
from pdd.wire import receiver as rx
from pdd.wire.decoder import DataEnd, DataHeader, FrameDecoder
from pdd.wire.frames import Cancel, ControlFrame, End, Offer, Ping, Pong

if TYPE_CHECKING:
    from pdd.agent.inbound import InboundHub

_log = logging.getLogger(__name__)
_OFFER_WAIT_S: Final = 5.0
"""How much later than DATA its OFFER may come; a lost packet costs a round trip or some 200 ms."""
_MAX_OPEN_TRANSFERS: Final = 4096
"""Per session; a peer with more open transfers than this has lost count."""


@dataclass(slots=True, eq=False)
class InboundTransfer:
    """One transfer in one session."""

    transfer: str
    machine: rx.Receiver
    session: "InboundSession"
    landings: dict[int, Landing] = field(default_factory=dict)
    leased: dict[int, bytes] = field(default_factory=dict)


class InboundSession:
    """The connections of one peer that belong together, and the transfers it announced on them."""

    def __init__(self, hub: "InboundHub", *, peer: str, session_id: str, control: Stream) -> None:
        self.peer = peer
        self.session_id = session_id
        self.transfers: dict[int, InboundTransfer] = {}
        self.heard_s = time.monotonic()
        self.outbox = ControlOutbox(control, name=f"pdd-in-{peer}-out")
        self._hub = hub
        self._offered = threading.Condition(hub.store.lock)
        self._control = control
        self._data_streams: list[Stream] = []
        self._is_closed = False

    @property
    def is_active(self) -> bool:
        """Whether a transfer is open."""
        return any(inbound.machine.is_active for inbound in self.transfers.values())

    def serve_control(self, decoder: FrameDecoder) -> None:
        """The control connection has ended, and with it the session."""
        try:
            for event in read_control(self._control, decoder):
                self.heard_s = time.monotonic()
                with self._hub.store.lock:
                    self._on_frame(event.frame)
                self._hub.announce()
        except (ProtocolError, TransportError) as error:
            _log.info("session of peer %s ended: %s", self.peer, error)
        finally:
            self.close()

    def serve_data(self, stream: Stream, decoder: FrameDecoder) -> None:
        """A data connection has ended, and with it the session: what it lost must be offered again."""
        with self._hub.store.lock:
            if self._is_closed:
                stream.close()
                return
            self._data_streams.append(stream)
        receiving = _Receiving()
        try:
            decoder.expect_data_only()
            for event in read_frames(stream, decoder, lambda header: self._place(header, receiving)):
                if not isinstance(event, DataEnd):
                    raise RemoteProtocolError("control frame on a data connection")
                self._on_data(event, receiving)
        except (ProtocolError, TransportError) as error:
            _log.info("data connection of peer %s ended: %s", self.peer, error)
        finally:
            self._abandon(receiving)
            self.close()

    def give_up(self, transfer: str, *, reason: str, detail: str) -> bool:
        """The transfer is not open here; whether it was. Called under the store's lock."""
        for inbound in list(self.transfers.values()):
            if inbound.transfer == transfer and inbound.machine.is_active:
                self._hub.step(inbound, rx.GiveUp(reason=reason, detail=detail))
                return True
        return False

    def retire(self, inbound: InboundTransfer) -> None:
        """Ended transfers are bounded: late frames for one that is forgotten are dropped all the same."""
        if len(self.transfers) > _MAX_OPEN_TRANSFERS // 4:
            ended = [n for n, t in self.transfers.items() if not t.machine.is_active and t is not inbound]
            for number in ended[: len(ended) // 2]:
                del self.transfers[number]

    def close(self) -> None:
        """All connections are closed; what was not whole is given back, what is leased runs out."""
        with self._hub.store.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._offered.notify_all()
            self._hub.forget_session(self)
            for inbound in list(self.transfers.values()):
                self._hub.step(inbound, rx.ConnectionLost())
            streams = [self._control, *self._data_streams]
        for stream in streams:
            stream.close()
        self.outbox.close()
        self._hub.announce()

    def _on_frame(self, frame: ControlFrame) -> None:
        if self._is_closed:
            return
        match frame:
            case Offer():
                self._on_offer(frame)
            case End(number=number, total=total):
                self._hub.step(self._known(number), rx.EndSeen(total=total))
            case Cancel(number=number):
                if number in self.transfers:  # else it was never offered: cancelled before its first chunk
                    self._hub.step(self.transfers[number], rx.CancelSeen())
            case Ping(nonce=nonce):
                self.outbox.put(Pong(nonce=nonce))
            case _:
                raise RemoteProtocolError(f"{type(frame).__name__} from the sending side")

    def _on_offer(self, offer: Offer) -> None:
        inbound = self.transfers.get(offer.number)
        if inbound is None:
            if len(self.transfers) >= _MAX_OPEN_TRANSFERS:
                raise RemoteProtocolError(f"more than {_MAX_OPEN_TRANSFERS} transfers in one session")
            machine = rx.Receiver(number=offer.number, chunk_bytes=self._hub.store.chunk_bytes)
            inbound = InboundTransfer(transfer=offer.transfer, machine=machine, session=self)
            self.transfers[offer.number] = inbound
        if inbound.machine.is_active and offer.first == inbound.machine.num_offered:
            self._hub.place_keys(inbound, offer.first, offer.keys)
        else:
            self._hub.step(inbound, rx.Offered(first=offer.first, placements=()))
        self._offered.notify_all()

    def _known(self, number: int) -> InboundTransfer:
        try:
            return self.transfers[number]
        except KeyError:
            raise RemoteProtocolError(f"transfer {number} was never offered") from None

    def _place(self, header: DataHeader, receiving: "_Receiving") -> memoryview | None:
        self.heard_s = time.monotonic()
        with self._hub.store.lock:
            if header.is_unasked:
                self._wait_for_offer(header)
            inbound = None if self._is_closed else self.transfers.get(header.number)
            if inbound is None or not inbound.machine.claim(
                index=header.index,
                offset=header.offset,
                length=header.length,
                is_unasked=header.is_unasked,
            ):
                self._hub.counters.dropped_bytes += header.length
                return None
            landing = inbound.landings[header.index]
            self._hub.store.begin_write(landing)
            receiving.inbound, receiving.landing = inbound, landing
        return landing.row.data[header.offset : header.offset + header.length]

    def _wait_for_offer(self, header: DataHeader) -> None:
        """The chunk was offered, or the session is closed; called under the store's lock.

        OFFER left before the DATA, but on another connection. Until it is here, what is on this connection
        waits in the sockets: it takes no memory, and nothing is ever dropped that the sender takes for sent.

        Raises:
            RemoteProtocolError: If it does not come. The session ends, and the next one offers all again.
        """

        def is_offered() -> bool:
            inbound = self.transfers.get(header.number)
            is_known = inbound is not None and (
                not inbound.machine.is_active or header.index < inbound.machine.num_offered
            )
            return self._is_closed or is_known

        if not self._offered.wait_for(is_offered, _OFFER_WAIT_S):
            raise RemoteProtocolError(f"DATA of transfer {header.number}, which was not offered")

    def _on_data(self, event: DataEnd, receiving: "_Receiving") -> None:
        inbound, landing = receiving.take()
        if inbound is None or landing is None:
            return
        header = event.header
        with self._hub.store.lock:
            self._hub.store.end_write(landing)
            self._hub.counters.payload_bytes += header.length
            self._hub.counters.corrupt_pieces += not event.intact
            arrived = rx.PieceArrived(index=header.index, offset=header.offset, intact=event.intact)
            self._hub.step(inbound, arrived)
        self._hub.announce()

    def _abandon(self, receiving: "_Receiving") -> None:
        _, landing = receiving.take()
        if landing is not None:
            self._hub.store.end_write(landing)


@dataclass(slots=True)
class _Receiving:
    """The piece that a data connection is writing to its slot now."""

    inbound: InboundTransfer | None = None
    landing: Landing | None = None

    def take(self) -> tuple[InboundTransfer | None, Landing | None]:
        taken = self.inbound, self.landing
        self.inbound = self.landing = None
        return taken
