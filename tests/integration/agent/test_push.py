"""Whole transfers between agents over real TCP: what crosses, what lands, what is said."""

import threading

import pytest
from tests.integration.agent.conftest import Fleet
from tests.kit.agent_fleet import wait_for
from tests.kit.engine_side import key_of

CHUNK = 64 * 2**10


@pytest.mark.parametrize("num_chunks", [1, 2, 37])
def test_a_transfer_lands_whole_and_exact(fleet: Fleet, num_chunks: int) -> None:
    p, md = fleet.agents()
    main, prefill = md.engine(), p.engine()
    prefill.push("t", ["md0"], range(num_chunks), extra_tokens=7)
    landed = p.wait_event("landed", transfer="t", peer="md0")
    assert landed["chunks"] == landed["chunks_sent"] == num_chunks
    assert landed["payload_bytes"] == landed["full_bytes"] == num_chunks * 4096
    assert landed["tokens"] == num_chunks * 32
    main.check_load(range(num_chunks))


def test_only_the_missing_chunks_cross(fleet: Fleet) -> None:
    p, md = fleet.agents(store_bytes=64 * 2**20)
    prefill, main = p.engine(chunk_bytes=CHUNK), md.engine(chunk_bytes=CHUNK)
    prefill.push("turn-1", ["md0"], range(40))
    p.wait_event("landed", transfer="turn-1")
    prefill.push("turn-2", ["md0"], range(45))
    landed = p.wait_event("landed", transfer="turn-2")
    assert landed["chunks_sent"] == 5
    assert landed["payload_bytes"] == 5 * CHUNK
    assert landed["wan_bytes"] <= 5 * CHUNK * 1.02
    assert landed["full_bytes"] == 45 * CHUNK
    main.check_load(range(45))


def test_what_the_receiver_has_whole_lands_without_payload(fleet: Fleet) -> None:
    # Asked first: on a machine so busy that the round trip looks long, a guess may go out (test_unasked).
    p, md = fleet.agents(unasked_bytes=0)
    main, prefill = md.engine(), p.engine()
    main.store("own", range(10))
    prefill.push("t", ["md0"], range(10))
    landed = p.wait_event("landed", transfer="t")
    assert landed["chunks_sent"] == landed["payload_bytes"] == 0


def test_two_peers_at_once(fleet: Fleet) -> None:
    p, rld, md = fleet.agents("p0", "rld0", "md0")
    prefill, relay, main = p.engine(), rld.engine(), md.engine()
    prefill.push("t", ["rld0", "md0"], range(30))
    p.wait_event("landed", transfer="t", peer="rld0")
    p.wait_event("landed", transfer="t", peer="md0")
    relay.check_load(range(30))
    main.check_load(range(30))
    assert p.agent.space is not None
    wait_for(lambda: p.agent.state()["store"]["leased"] == 0, "the sender's leases to end")


def test_chunks_leave_while_the_prefill_still_runs(fleet: Fleet) -> None:
    p, md = fleet.agents()
    main, prefill = md.engine(), p.engine()
    prefill.begin("r", "t", ["md0"], 10 * 32 + 3)
    prefill.store("r", range(6))
    wait_for(lambda: main.has(range(6)), "the first chunks")
    prefill.store("r", range(6, 10), first=6)
    prefill.finish("r")
    landed = p.wait_event("landed", transfer="t")
    assert landed["prefill_overlap_ratio"] == pytest.approx(0.6)


def test_at_the_end_of_the_prefill_nearly_all_that_was_computed_has_left(fleet: Fleet) -> None:
    """A line that keeps up with the prefill carries each chunk while the next is computed."""
    p, md = fleet.agents()
    main, prefill = md.engine(), p.engine()
    prefill.begin("r", "t", ["md0"], 20 * 32)
    for i in range(20):
        prefill.store("r", [i], first=i)
        if i < 19:
            wait_for(lambda i=i: main.has([i]), "the chunk")
    prefill.finish("r")
    assert p.wait_event("landed", transfer="t")["prefill_overlap_ratio"] >= 0.95


