"""What goes wrong between agents, and what is said, freed and kept then."""

import contextlib
import socket

import pytest
from tests.integration.agent.conftest import Fleet
from tests.kit.agent_fleet import RunningAgent, wait_for
from tests.kit.engine_side import FakeEngine, fingerprint, key_of

from pdd.core.fingerprint import FIELDS
from pdd.wire.frames import Offer, encode_control

CHUNK = 64 * 2**10


def _start(fleet: Fleet) -> tuple[RunningAgent, RunningAgent, FakeEngine, FakeEngine]:
    p, md = fleet.agent("p0"), fleet.agent("md0")
    main = md.engine(chunk_bytes=CHUNK)  # first: p dials as soon as it has its engine
    return p, md, p.engine(chunk_bytes=CHUNK), main


def leased(agent: RunningAgent) -> int:
    return int(agent.agent.state()["store"]["leased"])


def used(agent: RunningAgent) -> int:
    return int(agent.agent.state()["store"]["used"])


def test_cancel_is_said_at_once_and_frees_both_sides(fleet: Fleet) -> None:
    fleet.configure(store_bytes=64 * 2**20)
    meddler = fleet.meddle("md0")
    p, md, prefill, main = _start(fleet)
    prefill.push("warm", ["md0"], ["w"])
    p.wait_event("landed", transfer="warm")
    md.agent.space.inbound.release("warm")  # type: ignore[union-attr]
    meddler.hold()
    prefill.begin("r", "t", ["md0"], 400 * 32)
    prefill.store("r", range(400))
    prefill.finish("r")
    space = p.agent.space
    assert space is not None
    meddler.let_go()
    wait_for(lambda: main.mirror & {key_of(i) for i in range(400)}, "the first chunks")
    meddler.hold()
    space.outbound.cancel("t", None)
    failed = p.wait_event("failed", transfer="t")  # while the line is held: the network has no say in it
    assert failed["reason"] == "cancelled"
    meddler.let_go()
    wait_for(lambda: leased(md) == 0 and leased(p) == 0, "leases to end")
    # Late bytes were dropped, and what had not landed was given back.
    wait_for(lambda: used(md) == len(main.mirror), "slots to be free")
    prefill.push("again", ["md0"], range(400))
    p.wait_event("landed", transfer="again")
    main.check_load(range(400))
    # Idempotent, and too late for a transfer that has landed.
    assert space.outbound.cancel("again", None) == []


def test_a_cancel_that_comes_first_is_remembered(fleet: Fleet) -> None:
    p, md = fleet.agents("p0", "rld0", "md0")[:2]
    prefill, _relay = p.engine(), md.engine()
    assert p.agent.space is not None
    p.agent.space.outbound.cancel("t", ["md0"])
    prefill.push("t", ["rld0", "md0"], range(3))
    assert p.wait_event("failed", transfer="t", peer="md0")["reason"] == "cancelled"
    p.wait_event("landed", transfer="t", peer="rld0")


def test_release_ends_the_lease_and_only_once(fleet: Fleet) -> None:
    p, md = fleet.agents()
    prefill, _main = p.engine(), md.engine()
    prefill.push("t", ["md0"], range(5))
    p.wait_event("landed", transfer="t")
    space = md.agent.space
    assert space is not None
    assert leased(md) == 5
    assert space.inbound.release("t")
    assert leased(md) == 0
    assert not space.inbound.release("t")
    assert not space.inbound.release("never")


def test_a_lease_nobody_releases_runs_out(fleet: Fleet) -> None:
    p, md = fleet.agents(lease_s=0.2)
    main, prefill = md.engine(), p.engine()
    prefill.push("t", ["md0"], range(5))
    p.wait_event("landed", transfer="t")
    wait_for(lambda: leased(md) == 0, "the lease to end")
    main.check_load(range(5))


def test_a_full_receiver_says_so_and_keeps_what_is_leased(fleet: Fleet) -> None:
    p, md = fleet.agents(stores={"md0": 10 * 4096})
    main, prefill = md.engine(), p.engine()
    prefill.push("a", ["md0"], range(6))
    p.wait_event("landed", transfer="a")
    prefill.push("b", ["md0"], range(100, 106))
    failed = p.wait_event("failed", transfer="b")
    assert failed["reason"] == "store_full"
    main.check_load(range(6))
    wait_for(lambda: leased(md) == 6 and used(md) - len(main.mirror) == 0, "the rest to be free")
    md.agent.space.inbound.release("a")  # type: ignore[union-attr]
    prefill.push("c", ["md0"], range(200, 210))
    p.wait_event("landed", transfer="c")
    main.check_load(range(200, 210))
    main.wait(lambda: not main.has([0]))


