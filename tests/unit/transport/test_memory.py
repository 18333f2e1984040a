from tests.kit.transport_conformance import TransportConformance

from pdd.transport.base import Transport
from pdd.transport.memory import MemoryTransport


class TestMemoryTransport(TransportConformance):
    def make_transport(self) -> Transport:
        return MemoryTransport()

    def listen_address(self) -> str:
        return "memory:0"

    def dead_address(self) -> str:
        return "memory:999"
