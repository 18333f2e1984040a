"""A firewall or NAT on the line: it forgets silent connections, and drops their packets without a word."""

from collections import OrderedDict
from typing import Final

from pdd.link.packet.frames import Packet, flow_of

_MAX_FLOWS: Final = 65536


class Middlebox:
    """Knows every TCP connection by its ends. Time enters as ``now_s``."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._seen_s: OrderedDict[tuple[bytes, bytes], float] = OrderedDict()

    def passes(self, packet: Packet, now_s: float, *, idle_drop_s: float) -> bool:
        """Whether the packet goes on. One of a connection silent for longer than ``idle_drop_s`` does not."""
        found = flow_of(packet)
        if found is None:
            return True
        flow, opens = found
        if not opens and now_s - self._seen_s.get(flow, now_s) > idle_drop_s:
            self.num_dropped += 1
            return False
        self._seen_s[flow] = now_s
        self._seen_s.move_to_end(flow)
        if len(self._seen_s) > _MAX_FLOWS:
            self._seen_s.popitem(last=False)
        return True
