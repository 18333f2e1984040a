"""The measurements, and the one object they end in."""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from pdd.link.bench.agents import AgentPair
from pdd.link.bench.nixl import NixlMissingError, NixlPair
from pdd.link.bench.place import Place, cpu_s, private_memory_bytes
from pdd.link.bench.plain import PlainStreams
from pdd.link.packet.pipe import LineSettings
from pdd.link.packet.process import PacketLine

MIB: Final = 2**20
CHUNK_BYTES: Final = 1 * MIB
LARGE_BYTES: Final = 64 * MIB
MEDIUM_BYTES: Final = 10 * MIB
NUM_CONCURRENT: Final = 32
CONCURRENT_BYTES: Final = 8 * MIB
NUM_PLAIN_STREAMS: Final = 8
STORE_BYTES: Final = 768 * MIB
LOOPBACK_BYTES: Final = 256 * MIB
NUM_CONTROL: Final = 60
SETTLE_S: Final = 0.5
"""From the order of bulk until it fills the line and the sender's engine socket is quiet."""
PAYLOAD_RATIO: Final = 1448 / 1514
"""Payload of a full Ethernet frame of TCP over IPv4 with time stamps: what a line's rate is worth at most."""

REQUIRED: Final = (
    "goodput_vs_plain_tcp_ratio",
    "concurrent32_vs_plain_tcp_ratio",
    "goodput_vs_nixl_tcp_ratio",
    "small_transfer_vs_ideal_ratio",
    "lossy_line_ratio",
    "cpu_s_per_gb_send",
    "cpu_s_per_gb_recv",
    "tls_cpu_s_per_gb_send",
    "tls_cpu_s_per_gb_recv",
    "control_p99_saturated_vs_idle_ratio",
)
"""On the last line of every run; null if not measured."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What is measured, and on which line.

    ``rounds`` is how often each measurement is repeated; what is compared takes turns, and medians count.
    """

    rate_bytes_per_s: float = 125e6
    delay_s: float = 0.015
    loss_ratio: float = 0.0001
    rounds: int = 3
    streams: int | None = None
    parts: frozenset[str] = frozenset({"goodput", "small", "control", "lossy", "nixl", "loopback", "tls"})


