"""Two agents with a packet-level line between them that changes under their transfers."""

import time
from collections.abc import Iterator

import pytest
from tests.kit.scale import SCALE

from pdd.link.bench.agents import AgentPair
from pdd.link.bench.place import Place
from pdd.link.packet.pipe import LineSettings
from pdd.link.packet.process import PacketLine, refusal

WHY_NOT = refusal()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no network namespaces here: {WHY_NOT}")
takes_minutes = pytest.mark.skipif(SCALE == 1, reason="takes minutes: make soak")
MIB = 2**20


@pytest.fixture
def line() -> Iterator[PacketLine]:
    with PacketLine(LineSettings(rate_bytes_per_s=125e6, delay_s=0.015)) as line:
        yield line


@pytest.fixture
def pair(line: PacketLine) -> Iterator[AgentPair]:
    with AgentPair(Place(line=line), chunk_bytes=MIB, store_bytes=256 * MIB, streams=4) as pair:
        pair.transfer({"warm": pair.prepare("warm", 8)})
        yield pair


def dropped(line: PacketLine) -> int:
    return int(line.call("state")["middlebox_dropped_packets"])


def test_a_transfer_outlasts_a_line_that_falls_to_a_twentieth_and_recovers(
    line: PacketLine, pair: AgentPair
) -> None:
    orders = {f"t{i}": pair.prepare(f"t{i}", 24) for i in range(4)}
    line.call("set", rate="50mbit")
    pair.order(orders)
    time.sleep(1)  # 6 MB at most have crossed
    assert not pair.has_landed(orders)
    line.call("set", rate="1gbit")
    pair.wait_landed(orders)
    pair.transfer({"after": pair.prepare("after", 8)})


@takes_minutes
@pytest.mark.timeout(600)
def test_keepalive_holds_connections_through_a_middlebox_that_forgets_after_a_minute(
    line: PacketLine, pair: AgentPair
) -> None:
    line.call("set", idle_drop="60s")
    time.sleep(150)
    pair.transfer({"after": pair.prepare("after", 64)})
    assert dropped(line) == 0


@takes_minutes
def test_connections_that_a_middlebox_forgot_are_replaced(line: PacketLine, pair: AgentPair) -> None:
    line.call("set", idle_drop="3s")  # sooner than any keepalive
    pair.transfer({"seen": pair.prepare("seen", 8)})
    time.sleep(5)
    pair.transfer({"after": pair.prepare("after", 64)})
    assert dropped(line) > 0
