"""On a long line KV leaves behind its offer, before the receiver has said that it lacks it."""

import time

from tests.integration.agent.conftest import Fleet
from tests.kit.agent_fleet import RunningAgent, wait_for
from tests.kit.engine_side import FakeEngine, key_of
from tests.kit.meddler import Meddler

CHUNK = 4096
ROUND_TRIP_S = 0.01


class LongLine:
    """Two agents that know each other to be far apart."""

    def __init__(self, fleet: Fleet, **options: int) -> None:
        fleet.configure(**options)
        self.line: Meddler = fleet.meddle("md0")
        self.line.tamper = _delay
        self.p: RunningAgent = fleet.agent("p0")
        self.md: RunningAgent = fleet.agent("md0")
        self.main: FakeEngine = self.md.engine()
        self.prefill: FakeEngine = self.p.engine()
        assert self.p.agent.space is not None
        self.link = self.p.agent.space.links["md0"]
        wait_for(lambda: (self.link.describe()["rtt_s"] or 0) >= ROUND_TRIP_S, "the round trip to be known")
        streams = 1 + fleet.config.agent.streams
        wait_for(lambda: self.line.num_answered >= streams, "every stream to stand")

    @property
    def answers(self) -> tuple[int, int]:
        """Chunks sent unasked: lacking, and held."""
        answers = self.link.answers
        return answers.num_lacking_bytes // CHUNK, answers.num_held_bytes // CHUNK


def _delay(_index: int, _at: int, data: bytes) -> bytes:
    time.sleep(ROUND_TRIP_S)
    return data


def test_a_lone_chunk_does_not_wait_for_the_answer(fleet: Fleet) -> None:
    far = LongLine(fleet)
    far.line.hold_answers()
    far.prefill.push("t", ["md0"], range(1))
    wait_for(lambda: key_of(0) in far.main.mirror, "the chunk, though its WANT is held")
    far.line.let_go()
    landed = far.p.wait_event("landed", transfer="t")
    assert landed["payload_bytes"] == landed["chunks_sent"] * CHUNK == CHUNK
    assert far.answers == (1, 0)
    far.main.check_load(range(1))


def test_the_next_turn_sends_only_what_is_missing(fleet: Fleet) -> None:
    far = LongLine(fleet)
    far.prefill.push("turn-1", ["md0"], range(20))
    far.p.wait_event("landed", transfer="turn-1")
    far.prefill.push("turn-2", ["md0"], range(25))
    landed = far.p.wait_event("landed", transfer="turn-2")
    assert landed["payload_bytes"] == landed["chunks_sent"] * CHUNK == 5 * CHUNK
    assert far.answers[1] == 0
    far.main.check_load(range(25))


def test_a_wrong_guess_is_dropped_and_makes_the_sender_ask(fleet: Fleet) -> None:
    far = LongLine(fleet)
    far.main.store("own", range(2))
    for turn in range(2):  # the same keys for the sender each time: it cannot know them
        far.prefill.push(f"t{turn}", ["md0"], [f"other-{turn}"] if turn else range(1))
        far.p.wait_event("landed", transfer=f"t{turn}")
    assert far.answers == (0, 1)
    used = far.md.agent.state()["store"]["used"]
    assert used == 3
    far.main.check_load(range(2))


def test_a_receiver_that_takes_nothing_unasked_is_asked(fleet: Fleet) -> None:
    far = LongLine(fleet, unasked_bytes=0)
    far.prefill.push("t", ["md0"], range(3))
    far.p.wait_event("landed", transfer="t")
    assert far.answers == (0, 0)
    far.main.check_load(range(3))


def test_cancelled_at_once_nothing_is_left(fleet: Fleet) -> None:
    far = LongLine(fleet)
    space = far.p.agent.space
    assert space is not None
    for i in range(20):
        far.prefill.push(f"t{i}", ["md0"], [f"{i}-{j}" for j in range(3)])
        space.outbound.cancel(f"t{i}", None)
    wait_for(lambda: far.p.agent.state()["transfers"] == 0, "all to end")
    wait_for(lambda: far.md.agent.state()["transfers"] == 0, "all to end at the receiver")
    far.prefill.push("clean", ["md0"], range(3))
    far.p.wait_event("landed", transfer="clean")
    far.main.check_load(range(3))
    assert far.link.attempts == {"up": 1}


def test_prompts_that_share_a_prefix_send_it_once(fleet: Fleet) -> None:
    far = LongLine(fleet)
    far.line.hold_answers()
    for i in range(4):
        far.prefill.push(f"t{i}", ["md0"], ["shared", f"own-{i}"])
    wait_for(lambda: key_of("shared") in far.main.mirror, "the first of them")
    far.line.let_go()
    landed = [far.p.wait_event("landed", transfer=f"t{i}") for i in range(4)]
    assert sum(event["payload_bytes"] for event in landed) == 5 * CHUNK
    assert far.answers[1] == 0
