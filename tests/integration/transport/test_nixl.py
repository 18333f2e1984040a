"""NIXL over what UCX finds on one host: shared memory and TCP."""

from pathlib import Path

import pytest
from tests.kit.agent_fleet import RunningAgent, make_config
from tests.kit.transport_conformance import TransportConformance, in_thread, received

from pdd.core.errors import ConnectionLostError
from pdd.transport.base import Transport
from pdd.transport.nixl import NixlTransport
from pdd.transport.nixl_endpoint import BLOCK_BYTES, missing
from pdd.transport.tcp import TcpTransport

WHY_NOT = missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture(scope="module")
def nixl() -> NixlTransport:
    return NixlTransport()


class TestNixl(TransportConformance):
    @pytest.fixture
    def transport(self, nixl: NixlTransport) -> Transport:  # one endpoint a process, as in an agent
        return nixl

    def listen_address(self) -> str:
        return "127.0.0.1:0"


def test_two_endpoints_meet_more_than_once(nixl: NixlTransport) -> None:
    other = NixlTransport()
    listener = other.listen("127.0.0.1:0")
    pairs = [(nixl.dial(listener.address, timeout_s=10), listener.accept()) for _ in range(3)]
    data = bytes(range(256)) * (3 * BLOCK_BYTES // 256) + b"tail"
    for near, far in pairs:
        thread = in_thread(lambda near=near: near.send([data]))
        assert received(far, len(data)) == data
        thread.join(30)
    for end in (*[end for pair in pairs for end in pair], listener):
        end.close()


def test_agents_push_over_it(nixl: NixlTransport, tmp_path: Path) -> None:
    config = make_config(tmp_path, streams=2, store_bytes=32 * BLOCK_BYTES)
    sender, receiver = (
        RunningAgent(config, name, transport=transport)
        for name, transport in (("p0", nixl), ("md0", NixlTransport()))
    )
    try:
        options = {"chunk_bytes": BLOCK_BYTES + 64, "num_slots": 8}
        prefill, main = sender.engine(**options), receiver.engine(**options)
        names = [f"chunk-{i}" for i in range(12)]
        prefill.push("t", ["md0"], names)
        assert sender.wait_event("landed", transfer="t")["chunks"] == 12
        main.check_load(names)
    finally:
        sender.stop()
        receiver.stop()


def test_garbage_instead_of_a_greeting_ends_the_stream(nixl: NixlTransport) -> None:
    listener = nixl.listen("127.0.0.1:0")
    garbage = TcpTransport().dial(listener.address, timeout_s=10)
    stream = listener.accept()
    garbage.send([b"\xff" * 64])
    with pytest.raises(ConnectionLostError):
        stream.recv_into(memoryview(bytearray(1)))
    for end in (garbage, stream, listener):
        end.close()
