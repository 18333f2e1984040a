"""Faults that come again and again under load; ``make soak`` runs them for long.

Each time: nothing corrupt is visible, every transfer ends once, nothing leaks, the next request is clean.
"""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration.agent.conftest import Fleet
from tests.kit.agent_fleet import RunningAgent, wait_for
from tests.kit.agent_load import PrefillLoad, check_no_growth, num_descriptors, num_threads
from tests.kit.engine_side import FakeEngine
from tests.kit.meddler import Meddler
from tests.kit.scale import SCALE

STORE = 64 * 2**20


class Pair:
    """Two agents with a relay between them that does what the test says."""

    def __init__(self, fleet: Fleet, **options: Any) -> None:
        fleet.configure(store_bytes=STORE, **options)
        self.meddler: Meddler = fleet.meddle("md0")
        self.p: RunningAgent = fleet.agent("p0")
        self.md: RunningAgent = fleet.agent("md0")
        self.main: FakeEngine = self.md.engine()
        self.prefill: FakeEngine = self.p.engine()
        self.load = PrefillLoad(self.p, self.prefill, receiver=self.md)
        self.load.run(3)
        self.md.wait_connected()  # one stream can carry them: one that stands late would count as a leak
        self.before = num_descriptors(), num_threads()

    def check(self) -> None:
        """What must be true after any fault, once it is over."""
        self.meddler.tamper = None
        self.meddler.let_go()
        self.prefill.push("clean", ["md0"], [f"clean-{i}" for i in range(5)])
        self.p.wait_event("landed", transfer="clean")
        self.main.check_load([f"clean-{i}" for i in range(5)])
        for agent in (self.p, self.md):
            space = agent.agent.space
            assert space is not None
            space.store.check_invariants()
            assert agent.agent.state()["transfers"] == 0
        wait_for(lambda: self.p.agent.state()["store"]["leased"] == 0, "the sender's leases to end")
        wait_for(
            lambda: len(self.main.mirror) == self.md.agent.state()["store"]["used"],
            "the mirror to be the store",
        )
        check_no_growth(self.before, slack=2)


@pytest.fixture
def pair(fleet: Fleet) -> Pair:
    return Pair(fleet, stall_timeout_s=20)


def test_all_connections_are_cut_again_and_again(pair: Pair) -> None:
    """At scale 100, 100,000 small transfers with all sockets cut every 1,000."""
    num, every = (1000 * SCALE, 10 * SCALE) if SCALE > 1 else (150, 50)
    outcome = pair.load.run(num, on_each=lambda i: pair.meddler.cut() if i % every == every - 1 else None)
    assert outcome.failed == {}
    pair.check()


def test_one_connection_in_a_hundred_is_reset(pair: Pair) -> None:
    rng = random.Random(1)

    def reset(_index: int, _at: int, data: bytes) -> bytes:
        if rng.random() < 0.01:
            pair.meddler.reset_one(rng)
        return data

    pair.meddler.tamper = reset
    outcome = pair.load.run(100 * SCALE)
    assert outcome.failed == {}
    pair.check()


def test_bytes_are_flipped_anywhere(pair: Pair) -> None:
    rng = random.Random(2)
    num_calls = num_flipped = 0

    def flip(_index: int, _at: int, data: bytes) -> bytes:
        nonlocal num_calls, num_flipped
        num_calls += 1
        if num_calls % 25:
            return data
        num_flipped += 1
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]

    pair.meddler.tamper = flip
    pair.load.run(60 * SCALE)
    assert num_flipped
    pair.meddler.tamper = None
    pair.check()
    names = [name for i in range(60) for name in pair.load.names(f"load-{i}") if pair.main.has([name])]
    pair.main.check_load(names)


def test_a_dropped_control_message_costs_a_session_and_nothing_else(pair: Pair) -> None:
    """What follows a missing frame makes no sense, or a ping counts more than came: a new session is made."""
    rng = random.Random(3)
    num_dropped = 0

    def drop(index: int, at: int, data: bytes) -> bytes:
        nonlocal num_dropped
        is_small_frame = 16 < len(data) < 400 and data[:2] == b"\x50\x44" and data[2] == 1
        if at and is_small_frame and rng.random() < 0.05:
            num_dropped += 1
            return b""
        return data

    pair.meddler.tamper = drop
    outcome = pair.load.run(60 * SCALE)
    assert num_dropped
    assert outcome.failed == {}
    pair.check()