def test_a_full_sender_says_so(fleet: Fleet) -> None:
    p, md = fleet.agents(stores={"p0": 4 * 4096})
    prefill, _main = p.engine(), md.engine()
    prefill.push("t", ["md0"], range(8))
    failed = p.wait_event("failed", transfer="t")
    assert failed["reason"] in ("store_full", "prefill_incomplete")
    wait_for(lambda: leased(p) == 0, "the leases to end")


@pytest.mark.parametrize("field", FIELDS)
def test_other_chunks_are_refused_by_name_of_the_difference(fleet: Fleet, field: str) -> None:
    """When peers meet, before anything is sent: whatever gives bytes their meaning, alone, is enough."""
    p, md = fleet.agents()
    ours = fingerprint(chunk_bytes=4096, chunk_tokens=32)[field]
    theirs = {"chunk_bytes": 8192, "chunk_tokens": 16}.get(field, "other")
    _main = md.engine(**{field: theirs})  # first: p dials as soon as it has its engine
    p.engine()
    link = p.wait_event("link", peer="md0", state="incompatible")
    assert f"{field}: {ours} != {theirs}" in link["reason"]
    assert p.agent.state()["peers"][0]["state"] == "incompatible"


def test_a_transfer_to_other_chunks_fails_by_name_of_the_difference(fleet: Fleet) -> None:
    p, md = fleet.agents()
    _main = md.engine(dtype="float32")
    prefill = p.engine()
    prefill.push("t", ["md0"], range(3))
    failed = p.wait_event("failed", transfer="t")
    assert (failed["reason"], failed["wan_bytes"]) == ("incompatible", 0)
    assert "dtype: test != float32" in failed["detail"]


def test_a_peer_without_engine_is_waited_for(fleet: Fleet) -> None:
    p, md = fleet.agents()
    prefill = p.engine()
    prefill.push("t", ["md0"], range(3))
    assert "not_ready" in p.wait_event("stalled", transfer="t")["detail"]
    main = md.engine()
    p.wait_event("landed", transfer="t")
    main.check_load(range(3))


def test_an_absent_peer_is_stalled_at_once_and_down_in_the_end(fleet: Fleet) -> None:
    fleet.configure(stall_timeout_s=0.5)
    p = fleet.agent("p0")
    prefill = p.engine()
    assert p.wait_event("link", peer="md0")["state"] == "down"
    prefill.push("t", ["md0"], range(3))
    p.wait_event("stalled", transfer="t")
    assert p.wait_event("failed", transfer="t")["reason"] == "peer_down"
    wait_for(lambda: leased(p) == 0, "the leases to end")  # the event comes first


def test_after_a_cut_only_what_is_missing_is_sent_again(fleet: Fleet) -> None:
    fleet.configure(store_bytes=64 * 2**20)
    meddler = fleet.meddle("md0")
    p, _md, prefill, main = _start(fleet)
    cut_after = 5 * 2**20

    def hold_in_the_middle(_index: int, _at: int, data: bytes) -> bytes:
        if meddler.num_forward_bytes > cut_after:
            meddler.hold()
        return data

    meddler.tamper = hold_in_the_middle
    prefill.push("t", ["md0"], range(300))
    wait_for(lambda: meddler.num_forward_bytes > cut_after and len(main.mirror) > 10, "the middle")
    meddler.tamper = None
    meddler.cut()
    meddler.let_go()
    p.wait_event("stalled", transfer="t")
    landed = p.wait_event("landed", transfer="t")
    main.check_load(range(300))
    assert landed["chunks_sent"] <= 300
    assert landed["payload_bytes"] < 300 * CHUNK + 12 * 2**20