def test_the_chunk_that_the_sampled_token_completes_does_not_count(fleet: Fleet) -> None:
    p, md = fleet.agents()
    prefill, _main = p.engine(), md.engine()
    prefill.begin("r", "t", ["md0"], 3 * 32 + 31)
    prefill.store("r", range(4))
    prefill.finish("r")
    assert p.wait_event("landed", transfer="t")["chunks"] == 3
    assert not md.agent.space or key_of(3) not in md.agent.space.store


def test_a_prompt_below_one_chunk_lands_at_once_though_nobody_answers(fleet: Fleet) -> None:
    p, _md = fleet.agents()
    prefill = p.engine()
    prefill.begin("r", "t", ["md0"], 31)
    assert p.wait_event("landed", transfer="t")["chunks"] == 0
    prefill.finish("r")
    assert p.agent.state()["peers"][0]["state"] != "up"


def test_chunks_out_of_order_are_offered_in_order(fleet: Fleet) -> None:
    p, md = fleet.agents()
    main, prefill = md.engine(), p.engine()
    prefill.begin("r", "t", ["md0"], 4 * 32)
    prefill.store("r", [2, 3], first=2)
    prefill.store("r", [0, 1])
    p.wait_event("landed", transfer="t")
    main.check_load(range(4))


def test_an_aborted_prefill_is_incomplete_and_its_receiver_keeps_no_lease(fleet: Fleet) -> None:
    p, md = fleet.agents()
    main, prefill = md.engine(), p.engine()
    prefill.begin("r", "t", ["md0"], 10 * 32)
    prefill.store("r", range(9))
    wait_for(lambda: main.has(range(9)), "the first chunks")
    prefill.finish("r")
    assert p.wait_event("failed", transfer="t")["reason"] == "prefill_incomplete"
    wait_for(lambda: md.agent.state()["store"]["leased"] == 0, "the receiver's leases to end")
    assert not p.events("landed")


def test_an_engine_that_dies_in_its_prefill_fails_the_transfer(fleet: Fleet) -> None:
    p, md = fleet.agents()
    prefill, _main = p.engine(), md.engine()
    prefill.begin("r", "t", ["md0"], 10 * 32)
    prefill.store("r", range(3))
    prefill.close()
    assert p.wait_event("failed", transfer="t")["reason"] == "prefill_incomplete"
    p.wait_event("engine", connected=False)


def test_transfers_that_share_chunks_send_each_chunk_once(fleet: Fleet) -> None:
    p, md = fleet.agents(store_bytes=64 * 2**20)
    prefill, main = p.engine(chunk_bytes=CHUNK), md.engine(chunk_bytes=CHUNK)
    for transfer in ("a", "b"):
        prefill.begin(transfer, transfer, ["md0"], 50 * 32)
    for transfer in ("a", "b"):
        prefill.store(transfer, range(50))
        prefill.finish(transfer)
    landed = [p.wait_event("landed", transfer=transfer) for transfer in ("a", "b")]
    assert sum(event["chunks_sent"] for event in landed) == 50
    assert sum(event["payload_bytes"] for event in landed) == 50 * CHUNK
    main.check_load(range(50))


