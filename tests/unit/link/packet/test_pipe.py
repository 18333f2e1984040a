"""A line's arithmetic: no packet comes early or faster than the rate, and losses are as asked."""

import random

import pytest
from tests.unit.link.packet.test_frames import superpacket

from pdd.link.packet.frames import Packet, read_packet
from pdd.link.packet.middlebox import Middlebox
from pdd.link.packet.pipe import LineSettings, Pipe


def plain(num_bytes: int) -> Packet:
    return Packet(bytes(num_bytes), num_bytes)


def make_pipe(**settings: float) -> Pipe:
    return Pipe(LineSettings(**{"rate_bytes_per_s": 1e6, "delay_s": 0.01, **settings}), random.Random(1))


def drain(pipe: Pipe, *, start_s: float = 0.0, end_s: float = 100.0) -> list[tuple[float, Packet]]:
    """Everything that arrives until then, with when."""
    arrived: list[tuple[float, Packet]] = []
    now_s = start_s
    while (due_s := pipe.next_event_s()) is not None and due_s <= end_s:
        now_s = max(now_s, due_s)
        arrived += [(now_s, packet) for packet in pipe.advance(now_s)]
    return arrived


def test_a_packet_takes_its_time_on_the_wire_and_the_delay() -> None:
    pipe = make_pipe()
    pipe.push(plain(1000), 5.0)
    [(when_s, _)] = drain(pipe, start_s=5.0)
    assert when_s == pytest.approx(5.011)


def test_packets_follow_each_other_at_the_rate_and_in_order() -> None:
    pipe = make_pipe(queue_bytes=100_000)
    packets = [plain(1000 + i) for i in range(50)]
    for packet in packets:
        pipe.push(packet, 0.0)
    arrived = drain(pipe)
    assert [packet for _, packet in arrived] == packets
    assert arrived[-1][0] == pytest.approx(0.01 + sum(packet.wire_bytes for packet in packets) / 1e6)


def test_a_late_caller_loses_no_throughput() -> None:
    pipe = make_pipe(queue_bytes=100_000, delay_s=0.0)
    for _ in range(40):
        pipe.push(plain(1000), 0.0)
    assert len(pipe.advance(0.0205)) == 20


def test_the_queue_drops_what_does_not_fit() -> None:
    pipe = make_pipe(queue_bytes=10_000)
    for _ in range(20):
        pipe.push(plain(1000), 0.0)
    assert len(drain(pipe)) == 11  # one on the wire, ten behind it
    assert pipe.counters.queue_dropped_segments == 9


def test_of_a_superpacket_the_queue_takes_the_segments_that_fit() -> None:
    pipe = make_pipe(queue_bytes=4000)
    pipe.push(read_packet(superpacket(bytes(10_000))), 0.0)
    assert sum(packet.num_segments for _, packet in drain(pipe)) == 3
    assert pipe.counters.queue_dropped_segments == 7


def test_a_slow_line_delivers_the_first_segments_before_the_last() -> None:
    pipe = make_pipe(queue_bytes=100_000)
    pipe.push(read_packet(superpacket(bytes(10_000))), 0.0)
    times_s = [when_s for when_s, _ in drain(pipe)]
    assert len(times_s) == 10
    assert times_s[0] == pytest.approx(0.01 + 0.001054)


def test_losses_are_of_single_segments_at_the_ratio() -> None:
    pipe = make_pipe(rate_bytes_per_s=1e12, loss_ratio=0.02, queue_bytes=10**9)
    for i in range(1000):
        pipe.push(read_packet(superpacket(bytes(40_000))), float(i))
        pipe.advance(float(i))
    lost = pipe.counters.lost_segments
    drain(pipe, end_s=10_000)
    assert lost == pytest.approx(800, rel=0.12)
    assert pipe.counters.carried_segments == 40_000 - lost


def test_a_new_rate_holds_for_what_waits() -> None:
    pipe = make_pipe(queue_bytes=100_000, delay_s=0.0)
    for _ in range(20):
        pipe.push(plain(1000), 0.0)
    pipe.configure(LineSettings(rate_bytes_per_s=1e5, delay_s=0.0))
    assert drain(pipe)[-1][0] == pytest.approx(0.001 + 19 * 0.01)


def test_a_held_line_keeps_its_queue() -> None:
    pipe = make_pipe(delay_s=0.0)
    pipe.is_held = True
    pipe.push(plain(1000), 0.0)
    assert pipe.next_event_s() is None
    assert not pipe.advance(5.0)
    pipe.is_held = False
    assert len(drain(pipe, start_s=5.0)) == 1


def test_jitter_never_reorders() -> None:
    pipe = make_pipe(rate_bytes_per_s=1e8, jitter_s=0.005, queue_bytes=10**6)
    packets = [plain(100 + i) for i in range(100)]
    for i, packet in enumerate(packets):
        pipe.push(packet, i * 1e-4)
    arrived = drain(pipe)
    assert [packet for _, packet in arrived] == packets
    delays_s = [when_s - i * 1e-4 for i, (when_s, _) in enumerate(arrived)]
    assert max(delays_s) - min(delays_s) > 0.003


@pytest.mark.parametrize("wrong", [{"rate_bytes_per_s": 0}, {"loss_ratio": 1.0}, {"jitter_s": 1.0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"the (rate|loss|jitter)"):
        make_pipe(**wrong)


def test_a_middlebox_forgets_silent_connections_until_they_open_anew() -> None:
    box = Middlebox()
    data, opening = (read_packet(superpacket(b"", gso=0, flags=flags)) for flags in (0x10, 0x02))
    assert box.passes(opening, 0.0, idle_drop_s=60)
    assert box.passes(data, 59.0, idle_drop_s=60)
    assert box.passes(data, 118.0, idle_drop_s=60)
    assert not box.passes(data, 179.0, idle_drop_s=60)
    assert not box.passes(data, 180.0, idle_drop_s=60)
    assert box.passes(opening, 181.0, idle_drop_s=60)
    assert box.passes(data, 182.0, idle_drop_s=60)
    assert box.num_dropped == 2
