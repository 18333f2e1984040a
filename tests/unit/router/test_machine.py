"""The request state machine: its paths by example, and its invariants under every order of events."""

from copy import deepcopy
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.policy.handoff import CatchUp, Mode
from pdd.router.request.events import (
    CancelTransfer,
    ChooseHandoff,
    ClientGone,
    Complete,
    DeadlinePassed,
    Effect,
    Emit,
    EnginesNow,
    Event,
    Fail,
    Failure,
    HandoffChosen,
    Landed,
    LegFailed,
    Pause,
    PauseOver,
    Plan,
    Planned,
    Prefilled,
    ReleaseTransfer,
    ResumeTransfer,
    RoundDone,
    StartDecode,
    StartPrefill,
    StartRound,
    StopLeg,
    StopMatched,
    Token,
    Tokens,
    TransferFailed,
    TransferStalled,
)
from pdd.router.request.machine.attempts import MAX_ATTEMPTS
from pdd.router.request.machine.state import Phase
from pdd.router.request.machine.table import RequestMachine

LOST = Failure(kind="engine_lost", message="gone", status=502)


def plan(**changes: object) -> Plan:
    """A relayed plan over one engine of each role."""
    values: dict[str, object] = {
        "pipeline": "p-rld-md",
        "prefills": ("p0",),
        "relays": ("rld0",),
        "mains": ("md0",),
        "max_tokens": 10,
        "prompt_tokens": 0,
    }
    return Plan(**{**values, **changes})  # type: ignore[arg-type]


def begun(the_plan: Plan) -> tuple[RequestMachine, StartPrefill]:
    """A machine that waits for P."""
    machine = RequestMachine()
    effects = machine.step(Planned(plan=the_plan))
    assert isinstance(effects[-1], StartPrefill)
    return machine, effects[-1]


def only(effects: list[Effect], kind: type) -> list[Effect]:
    """The effects of one kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


def chosen(
    mode: Mode, *, stop_gap_tokens: int = 0, max_rounds: int = 3, block_tokens: int = 1
) -> HandoffChosen:
    """The policy's answer."""
    catch_up = CatchUp(stop_gap_tokens=stop_gap_tokens, max_rounds=max_rounds, block_tokens=block_tokens)
    return HandoffChosen(mode=mode, catch_up=catch_up)


def tokens_of(leg: int, *ids: int, finish: str | None = None) -> Tokens:
    """A delivery of a leg."""
    return Tokens(leg=leg, tokens=tuple(Token(id=i) for i in ids), finish=finish)


def relaying(the_plan: Plan) -> tuple[RequestMachine, StartDecode]:
    """A machine whose relay has begun after token 0."""
    machine, prefill = begun(the_plan)
    machine.step(Landed(attempt=1, peer="rld0"))
    effects = machine.step(Prefilled(leg=prefill.leg, token=Token(id=0), finish="length"))
    (decode,) = only(effects, StartDecode)
    assert isinstance(decode, StartDecode)
    return machine, decode


def test_p_md_waits_for_main_and_decodes_there() -> None:
    machine, prefill = begun(plan(pipeline="p-md"))
    assert prefill.targets == ("md0",)
    effects = machine.step(Prefilled(leg=prefill.leg, token=Token(id=7), finish="length"))
    assert [type(e) for e in effects] == [Emit]
    assert machine.phase is Phase.WAITING_MAIN
    (decode,) = machine.step(Landed(attempt=1, peer="md0"))
    assert decode == StartDecode(leg=2, engine="md0", position=1, role="main", landed=True)
    effects = machine.step(tokens_of(2, 8))
    assert ReleaseTransfer(attempt=1, peer="md0") in effects
    effects = machine.step(tokens_of(2, 9, finish="stop"))
    assert effects[-1] == Complete(finish="stop")
    assert list(machine.tokens) == [7, 8, 9]