def test_two_senders_with_the_same_chunks_send_each_once(fleet: Fleet) -> None:
    p0, p1, md = fleet.agents("p0", "p1", "md0")
    engines = [p0.engine(), p1.engine()]
    main = md.engine()
    threads = [
        threading.Thread(target=engine.push, args=(f"t{i}", ["md0"], range(60)))
        for i, engine in enumerate(engines)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    landed = [p0.wait_event("landed", transfer="t0"), p1.wait_event("landed", transfer="t1")]
    assert sum(event["chunks_sent"] for event in landed) == 60
    main.check_load(range(60))


def test_keys_reach_the_engines_socket_before_landed_is_said(fleet: Fleet) -> None:
    p, md = fleet.agents()
    main, prefill = md.engine(), p.engine()
    for turn in range(30):
        names = [f"{turn}-{i}" for i in range(5)]
        prefill.push(f"t{turn}", ["md0"], names)
        p.wait_event("landed", transfer=f"t{turn}")
        # Drains the socket as the tier does before it answers a lookup: what was sent before is all there.
        main.load([names[-1]])
        assert main.has(names)


def test_an_engine_that_does_not_read_delays_landed_only_for_a_while(fleet: Fleet) -> None:
    p, md = fleet.agents()
    main, prefill = md.engine(), p.engine()
    main.pause_reading()
    prefill.push("t", ["md0"], range(20))
    p.wait_event("landed", transfer="t")
    main.resume_reading()
    main.wait(lambda: main.has(range(20)))


def test_unknown_and_repeated_targets(fleet: Fleet) -> None:
    p, md = fleet.agents()
    prefill, _main = p.engine(), md.engine()
    prefill.push("t", ["md0", "nobody", "p0", "md0"], range(3))
    assert p.wait_event("failed", peer="nobody")["reason"] == "unknown_peer"
    assert p.wait_event("failed", peer="p0")["reason"] == "unknown_peer"
    p.wait_event("landed", peer="md0")
    assert len(p.events("landed")) == 1


def test_links_are_measured(fleet: Fleet) -> None:
    p, md = fleet.agents(store_bytes=64 * 2**20)
    prefill, _main = p.engine(chunk_bytes=CHUNK), md.engine(chunk_bytes=CHUNK)
    prefill.push("t", ["md0"], range(100))
    p.wait_event("landed", transfer="t")
    link = p.agent.state()["peers"][0]
    assert link["state"] == "up"
    assert link["queued_bytes"] == 0

    def rate_bytes_per_s() -> float:
        if (rate := p.agent.state()["peers"][0]["rate_bytes_per_s"]) <= 1e6:
            # Measured while the machine did something else.
            turn = len(p.events("landed"))
            prefill.push(f"again-{turn}", ["md0"], [f"again-{turn}-{i}" for i in range(100)])
            p.wait_event("landed", transfer=f"again-{turn}")
        return float(rate)

    wait_for(lambda: rate_bytes_per_s() > 1e6, "the rate to be known")
    wait_for(lambda: p.agent.state()["peers"][0]["rtt_s"], "a round trip")
    p.wait_event("link", peer="md0", state="up")


def test_the_last_word_on_a_links_queue_is_that_it_is_empty(fleet: Fleet) -> None:
    """The router predicts from what it was told last; a queue it never hears the end of counts for ever."""
    p, md = fleet.agents(store_bytes=64 * 2**20)
    prefill, main = p.engine(chunk_bytes=CHUNK), md.engine(chunk_bytes=CHUNK)
    for turn in range(1, 9):
        prefill.push(f"turn-{turn}", ["md0"], range(60 * turn))
        p.wait_event("landed", transfer=f"turn-{turn}")
        wait_for(lambda: p.agent.state()["peers"][0]["queued_bytes"] == 0, "the queue to drain")
        wait_for(lambda: p.events("link")[-1]["queued_bytes"] == 0, "the event that says so")
    main.check_load(range(480))


def test_a_cancelled_queue_is_said_to_be_empty(fleet: Fleet) -> None:
    fleet.configure(store_bytes=64 * 2**20)
    meddler = fleet.meddle("md0")
    p, md = fleet.agent("p0"), fleet.agent("md0")
    _main, prefill = md.engine(chunk_bytes=CHUNK), p.engine(chunk_bytes=CHUNK)
    md.wait_connected()
    space, middle = p.agent.space, threading.Event()
    assert space is not None
    space.links["md0"]._reported_s = 0.0  # what is acknowledged first is said at once

    def stop_in_the_middle(index: int, _at: int, data: bytes) -> bytes:
        if index > 0 and meddler.num_forward_bytes > 4 * 2**20:
            middle.wait(60)
        return data

    meddler.tamper = stop_in_the_middle
    prefill.push("t", ["md0"], range(400))
    wait_for(lambda: [e for e in p.events("link") if e["queued_bytes"] > 0], "the queue to be said")
    assert space.outbound.cancel("t", None) == ["md0"]
    assert p.wait_event("failed", transfer="t")["reason"] == "cancelled"
    wait_for(lambda: p.events("link")[-1]["queued_bytes"] == 0, "an empty queue")
    middle.set()