def test_a_receiver_that_is_killed_and_comes_back_gets_all(fleet: Fleet) -> None:
    fleet.configure(store_bytes=64 * 2**20, stall_timeout_s=120)
    meddler = fleet.meddle("md0")
    p = fleet.agent("p0")
    prefill = p.engine(chunk_bytes=CHUNK)
    process = fleet.process("md0")
    main = process.engine(chunk_bytes=CHUNK)
    prefill.push("warm", ["md0"], ["w"])
    p.wait_event("landed", transfer="warm")
    meddler.tamper = lambda _i, _at, data: meddler.hold() or data if len(main.mirror) > 20 else data
    prefill.push("t", ["md0"], range(300))
    wait_for(lambda: len(main.mirror) > 20, "the middle")
    process.kill()
    meddler.tamper = None
    meddler.let_go()
    p.wait_event("stalled", transfer="t")
    main.close()
    process = fleet.process("md0")
    main = process.engine(chunk_bytes=CHUNK)
    assert main.welcome is not None
    assert main.welcome.keys == []  # the mirror may have more by now
    p.wait_event("landed", transfer="t")
    main.check_load(range(300))
    main.close()


def test_a_sender_that_is_killed_leaves_nothing_but_a_lease_that_ends(fleet: Fleet) -> None:
    fleet.configure(store_bytes=64 * 2**20, lease_s=0.3)
    meddler = fleet.meddle("md0")
    md = fleet.agent("md0")
    main = md.engine(chunk_bytes=CHUNK)
    process = fleet.process("p0")
    prefill = process.engine(chunk_bytes=CHUNK)
    meddler.tamper = lambda _i, _at, data: meddler.hold() or data if len(main.mirror) > 20 else data
    prefill.push("t", ["md0"], range(300))
    wait_for(lambda: len(main.mirror) > 20, "the middle")
    process.kill()
    prefill.close()
    meddler.tamper = None
    meddler.let_go()
    wait_for(lambda: leased(md) == 0 and used(md) == len(main.mirror), "everything to be free")
    assert md.agent.state()["transfers"] == 0
    again = fleet.process("p0")
    prefill = again.engine(chunk_bytes=CHUNK)
    prefill.push("t", ["md0"], range(300))
    main.wait(lambda: main.has(range(300)))
    main.check_load(range(300))
    prefill.close()


def test_a_flipped_byte_is_never_visible_and_is_asked_for_again(fleet: Fleet) -> None:
    fleet.configure(store_bytes=64 * 2**20)
    meddler = fleet.meddle("md0")
    p, md, prefill, main = _start(fleet)
    flipped: set[int] = set()

    def flip(index: int, at: int, data: bytes) -> bytes:
        if index > 0 and len(data) > 50000 and index not in flipped and at > 70000:
            flipped.add(index)
            return data[:40000] + bytes([data[40000] ^ 1]) + data[40001:]
        return data

    meddler.tamper = flip
    prefill.push("t", ["md0"], range(200))
    p.wait_event("landed", transfer="t")
    assert flipped
    main.check_load(range(200))
    counters = md.agent.space.inbound.counters  # type: ignore[union-attr]
    # A flip in a payload is asked for again; one in a header ends the connection, and all is offered again.
    assert counters.corrupt_pieces >= 1 or p.events("stalled")


def test_a_line_that_corrupts_everything_fails_as_corrupt(fleet: Fleet) -> None:
    fleet.configure(store_bytes=64 * 2**20, streams=1)
    meddler = fleet.meddle("md0")
    p, md, prefill, main = _start(fleet)
    prefill.push("warm", ["md0"], ["w"])
    p.wait_event("landed", transfer="warm")
    md.agent.space.inbound.release("warm")  # type: ignore[union-attr]

    def flip(index: int, _at: int, data: bytes) -> bytes:
        # 32 bytes of header, then payload: with one chunk at a time the first byte is always a header.
        return data[:-1] + bytes([data[-1] ^ 1]) if index > 0 and len(data) > 32 else data

    meddler.tamper = flip
    prefill.push("t", ["md0"], ["one"])
    assert p.wait_event("failed", transfer="t")["reason"] == "corrupt"
    assert not main.has(["one"])
    assert used(md) == 1
    assert leased(md) == 0


def test_garbage_on_the_data_port_hurts_nobody(fleet: Fleet) -> None:
    p, md = fleet.agents()
    main, prefill = md.engine(), p.engine()
    port = md.config.engine("md0").data_port
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1000),
        b"\xff" * 64,
        encode_control(Offer(number=0, transfer="x", first=0, keys=[b"k"])),
        encode_control(Offer(number=0, transfer="x", first=0, keys=[b"k"]))[:-3],
    ):
        # The agent may drop the connection before all is written: any error says so as well as the end.
        with socket.create_connection(("127.0.0.1", port)) as sock, contextlib.suppress(OSError):
            sock.settimeout(10)
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1000) == b""
    prefill.push("t", ["md0"], range(5))
    p.wait_event("landed", transfer="t")
    main.check_load(range(5))