def test_one_shot_stops_the_relay_and_joins_at_the_exact_position() -> None:
    machine, relay = relaying(plan())
    machine.step(tokens_of(relay.leg, 1, 2))
    assert machine.step(Landed(attempt=1, peer="md0")) == [ChooseHandoff(relay="rld0", gap_tokens=3)]
    effects = machine.step(chosen("one-shot", stop_gap_tokens=4, max_rounds=4))
    assert StopLeg(leg=relay.leg) in effects
    (join,) = only(effects, StartDecode)
    assert isinstance(join, StartDecode)
    assert (join.position, join.engine) == (3, "md0")
    assert machine.step(tokens_of(relay.leg, 99)) == []  # what the relay still said is not heard
    machine.step(tokens_of(join.leg, 3))
    assert list(machine.tokens) == [0, 1, 2, 3]
    assert machine.eager_tokens == 2


def test_catch_up_sends_rounds_until_the_gap_is_small() -> None:
    machine, relay = relaying(plan(max_tokens=100))
    machine.step(tokens_of(relay.leg, *range(1, 20)))
    machine.step(Landed(attempt=1, peer="md0"))
    (first,) = machine.step(chosen("catch-up", stop_gap_tokens=2, max_rounds=9))
    assert isinstance(first, StartRound)
    assert first.position == 20
    machine.step(tokens_of(relay.leg, 20, 21))
    assert machine.step(RoundDone(leg=first.leg)) == []  # RLD is in the middle of a token
    second = machine.step(tokens_of(relay.leg, 22))[-1]
    assert isinstance(second, StartRound)
    assert second.position == 23
    machine.step(tokens_of(relay.leg, 23))
    machine.step(RoundDone(leg=second.leg))
    effects = machine.step(tokens_of(relay.leg, 24))
    assert StopLeg(leg=relay.leg) in effects
    (join,) = only(effects, StartDecode)
    assert join.position == 25  # type: ignore[union-attr]
    assert machine.handoff_rounds == 2


def inside_a_block() -> tuple[RequestMachine, StartDecode]:
    """A machine whose first round ended inside a block: 30 + 2 tokens computed, 33 made, blocks of 10."""
    machine, relay = relaying(plan(max_tokens=100, prompt_tokens=30))
    machine.step(tokens_of(relay.leg, 1))
    machine.step(Landed(attempt=1, peer="md0"))
    (first,) = machine.step(chosen("catch-up", stop_gap_tokens=1, block_tokens=10))
    assert isinstance(first, StartRound)
    machine.step(tokens_of(relay.leg, 2))
    machine.step(RoundDone(leg=first.leg))
    assert machine.phase is Phase.BETWEEN_ROUNDS
    return machine, relay


def test_the_last_round_begins_at_a_blocks_end() -> None:
    machine, relay = inside_a_block()
    machine.step(tokens_of(relay.leg, *range(3, 9)))
    assert machine.phase is Phase.BETWEEN_ROUNDS
    second = machine.step(tokens_of(relay.leg, 9))[-1]
    assert isinstance(second, StartRound)
    assert second.position == 10
    machine.step(tokens_of(relay.leg, 10))
    machine.step(RoundDone(leg=second.leg))
    (join,) = only(machine.step(tokens_of(relay.leg, 11)), StartDecode)
    assert join.position == 12  # type: ignore[union-attr]


def test_relay_lost_between_rounds_lets_main_join() -> None:
    machine, relay = inside_a_block()
    (join,) = only(machine.step(LegFailed(leg=relay.leg, failure=LOST)), StartDecode)
    assert isinstance(join, StartDecode)
    assert (join.engine, join.position) == ("md0", 3)


def test_the_relays_end_between_rounds_is_the_answers() -> None:
    machine, relay = inside_a_block()
    effects = machine.step(tokens_of(relay.leg, 3, finish="stop"))
    assert ReleaseTransfer(attempt=1, peer="md0") in effects
    assert effects[-1] == Complete(finish="stop")