@pytest.mark.parametrize("who", ["p0", "md0"])
def test_an_agent_is_killed_again_and_again(fleet: Fleet, who: str) -> None:
    # On a busy machine a process takes many seconds to come back.
    fleet.configure(store_bytes=STORE, lease_s=1, stall_timeout_s=120)
    meddler = fleet.meddle("md0")
    processes = {engine_id: fleet.process(engine_id) for engine_id in ("md0", "p0")}
    engines = {engine_id: processes[engine_id].engine() for engine_id in ("md0", "p0")}
    for turn in range(2 * SCALE):
        names = [f"{turn}-{i}" for i in range(300)]
        middle = meddler.num_forward_bytes + 100 * 4096
        meddler.tamper = lambda _i, _at, data, middle=middle: (
            meddler.hold() or data if meddler.num_forward_bytes > middle else data
        )
        engines["p0"].push(f"t{turn}", ["md0"], names)
        wait_for(lambda names=names: any(engines["md0"].has([n]) for n in names), "the first chunks")
        wait_for(lambda middle=middle: meddler.num_forward_bytes > middle, "the middle")
        processes[who].kill()
        assert not engines["md0"].has(names)
        meddler.tamper = None
        meddler.let_go()
        engines[who].close()
        processes[who] = fleet.process(who)
        engines[who] = processes[who].engine()
        if who == "p0":
            engines["p0"].push(f"again{turn}", ["md0"], names)
        engines["md0"].wait(lambda names=names: engines["md0"].has(names))
        engines["md0"].check_load(names[::10])
    for engine in engines.values():
        engine.close()
    assert not list(Path("/dev/shm").glob("pdd*"))


def test_a_full_store_refuses_and_serves_again(fleet: Fleet) -> None:
    fleet.configure(stores={"p0": STORE, "md0": 12 * 4096}, lease_s=60)
    p, md = fleet.agent("p0"), fleet.agent("md0")
    main, prefill = md.engine(), p.engine()
    for turn in range(3):
        prefill.push(f"a{turn}", ["md0"], [f"a{turn}-{i}" for i in range(8)])
        p.wait_event("landed", transfer=f"a{turn}")
        prefill.push(f"b{turn}", ["md0"], [f"b{turn}-{i}" for i in range(8)])
        failed = p.wait_event("failed", transfer=f"b{turn}")
        assert failed["reason"] == "store_full"
        assert "leased" in failed["detail"]
        main.check_load([f"a{turn}-{i}" for i in range(8)])
        assert md.agent.space.inbound.release(f"a{turn}")  # type: ignore[union-attr]
    assert md.agent.state()["store"]["leased"] == 0


def test_the_line_slows_down_and_recovers(pair: Pair) -> None:
    """From fast to a trickle and back: late, but nothing fails."""

    def trickle(_index: int, _at: int, data: bytes) -> bytes:
        time.sleep(0.002)
        return data

    def change(i: int) -> None:
        pair.meddler.tamper = trickle if 20 <= i % 60 < 40 else None

    assert pair.load.run(60 * SCALE, on_each=change).failed == {}
    pair.check()


def test_cancels_at_any_moment_free_everything(pair: Pair) -> None:
    rng = random.Random(4)
    space = pair.p.agent.space
    assert space is not None
    for i in range(40 * SCALE):
        pair.prefill.push(f"c{i}", ["md0"], [f"c{i}-{j}" for j in range(4)])
        if rng.random() < 0.5:
            space.outbound.cancel(f"c{i}", None)
        if pair.md.agent.space is not None and rng.random() < 0.3:
            pair.md.agent.space.inbound.release(f"c{i}")
    wait_for(lambda: pair.p.agent.state()["transfers"] == 0, "all to end")
    for i in range(40 * SCALE):
        assert pair.md.agent.space is not None
        pair.md.agent.space.inbound.release(f"c{i}")
    for i in range(3):
        pair.md.agent.space.inbound.release(f"load-{i}")  # type: ignore[union-attr]
    wait_for(lambda: pair.md.agent.state()["store"]["leased"] == 0, "the receiver's leases to end")
    pair.check()