@dataclass(slots=True)
class _Bench:
    settings: BenchSettings
    say: Say
    figures: dict[str, Any] = field(default_factory=dict)
    names: "itertools.count[int]" = field(default_factory=itertools.count)

    def push(self, pair: AgentPair, num_bytes: int, *, num: int = 1) -> dict[str, float]:
        """Seconds until each of ``num`` transfers of new chunks has landed."""
        orders = {}
        for _ in range(num):
            name = f"bench-{next(self.names)}"
            orders[name] = pair.prepare(name, num_bytes // CHUNK_BYTES)
        return pair.transfer(orders)

    def put(self, name: str, value: float | None) -> None:
        """The figure is in the result, and was said."""
        self.figures[name] = None if value is None else float(f"{value:.4g}")
        self.say(f"{name} = {self.figures[name]}")


def run_link_bench(settings: BenchSettings, say: Say) -> dict[str, Any]:
    """The figures of one run; those that could not be measured are None, with a reason.

    Args:
        settings: What to measure.
        say: Told of every figure as it comes.

    Raises:
        NamespacesRefusedError: If the packet emulator cannot run here.
    """
    bench = _Bench(settings, say)
    bench.figures.update(emulator="packet", rate_bytes_per_s=settings.rate_bytes_per_s)
    bench.figures.update(rtt_s=2 * settings.delay_s)
    bench.figures.update(dict.fromkeys(REQUIRED))
    line_settings = LineSettings(rate_bytes_per_s=settings.rate_bytes_per_s, delay_s=settings.delay_s)
    parts = settings.parts
    if parts - {"loopback", "tls"}:
        with PacketLine(line_settings) as line:
            _measure_on_line(bench, Place(line=line))
            state = line.call("state")
            overrun = sum(state[way]["overrun_packets"] for way in ("a_to_b", "b_to_a"))
            bench.figures["emulator_overrun_packets"] = overrun
    if "loopback" in parts:
        _measure_loopback(bench)
    if "tls" in parts:
        _measure_tls(bench)
    return bench.figures


def _measure_on_line(bench: _Bench, place: Place) -> None:
    parts = bench.settings.parts
    if "nixl" in parts:
        _measure_nixl(bench, place)
    with AgentPair(
        place, chunk_bytes=CHUNK_BYTES, store_bytes=STORE_BYTES, streams=bench.settings.streams
    ) as pair:
        bench.push(pair, LARGE_BYTES)
        if "goodput" in parts:
            _measure_goodput(bench, place, pair)
        if "small" in parts:
            _measure_small(bench, pair)
        if "nixl" in parts:
            _compare_nixl(bench, pair)
        if "control" in parts:
            _measure_control(bench, pair)
        if "lossy" in parts:
            _measure_lossy(bench, place, pair)


def _measure_goodput(bench: _Bench, place: Place, pair: AgentPair) -> None:
    """One large transfer, and many at once, in turns with plain streams."""
    one_s, several_s, ours_s, many_s, slowest = [], [], [], [], []
    total_bytes = NUM_CONCURRENT * CONCURRENT_BYTES
    with PlainStreams(place, 1) as one, PlainStreams(place, NUM_PLAIN_STREAMS) as several:
        for streams in (one, several):
            streams.send(LARGE_BYTES)
        for _ in range(bench.settings.rounds):
            one_s.append(one.send(LARGE_BYTES))
            several_s.append(several.send(LARGE_BYTES))
            ours_s.append(max(bench.push(pair, LARGE_BYTES).values()))
        several_many_s = several.send(total_bytes)
        for _ in range(max(1, bench.settings.rounds // 2)):
            landed_s = bench.push(pair, CONCURRENT_BYTES, num=NUM_CONCURRENT)
            many_s.append(max(landed_s.values()))
            # An even share of the time all take together is what the last one took.
            fair_bytes_per_s = total_bytes / many_s[-1] / NUM_CONCURRENT
            slowest.append(min(CONCURRENT_BYTES / took_s / fair_bytes_per_s for took_s in landed_s.values()))
    median = statistics.median
    bench.put("plain_tcp_bytes_per_s", LARGE_BYTES / median(one_s))
    bench.put("plain_tcp_streams_bytes_per_s", LARGE_BYTES / median(several_s))
    bench.put("goodput_bytes_per_s", LARGE_BYTES / median(ours_s))
    bench.put("goodput_vs_plain_tcp_ratio", median(several_s) / median(ours_s))
    bench.put("goodput_vs_one_tcp_stream_ratio", median(one_s) / median(ours_s))
    bench.put("concurrent32_vs_plain_tcp_ratio", several_many_s / median(many_s))
    bench.put("concurrent32_slowest_vs_fair_share_ratio", min(slowest))


def _measure_small(bench: _Bench, pair: AgentPair) -> None:
    """One chunk of 1 MiB on a warm link, beside a round trip and its time on the line."""
    settings = bench.settings
    line_s = MIB / (settings.rate_bytes_per_s * PAYLOAD_RATIO)
    took_s = [max(bench.push(pair, MIB).values()) for _ in range(5 * settings.rounds)]
    ideal_s = 2 * settings.delay_s + line_s
    bench.put("small_transfer_s", statistics.median(took_s))
    bench.put("small_transfer_vs_ideal_ratio", statistics.median(took_s) / ideal_s)
    bench.put("small_transfer_target_ratio", (2 * settings.delay_s + 1.3 * line_s) / ideal_s)


def _measure_nixl(bench: _Bench, place: Place) -> None:
    """NIXL over TCP, warm, for two sizes."""
    try:
        with NixlPair(place, max_bytes=LARGE_BYTES) as nixl:
            bench.put("nixl_cold_medium_s", nixl.send(MEDIUM_BYTES))
            nixl.send(LARGE_BYTES)
            for name, size in (("nixl_large_s", LARGE_BYTES), ("nixl_medium_s", MEDIUM_BYTES)):
                took_s = [nixl.send(size) for _ in range(bench.settings.rounds)]
                bench.put(name, statistics.median(took_s))
    except NixlMissingError as error:
        bench.figures["nixl_missing"] = str(error)


def _compare_nixl(bench: _Bench, pair: AgentPair) -> None:
    for name, size in (("nixl_large_s", LARGE_BYTES), ("nixl_medium_s", MEDIUM_BYTES)):
        took_s = [max(bench.push(pair, size).values()) for _ in range(bench.settings.rounds)]
        nixl_s = bench.figures.get(name)
        figure = "goodput_vs_nixl_tcp_ratio" if size == LARGE_BYTES else "goodput_10mib_vs_nixl_tcp_ratio"
        bench.put(figure, None if nixl_s is None else nixl_s / statistics.median(took_s))


def _measure_control(bench: _Bench, pair: AgentPair) -> None:
    """Round trips of OFFER and LANDED for chunks the receiver has, on an idle and on a full line."""
    keys = pair.prepare("held", 1)
    pair.transfer({"held": keys})

    def round_trips_s(is_over: Callable[[int], bool]) -> list[float]:
        took_s: list[float] = []
        while not is_over(len(took_s)):
            name = f"held-{next(bench.names)}"
            took_s.append(pair.transfer({name: keys})[name])
        return sorted(took_s)

    idle_s = round_trips_s(lambda num: num >= NUM_CONTROL)
    seconds = NUM_CONTROL * 4 * bench.settings.delay_s + 1
    num_bulk = max(1, round(seconds * bench.settings.rate_bytes_per_s / LARGE_BYTES))
    bulk = {
        f"bulk-{i}": pair.prepare(f"bulk-{i}", LARGE_BYTES // CHUNK_BYTES) for i in range(min(num_bulk, 9))
    }
    pair.order(bulk)
    time.sleep(SETTLE_S)
    full_s = round_trips_s(lambda num: num >= NUM_CONTROL or pair.has_landed(bulk))
    pair.wait_landed(bulk)
    p99 = [took_s[int(0.99 * (len(took_s) - 1))] for took_s in (idle_s, full_s)]
    bench.figures["control_samples"] = len(full_s)
    bench.put("control_p99_idle_s", p99[0])
    bench.put("control_p50_saturated_s", statistics.median(full_s))
    bench.put("control_p99_saturated_vs_idle_ratio", p99[1] / p99[0])


def _measure_lossy(bench: _Bench, place: Place, pair: AgentPair) -> None:
    """The same line losing some packets: our streams beside one cubic stream."""
    assert place.line is not None
    place.line.call("set", loss=str(bench.settings.loss_ratio))
    cubic_s, ours_s = [], []
    with PlainStreams(place, 1, congestion="cubic") as cubic:
        cubic.send(LARGE_BYTES)  # what it reaches before its first losses is not what it keeps
        for _ in range(bench.settings.rounds):
            cubic_s.append(cubic.send(LARGE_BYTES))
            ours_s.append(max(bench.push(pair, LARGE_BYTES).values()))
    place.line.call("set", loss="0")
    goodput = LARGE_BYTES / statistics.median(ours_s)
    bench.put("lossy_goodput_bytes_per_s", goodput)
    bench.put("lossy_line_ratio", goodput / (bench.settings.rate_bytes_per_s * PAYLOAD_RATIO))
    bench.put("lossy_vs_one_cubic_stream_ratio", statistics.mean(cubic_s) / statistics.mean(ours_s))


@dataclass(slots=True)
class _LoopbackRounds:
    """Repeated transfers without a line: how long each took, and the processor time of each side."""

    took_s: list[float] = field(default_factory=list)
    used_s: dict[str, list[float]] = field(default_factory=lambda: {"a": [], "b": []})

    def push(self, bench: _Bench, pair: AgentPair) -> None:
        """One more transfer has been made and measured."""
        name = f"loopback-{next(bench.names)}"
        keys = pair.prepare(name, LOOPBACK_BYTES // CHUNK_BYTES)
        before = {side: cpu_s(process.pid) for side, process in pair.processes.items()}
        self.took_s.append(pair.transfer({name: keys})[name])
        for side, process in pair.processes.items():
            self.used_s[side].append(cpu_s(process.pid) - before[side])

    def cpu_s_per_gb(self, side: str) -> float:
        """Processor seconds that a gigabyte costs a side."""
        return statistics.median(self.used_s[side]) / (LOOPBACK_BYTES / 1e9)


def _measure_loopback(bench: _Bench) -> None:
    """What the agents reach without a line, beside a bare socket reader, and what a GB costs each side."""
    place = Place()
    ours, bare_s, bare_cpu_s = _LoopbackRounds(), [], []
    with (
        AgentPair(place, chunk_bytes=CHUNK_BYTES, store_bytes=2 * LOOPBACK_BYTES) as pair,
        PlainStreams(place, 4) as bare,
    ):
        bench.push(pair, LOOPBACK_BYTES)
        bench.push(pair, LOOPBACK_BYTES)
        bare.send(LOOPBACK_BYTES)
        for _ in range(bench.settings.rounds):
            before_s = bare.receiver_cpu_s()
            bare_s.append(bare.send(LOOPBACK_BYTES))
            bare_cpu_s.append(bare.receiver_cpu_s() - before_s)
            ours.push(bench, pair)
        memory = {side: private_memory_bytes(process.pid) for side, process in pair.processes.items()}
    bench.put("loopback_bytes_per_s", LOOPBACK_BYTES / min(ours.took_s))
    bench.put("loopback_vs_bare_reader_ratio", statistics.median(bare_s) / statistics.median(ours.took_s))
    bench.put("cpu_s_per_gb_send", ours.cpu_s_per_gb("a"))
    bench.put("cpu_s_per_gb_recv", ours.cpu_s_per_gb("b"))
    bench.put("bare_reader_cpu_s_per_gb", statistics.median(bare_cpu_s) / (LOOPBACK_BYTES / 1e9))
    bench.put("memory_beyond_store_bytes", max(memory.values()) - 2 * LOOPBACK_BYTES)


def _measure_tls(bench: _Bench) -> None:
    """The same without a line and with TLS: what a GB costs each side."""
    rounds = _LoopbackRounds()
    with AgentPair(
        Place(), chunk_bytes=CHUNK_BYTES, store_bytes=2 * LOOPBACK_BYTES, is_encrypted=True
    ) as pair:
        bench.push(pair, LOOPBACK_BYTES)
        bench.push(pair, LOOPBACK_BYTES)
        for _ in range(bench.settings.rounds):
            rounds.push(bench, pair)
    bench.put("tls_loopback_bytes_per_s", LOOPBACK_BYTES / min(rounds.took_s))
    bench.put("tls_cpu_s_per_gb_send", rounds.cpu_s_per_gb("a"))
    bench.put("tls_cpu_s_per_gb_recv", rounds.cpu_s_per_gb("b"))