def test_catch_up_ends_at_the_round_limit() -> None:
    machine, relay = relaying(plan(max_tokens=100))
    machine.step(Landed(attempt=1, peer="md0"))
    (effect,) = machine.step(chosen("catch-up", stop_gap_tokens=0, max_rounds=3))
    for _ in range(3):
        assert isinstance(effect, StartRound)
        machine.step(RoundDone(leg=effect.leg))
        effect = machine.step(tokens_of(relay.leg, 1))[-1]
    assert isinstance(effect, StartDecode)


def test_main_landing_first_makes_the_relay_needless() -> None:
    machine, prefill = begun(plan())
    machine.step(Landed(attempt=1, peer="md0"))
    effects = machine.step(Prefilled(leg=prefill.leg, token=Token(id=0), finish="length"))
    assert CancelTransfer(attempt=1, peer="rld0") in effects
    assert effects[-1] == StartDecode(leg=2, engine="md0", position=1, role="main", landed=True)


def test_eos_as_first_token_needs_no_decode_engine() -> None:
    machine, prefill = begun(plan())
    effects = machine.step(Prefilled(leg=prefill.leg, token=Token(id=0), finish="stop"))
    assert only(effects, CancelTransfer) == [
        CancelTransfer(attempt=1, peer="rld0"),
        CancelTransfer(attempt=1, peer="md0"),
    ]
    assert only(effects, StartDecode) == []
    assert effects[-1] == Complete(finish="stop")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipeline": "p-md"},
        {"mains": ()},
        {"mains": (), "pipeline": "p-md"},
        {"relays": ()},
        {"relays": (), "mains": ()},
        {"max_tokens": 1},
    ],
)
def test_a_plan_knows_whom_its_first_attempt_will_ask(changes: dict[str, object]) -> None:
    machine = RequestMachine()
    wanted = plan(**changes)
    machine.step(Planned(plan=wanted))
    assert wanted.first_targets == tuple(peer for _, peer in machine.transfers)


def test_one_token_orders_no_transfer() -> None:
    machine, prefill = begun(plan(max_tokens=1, whole_on_main=True))
    assert prefill.targets == ()
    effects = machine.step(Prefilled(leg=prefill.leg, token=Token(id=0), finish="length"))
    assert effects[-1] == Complete(finish="length")


def test_relay_that_finishes_before_landing_cancels_the_wan() -> None:
    machine, relay = relaying(plan())
    effects = machine.step(tokens_of(relay.leg, 1, finish="stop"))
    assert CancelTransfer(attempt=1, peer="md0") in effects
    assert machine.outcome == "complete"


def test_lease_of_a_late_landing_is_released() -> None:
    machine, relay = relaying(plan())
    machine.step(tokens_of(relay.leg, 1, finish="stop"))
    assert machine.step(Landed(attempt=1, peer="md0")) == [ReleaseTransfer(attempt=1, peer="md0")]


def test_lease_of_what_landed_after_it_was_given_up_is_released() -> None:
    machine, _ = relaying(plan())
    machine.step(TransferFailed(attempt=1, peer="md0", reason="timed_out", is_certain=False))
    assert machine.step(Landed(attempt=1, peer="md0")) == [ReleaseTransfer(attempt=1, peer="md0")]


def test_lease_of_what_lands_a_second_time_is_released_again() -> None:
    machine, relay = relaying(plan())
    machine.step(Landed(attempt=1, peer="rld0"))  # still wanted
    assert machine.transfers[1, "rld0"] == "landed"
    machine.step(tokens_of(relay.leg, 1, finish="stop"))
    assert machine.step(Landed(attempt=1, peer="rld0")) == [ReleaseTransfer(attempt=1, peer="rld0")]