def test_one_refused_stream_of_several_is_done_without(fleet: Fleet) -> None:
    fleet.configure(store_bytes=64 * 2**20, streams=3)
    meddler = fleet.meddle("md0")
    p, _md, prefill, main = _start(fleet)
    meddler.refuse = lambda index: index == 2
    prefill.push("t", ["md0"], range(50))
    p.wait_event("landed", transfer="t")
    main.check_load(range(50))


def test_a_peer_that_stops_answering_is_said_to_stall_and_fails_in_time(fleet: Fleet) -> None:
    fleet.configure(store_bytes=64 * 2**20, stall_timeout_s=9)
    meddler = fleet.meddle("md0")
    p, md, prefill, _main = _start(fleet)
    prefill.push("warm", ["md0"], ["w"])
    p.wait_event("landed", transfer="warm")
    md.wait_connected()  # a stream held while it connects would be another reason to fail
    meddler.hold()
    prefill.push("t", ["md0"], range(100))
    p.wait_event("stalled", transfer="t")
    p.give_up_after(2)
    failed = p.wait_event("failed", transfer="t")
    assert failed["reason"] in ("stalled", "peer_down")
    meddler.let_go()


class TestEngine:
    """Engines come and go beside one agent."""

    def test_a_restarted_engine_finds_the_store_as_it_was(self, fleet: Fleet) -> None:
        (p,) = fleet.agents("p0")
        first = p.engine()
        first.store("r", range(10))
        first.close()
        p.wait_event("engine", connected=False)
        second = p.engine()
        assert second.welcome is not None
        assert second.has(range(10))
        second.check_load(range(10))

    @pytest.mark.parametrize("change", [{"dtype": "float32"}, {"chunk_bytes": 8192}])
    def test_another_kind_of_engine_gets_an_empty_store(self, fleet: Fleet, change: dict) -> None:
        (p,) = fleet.agents("p0")
        p.engine().store("r", range(10))
        second = p.engine(**change)
        assert second.welcome is not None
        assert second.mirror == set()
        second.store("r", range(3))
        second.check_load(range(3))

    def test_a_new_connection_replaces_a_stale_one(self, fleet: Fleet) -> None:
        (p,) = fleet.agents("p0")
        first = p.engine()
        second = p.engine()
        first.wait(lambda: first.is_closed)
        second.store("r", range(3))
        second.check_load(range(3))
        assert p.agent.is_engine_connected

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"version": 99}, "local protocol 99"),
            ({"claimed_slots": 10**6}, "primary tier has"),
            ({"chunk_bytes": 2**20}, "no room for a chunk"),
        ],
    )
    def test_an_engine_that_cannot_be_served_is_told_why(
        self, fleet: Fleet, options: dict[str, int], reason: str
    ) -> None:
        (p,) = fleet.agents("p0", store_bytes=2**19)
        engine = p.engine(**options)
        engine.wait(lambda: engine.is_closed)
        assert engine.refused is not None
        assert reason in engine.refused
        p.engine().store("r", range(3))

    @pytest.mark.parametrize("slots", [[64], [-1], [10**9]])
    def test_a_slot_that_does_not_exist_ends_the_connection(self, fleet: Fleet, slots: list[int]) -> None:
        (p,) = fleet.agents("p0")
        engine = p.engine()
        engine.store_slots("r", [key_of(1)], slots, [32])
        engine.wait(lambda: engine.is_closed)
        p.engine().store("r", range(2))

    def test_missing_chunks_are_left_out_of_a_load(self, fleet: Fleet) -> None:
        (p,) = fleet.agents("p0")
        engine = p.engine()
        engine.store("r", range(3))
        assert set(engine.load(range(5))) == {key_of(i) for i in range(3)}

    def test_old_chunks_make_room_and_the_mirror_follows(self, fleet: Fleet) -> None:
        (p,) = fleet.agents("p0", store_bytes=4 * 4096)
        engine = p.engine()
        engine.store("a", range(4))
        engine.store("b", [10, 11])
        # The deepest chunks of the older prompt go first: its beginning is still of use.
        engine.wait(lambda: engine.mirror == {key_of(i) for i in (0, 1, 10, 11)})
        assert p.agent.space is not None
        p.agent.space.store.check_invariants()