def test_what_nobody_said_has_failed_is_cancelled() -> None:
    machine, _ = relaying(plan())
    lost = TransferFailed(attempt=1, peer="md0", reason="agent_restarted", is_certain=False)
    assert machine.step(lost) == [CancelTransfer(attempt=1, peer="md0")]
    assert machine.transfers[1, "md0"] == "failed"


def test_relay_lost_before_handoff_waits_for_main() -> None:
    machine, relay = relaying(plan())
    machine.step(tokens_of(relay.leg, 1))
    assert machine.step(LegFailed(leg=relay.leg, failure=LOST)) == []
    assert machine.phase is Phase.WAITING_MAIN
    (join,) = machine.step(Landed(attempt=1, peer="md0"))
    assert isinstance(join, StartDecode)
    assert join.position == 2


def test_wan_lost_lets_the_relay_go_on_to_the_end() -> None:
    machine, relay = relaying(plan(max_tokens=3))
    assert machine.step(TransferFailed(attempt=1, peer="md0", reason="peer_down")) == []
    effects = machine.step(tokens_of(relay.leg, 1, 2))
    assert effects[-1] == Complete(finish="length")


def test_main_lost_while_catching_up_lets_the_relay_go_on() -> None:
    machine, relay = relaying(plan())
    machine.step(Landed(attempt=1, peer="md0"))
    (effect,) = machine.step(chosen("catch-up", stop_gap_tokens=0, max_rounds=3))
    assert isinstance(effect, StartRound)
    effects = machine.step(LegFailed(leg=effect.leg, failure=LOST))
    assert effects == [ReleaseTransfer(attempt=1, peer="md0")]
    assert machine.phase is Phase.RELAYING
    machine.step(tokens_of(relay.leg, 1))
    assert list(machine.tokens) == [0, 1]


def test_main_lost_after_handoff_continues_from_the_last_token() -> None:
    machine, prefill = begun(plan(pipeline="p-md", mains=("md0", "md1")))
    machine.step(Landed(attempt=1, peer="md0"))
    machine.step(Prefilled(leg=prefill.leg, token=Token(id=0), finish="length"))
    machine.step(tokens_of(2, 1, 2))
    (again,) = machine.step(LegFailed(leg=2, failure=LOST))
    assert again == StartPrefill(leg=3, attempt=2, engine="p0", position=3, targets=("rld0", "md1"))
    machine.step(Prefilled(leg=3, token=Token(id=3), finish="length"))
    assert list(machine.tokens) == [0, 1, 2, 3]
    assert machine.step(Landed(attempt=1, peer="md1")) == []  # news of another attempt
    (relay,) = machine.step(Landed(attempt=2, peer="rld0"))
    assert isinstance(relay, StartDecode)
    assert relay.position == 4


def test_an_answer_bound_to_one_engine_is_not_continued_by_another() -> None:
    machine, prefill = begun(plan(pipeline="p-md", relays=(), whole_on_main=True, mains=("md0", "md1")))
    assert machine.step(Prefilled(leg=prefill.leg, token=Token(id=0), finish="length")) == []
    (start,) = machine.step(Landed(attempt=1, peer="md0"))
    assert isinstance(start, StartDecode)
    assert start.position == 0
    machine.step(tokens_of(start.leg, 1))
    effects = machine.step(LegFailed(leg=start.leg, failure=LOST))
    assert isinstance(effects[-1], Fail)
    assert effects[-1].failure.kind == "not_resumable"


def test_what_the_client_got_wrong_is_not_tried_again() -> None:
    machine, prefill = begun(plan(prefills=("p0", "p1")))
    wrong = Failure(kind="engine_error", message="no", status=400, retryable=False)
    effects = machine.step(LegFailed(leg=prefill.leg, failure=wrong))
    assert effects[-1] == Fail(failure=wrong)


def test_another_prefill_engine_is_tried_and_decode_engines_never_prefill_instead() -> None:
    machine, prefill = begun(plan(prefills=("p0", "p1")))
    effects = machine.step(LegFailed(leg=prefill.leg, failure=LOST))
    (again,) = only(effects, StartPrefill)
    assert again.engine == "p1"  # type: ignore[union-attr]
    machine.step(EnginesNow(prefills=(), relays=("rld0",), mains=("md0",)))
    effects = machine.step(LegFailed(leg=again.leg, failure=LOST))  # type: ignore[union-attr]
    assert effects[-1] == Fail(failure=LOST)
    assert only(effects, StartDecode) == []


def test_a_held_transfer_goes_when_the_answer_outgrows_its_bound() -> None:
    machine, relay = relaying(plan(hold_tokens=3, max_tokens=100))
    assert only(machine.step(tokens_of(relay.leg, 1, 2)), ResumeTransfer) == []
    effects = machine.step(tokens_of(relay.leg, 3))
    assert ResumeTransfer(attempt=1, peer="md0") in effects
    assert only(machine.step(tokens_of(relay.leg, 4)), ResumeTransfer) == []


def test_a_held_transfer_goes_when_the_relay_is_lost() -> None:
    machine, relay = relaying(plan(hold_tokens=100))
    effects = machine.step(LegFailed(leg=relay.leg, failure=LOST))
    assert effects == [ResumeTransfer(attempt=1, peer="md0")]
    machine, prefill = begun(plan(hold_tokens=100))
    assert prefill.held == ("md0",)
    machine.step(TransferFailed(attempt=1, peer="rld0", reason="peer_down"))
    effects = machine.step(Prefilled(leg=prefill.leg, token=Token(id=0), finish="length"))
    assert effects[-1] == ResumeTransfer(attempt=1, peer="md0")


def test_a_held_transfer_ends_with_the_answer() -> None:
    machine, relay = relaying(plan(hold_tokens=100))
    effects = machine.step(tokens_of(relay.leg, 1, finish="stop"))
    assert CancelTransfer(attempt=1, peer="md0") in effects
    assert only(effects, ResumeTransfer) == []


def test_without_a_relay_nothing_is_held() -> None:
    _, prefill = begun(plan(hold_tokens=100, relays=()))
    assert prefill.held == ()


def test_another_relay_takes_over_from_one_that_is_lost_before_the_handoff() -> None:
    machine, relay = relaying(plan(relays=("rld0", "rld1")))
    effects = machine.step(LegFailed(leg=relay.leg, failure=LOST))
    (again,) = only(effects, StartPrefill)
    assert again.targets == ("rld1", "md0")  # type: ignore[union-attr]


def test_a_wan_that_stands_still_is_covered_by_a_relay() -> None:
    machine, prefill = begun(plan(pipeline="p-md"))
    machine.step(Prefilled(leg=prefill.leg, token=Token(id=0), finish="length"))
    effects = machine.step(TransferStalled(attempt=1, peer="md0"))
    (again,) = only(effects, StartPrefill)
    assert again.targets == ("rld0", "md0")  # type: ignore[union-attr]


def test_an_answer_that_has_begun_waits_for_an_engine_to_come_back() -> None:
    machine, relay = relaying(plan(mains=()))
    assert machine.step(LegFailed(leg=relay.leg, failure=LOST))[-1] == Pause()
    machine.check_invariants()
    assert machine.step(EnginesNow(prefills=("p0",), relays=(), mains=())) == [Pause()]
    (again,) = machine.step(EnginesNow(prefills=("p0",), relays=(), mains=("md0",)))
    assert again == StartPrefill(leg=3, attempt=2, engine="p0", position=1, targets=("md0",))


def test_a_prefill_engine_that_is_back_is_tried_again_before_the_first_token() -> None:
    machine, prefill = begun(plan())
    assert machine.step(LegFailed(leg=prefill.leg, failure=LOST))[-1] == Pause()
    (again,) = machine.step(EnginesNow(prefills=("p0",), relays=("rld0",), mains=("md0",)))
    assert isinstance(again, StartPrefill)


def test_an_answer_that_has_waited_long_enough_ends_with_what_went_wrong() -> None:
    machine, relay = relaying(plan(mains=()))
    machine.step(LegFailed(leg=relay.leg, failure=LOST))
    assert machine.step(PauseOver())[-1] == Fail(failure=LOST)


def test_only_attempts_without_a_token_count_towards_the_limit() -> None:
    machine, relay = relaying(plan(max_tokens=100, mains=()))
    now = EnginesNow(prefills=("p0",), relays=("rld0",), mains=())
    leg = relay.leg
    for attempt in range(2, 3 * MAX_ATTEMPTS):
        assert machine.step(LegFailed(leg=leg, failure=LOST))[-1] == Pause()
        (prefill,) = only(machine.step(now), StartPrefill)
        machine.step(Landed(attempt=machine.attempt, peer="rld0"))
        leg_of_p = prefill.leg  # type: ignore[union-attr]
        effects = machine.step(Prefilled(leg=leg_of_p, token=Token(id=attempt), finish="length"))
        (decode,) = only(effects, StartDecode)
        leg = decode.leg  # type: ignore[union-attr]
    assert machine.outcome is None


# ---- tokens that change nothing but the answer's length


def step_with_room(machine: RequestMachine, event: Event) -> tuple[list[Effect], bool]:
    """The event's effects; for tokens the machine has room for, they are those of ``take``."""
    room = machine.room_for_more(event.leg) if isinstance(event, Tokens) and event.finish is None else 0
    if not isinstance(event, Tokens) or not 0 < len(event.tokens) <= room:
        return machine.step(event), False
    other, role, position = deepcopy(machine), machine.speaking, len(machine.tokens)
    other.take([token.id for token in event.tokens])
    effects = machine.step(event)
    assert effects == [Emit(position=position, tokens=event.tokens, role=role, finish=None, stop_reason=None)]
    assert {**vars(other), "effects": effects} == vars(machine)
    return effects, True


def decoding() -> tuple[RequestMachine, StartDecode]:
    """A machine whose main engine has given its first token."""
    machine, prefill = begun(plan(pipeline="p-md", max_tokens=100))
    machine.step(Landed(attempt=1, peer="md0"))
    effects = machine.step(Prefilled(leg=prefill.leg, token=Token(id=0), finish="length"))
    assert isinstance(effects[-1], StartDecode)
    machine.step(tokens_of(effects[-1].leg, 1))
    return machine, effects[-1]


def test_there_is_room_in_the_middle_of_what_main_says() -> None:
    machine, decode = decoding()
    assert machine.room_for_more(decode.leg) == 97  # the last one ends the answer
    assert machine.room_for_more(decode.leg + 1) == 0
    assert step_with_room(machine, tokens_of(decode.leg, *range(97)))[1]
    assert machine.room_for_more(decode.leg) == 0
    effects, _ = step_with_room(machine, tokens_of(decode.leg, 5))
    assert effects[-1] == Complete(finish="length")


@pytest.mark.parametrize(("hold_tokens", "room"), [(0, 97), (5, 3), (1000, 97)])
def test_there_is_room_in_what_the_relay_says_up_to_what_sends_for_main(hold_tokens: int, room: int) -> None:
    machine, relay = relaying(plan(max_tokens=100, hold_tokens=hold_tokens))
    assert machine.room_for_more(relay.leg) == 0  # its first token releases the relay's KV
    machine.step(tokens_of(relay.leg, 1))
    assert machine.room_for_more(relay.leg) == room
    assert step_with_room(machine, tokens_of(relay.leg, *range(room)))[1]
    assert machine.room_for_more(relay.leg) == 0
    assert machine.eager_tokens == room + 1
    resumed = only(machine.step(tokens_of(relay.leg, 7)), ResumeTransfer)
    assert bool(resumed) == (hold_tokens == 5)


def test_there_is_no_room_while_main_catches_up() -> None:
    machine, relay = inside_a_block()
    assert machine.room_for_more(relay.leg) == 0


# ---- every order of events


@dataclass
class World:
    """Answers a machine's effects in an order Hypothesis picks, and checks what a client would see."""

    machine: RequestMachine = field(default_factory=RequestMachine)
    open_legs: dict[int, Effect] = field(default_factory=dict)
    transfers: dict[tuple[int, str], str] = field(default_factory=dict)
    given: list[int] = field(default_factory=list)
    ends: list[Effect] = field(default_factory=list)
    speaking: dict[int, int] = field(default_factory=dict)

    def feed(self, event: Event) -> None:
        """Step, take the effects, check."""
        effects, _ = step_with_room(self.machine, event)
        for effect in effects:
            self.take(effect)
        self.machine.check_invariants()
        assert len(self.ends) <= 1
        assert self.given == list(range(len(self.given))), "positions come once each, in order"
        assert self.given == list(self.machine.tokens)

    def take(self, effect: Effect) -> None:
        """Do one effect in the world."""
        match effect:
            case StartPrefill():
                self.open_legs[effect.leg] = effect
                for peer in effect.targets:
                    self.transfers[effect.attempt, peer] = "held" if peer in effect.held else "open"
                assert effect.position == len(self.given)
            case StartDecode():
                self.open_legs[effect.leg] = effect
                self.speaking[effect.leg] = effect.position
            case StartRound():
                self.open_legs[effect.leg] = effect
                assert effect.position <= len(self.machine.tokens)
            case StopLeg():
                del self.open_legs[effect.leg]
            case ResumeTransfer():
                assert self.transfers[effect.attempt, effect.peer] == "held"
                self.transfers[effect.attempt, effect.peer] = "open"
            case CancelTransfer():
                assert self.transfers[effect.attempt, effect.peer] in ("open", "held")
                self.transfers[effect.attempt, effect.peer] = "cancelling"
            case ReleaseTransfer():
                assert self.transfers[effect.attempt, effect.peer] in ("landed", "landed late")
                self.transfers[effect.attempt, effect.peer] = "released"
            case Emit():
                assert effect.position == len(self.given)
                self.given.extend(token.id for token in effect.tokens)
            case Pause():
                assert not self.open_legs
            case Complete() | Fail():
                self.ends.append(effect)
            case ChooseHandoff():
                pass

    def possible(self) -> list[str]:
        """What may happen next."""
        names = [f"leg {leg}" for leg in self.open_legs]
        if self.machine.phase is Phase.PAUSED:
            names.append("pause")
        names += [
            f"transfer {a} {p}" for (a, p), state in self.transfers.items() if state in ("open", "cancelling")
        ]
        return names


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans over up to two engines of each role."""
    relays = draw(st.sampled_from([(), ("rld0",), ("rld0", "rld1")]))
    mains = draw(
        st.sampled_from([("md0",), ("md0", "md1")] if not relays else [(), ("md0",), ("md0", "md1")])
    )
    whole = draw(st.booleans()) if not relays else False
    return plan(
        pipeline=draw(st.sampled_from(["p-md", "p-rld-md"])),
        prefills=draw(st.sampled_from([("p0",), ("p0", "p1")])),
        relays=relays,
        mains=mains,
        max_tokens=draw(st.integers(1, 12)),
        prompt_tokens=draw(st.integers(1, 5)),
        whole_on_main=whole,
        relays_allowed=bool(relays),
        hold_tokens=draw(st.sampled_from([0, 0, 1, 4])),
    )


def answer_leg(draw: st.DrawFn, world: World, leg: int) -> Event:
    """One thing an engine request may do."""
    effect = world.open_legs[leg]
    if draw(st.integers(0, 5)) == 0:
        del world.open_legs[leg]
        return LegFailed(leg=leg, failure=LOST)
    if isinstance(effect, StartPrefill):
        del world.open_legs[leg]
        finish = draw(st.sampled_from(["length", "length", "stop"]))
        return Prefilled(leg=leg, token=Token(id=effect.position), finish=finish)
    if isinstance(effect, StartRound):
        del world.open_legs[leg]
        return RoundDone(leg=leg)
    position = world.speaking[leg]
    count = draw(st.integers(1, 3))
    world.speaking[leg] = position + count
    finish = draw(st.sampled_from([None, None, None, None, "stop"]))
    if finish:
        del world.open_legs[leg]
    return tokens_of(leg, *range(position, position + count), finish=finish)


def answer_transfer(draw: st.DrawFn, world: World, key: tuple[int, str]) -> Event:
    """One way a transfer may end."""
    late = world.transfers[key] == "cancelling"
    if draw(st.integers(0, 3)) == 0:
        is_certain = late or draw(st.booleans())  # else it still runs, and is cancelled for that
        if is_certain:
            world.transfers[key] = "failed"
        return TransferFailed(attempt=key[0], peer=key[1], reason="peer_down", is_certain=is_certain)
    world.transfers[key] = "landed late" if late else "landed"
    return Landed(attempt=key[0], peer=key[1])


def engines(draw: st.DrawFn) -> EnginesNow:
    """What may be left of two engines of each role."""

    def some(name: str) -> tuple[str, ...]:
        return tuple(draw(st.sampled_from([(), (f"{name}0",), (f"{name}1",), (f"{name}1", f"{name}0")])))

    return EnginesNow(prefills=some("p"), relays=some("rld"), mains=some("md"))


@settings(max_examples=400, deadline=None)
@given(st.data(), plans())
def test_every_order_of_events_ends_once_with_each_token_once(data: st.DataObject, the_plan: Plan) -> None:
    draw = data.draw
    world = World()
    world.feed(Planned(plan=the_plan))
    for _ in range(120):
        if world.machine.outcome is not None:
            break
        names = world.possible()
        assert names, "an open request waits for something that will happen"
        name = draw(st.sampled_from([*names, *names, "client", "deadline", "stop", "engines", "stalled"]))
        match name.split():
            case ["leg", leg]:
                world.feed(answer_leg(draw, world, int(leg)))
            case ["transfer", attempt, peer]:
                world.feed(answer_transfer(draw, world, (int(attempt), peer)))
            case ["pause"]:
                world.feed(PauseOver() if draw(st.integers(0, 9)) == 0 else engines(draw))
            case ["engines"]:
                world.feed(engines(draw))
            case ["stalled"]:
                peer = world.machine.main
                if peer is not None:
                    world.feed(TransferStalled(attempt=world.machine.attempt, peer=peer))
            case [other] if draw(st.integers(0, 30)) == 0:
                rare = {"client": ClientGone(), "deadline": DeadlinePassed(), "stop": StopMatched()}
                world.feed(rare[other])
        if (
            world.machine.phase is Phase.RELAYING
            and world.transfers.get((world.machine.attempt, str(world.machine.main))) == "landed"
        ):
            mode = draw(st.sampled_from(["one-shot", "catch-up"]))
            gap, block = draw(st.integers(0, 3)), draw(st.integers(1, 5))
            world.feed(chosen(mode, stop_gap_tokens=gap, block_tokens=block))
    settle(world)


def settle(world: World) -> None:
    """After the end nothing is left: no leg, and every lease of a late landing is released."""
    if world.machine.outcome is None:
        world.feed(ClientGone())
    assert world.machine.attempt <= (MAX_ATTEMPTS + 1) * (len(world.given) + 1)
    for key, state in list(world.transfers.items()):
        if state == "cancelling":
            world.transfers[key] = "landed late"
            world.feed(Landed(attempt=key[0], peer=key[1]))
    assert not world.open_legs
    assert not {"landed", "landed late", "open", "held"} & set(world.transfers.values())
