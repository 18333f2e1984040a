"""Each policy's decisions and reasons, by table; and what holds for every input."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.admission import EntryInput, decide_admission, decide_entry
from pdd.policy.handoff import CatchUp, HandoffParams, Mode, decide_handoff
from pdd.policy.outlier import OutlierInput, decide_outlier
from pdd.policy.pipeline import PipelineInput, decide_pipeline, predicted_wan_s
from pdd.policy.placement import place
from pdd.policy.relayable import decide_relayable
from pdd.policy.snapshot import DeltaView, EngineView, LinkView

LINK = LinkView(rate_bytes_per_s=25e6, rtt_s=0.03)
RELAY = EngineView(id="rld0", healthy=True, running=0, capacity=4)


def facts(**changes: Any) -> PipelineInput:
    """A request that has to be relayed, changed."""
    values: dict[str, Any] = {
        "forced": "auto",
        "not_relayable": None,
        "link": LINK,
        "delta": DeltaView(missing_chunks=1000, chunk_bytes=46_000),
        "relay": RELAY,
        "main_reachable": True,
        "second_token_slo_s": 0.5,
        "max_tokens": 100,
    }
    return PipelineInput(**{**values, **changes})


FULL = EngineView(id="rld0", healthy=True, running=4, capacity=4)
SMALL = DeltaView(missing_chunks=1, chunk_bytes=46_000)


@pytest.mark.parametrize(
    ("changes", "pipeline", "reason"),
    [
        ({}, "p-rld-md", "wan_beyond_slo"),
        ({"delta": SMALL}, "p-md", "wan_within_slo"),
        (
            {"link": LinkView(rate_bytes_per_s=25e6, rtt_s=0.03, queued_bytes=10**9), "delta": SMALL},
            "p-rld-md",
            "wan_beyond_slo",
        ),
        (
            {"link": LinkView(rate_bytes_per_s=25e6, rtt_s=0.03, up=False), "delta": SMALL},
            "p-rld-md",
            "wan_beyond_slo",
        ),
        ({"not_relayable": "seed"}, "p-md", "not_relayable"),
        ({"not_relayable": "seed", "forced": "p-rld-md"}, "p-md", "not_relayable"),
        ({"forced": "p-md"}, "p-md", "forced"),
        ({"forced": "p-rld-md", "delta": SMALL}, "p-rld-md", "forced"),
        ({"relay": None}, "p-md", "no_relay_engine"),
        ({"relay": None, "forced": "p-rld-md"}, "p-md", "no_relay_engine"),
        ({"relay": FULL}, "p-md", "relay_full"),
        ({"main_reachable": False, "delta": SMALL}, "p-rld-md", "no_main_engine"),
        ({"max_tokens": 1}, "p-md", "nothing_follows"),
    ],
)
def test_pipeline(changes: dict[str, Any], pipeline: str, reason: str) -> None:
    decision = decide_pipeline(facts(**changes))
    assert (decision.pipeline, decision.reason) == (pipeline, reason)


def test_wan_time_is_the_formula_of_the_page() -> None:
    delta = DeltaView(missing_chunks=1000, chunk_bytes=46_000)
    assert predicted_wan_s(LINK, delta) == pytest.approx(1.87)


@pytest.mark.parametrize(
    ("changes", "reason", "hold"),
    [
        ({}, "shorter_than_wan", 20),
        ({"max_tokens": 100}, "longer_than_wan", 0),
        ({"max_tokens": 100, "history_tokens": 15}, "shorter_than_wan", 15),
        ({"history_tokens": 500}, "shorter_than_wan", 20),
        ({"predicted_wan_s": 0.07}, "longer_than_wan", 0),
        ({"predicted_wan_s": float("inf")}, "no_wan", 0),
        ({"relayed": False}, "no_relay", 0),
        ({"margin_ratio": 0.0}, "off", 0),
        ({"known_ratio": 0.49}, "shorter_than_wan", 20),
        ({"known_ratio": 0.5}, "returns", 0),
    ],
)
def test_outlier(changes: dict[str, Any], reason: str, hold: int) -> None:
    values: dict[str, Any] = {
        "relayed": True,
        "predicted_wan_s": 1.87,
        "max_tokens": 20,
        "history_tokens": None,
        "relay_itl_s": 0.03,
        "margin_ratio": 0.8,
        "known_ratio": 0.0,
        "returning_ratio": 0.5,
    }
    decision = decide_outlier(OutlierInput(**{**values, **changes}))
    assert (decision.reason, decision.hold_tokens) == (reason, hold)
    assert decision.is_outlier == (reason == "shorter_than_wan")


def test_outlier_is_the_formula_of_the_page() -> None:
    facts = OutlierInput(
        relayed=True,
        predicted_wan_s=1.87,
        max_tokens=20,
        history_tokens=None,
        relay_itl_s=0.03,
        margin_ratio=0.8,
        known_ratio=0.0,
        returning_ratio=0.5,
    )
    assert decide_outlier(facts).predicted_decode_s == pytest.approx(0.57)


PARAMS = HandoffParams(
    forced="auto",
    one_shot_max_gap_tokens=8,
    catch_up_gap_tokens=4,
    catch_up_max_rounds=4,
    block_tokens=16,
    busy_ratio=0.75,
    idle_ratio=0.5,
)


@pytest.mark.parametrize(
    ("gap", "load", "previous", "mode", "reason"),
    [
        (100, 0.0, "one-shot", "catch-up", "relay_idle"),
        (100, 0.75, "catch-up", "one-shot", "relay_busy"),
        (100, 0.6, "catch-up", "catch-up", "hysteresis"),
        (100, 0.6, "one-shot", "one-shot", "hysteresis"),
        (8, 0.0, "catch-up", "one-shot", "small_gap"),
        (9, 0.0, "catch-up", "catch-up", "relay_idle"),
    ],
)
def test_handoff(gap: int, load: float, previous: Mode, mode: str, reason: str) -> None:
    decision = decide_handoff(gap_tokens=gap, relay_load_ratio=load, previous=previous, params=PARAMS)
    assert (decision.mode, decision.reason) == (mode, reason)


def test_a_small_gap_does_not_change_what_automatic_mode_remembers() -> None:
    decision = decide_handoff(gap_tokens=1, relay_load_ratio=0.6, previous="catch-up", params=PARAMS)
    assert decision.auto_mode == "catch-up"


@given(st.lists(st.floats(0.5, 0.7499)), st.sampled_from(["one-shot", "catch-up"]))
def test_automatic_mode_never_flaps_between_the_two_ratios(loads: list[float], start: Mode) -> None:
    mode = start
    for load in loads:
        mode = decide_handoff(gap_tokens=99, relay_load_ratio=load, previous=mode, params=PARAMS).auto_mode
        assert mode == start


@pytest.mark.parametrize(
    ("made", "computed", "rounds", "stop_gap", "move"),
    [
        (104, 101, 1, 8, "hand_over"),  # 104 - 96 = 8 left
        (105, 101, 1, 8, "hand_over"),  # 9 left, but a round at the next block's end would save none
        (105, 101, 1, 4, "wait"),  # 5 of them are of the block that began at 96 and is not whole yet
        (111, 101, 1, 4, "wait"),
        (112, 101, 1, 4, "round"),
        (150, 101, 1, 4, "round"),
        (150, 101, 4, 4, "hand_over"),  # the bound on rounds
    ],
)
def test_what_comes_after_a_round(made: int, computed: int, rounds: int, stop_gap: int, move: str) -> None:
    rule = CatchUp(stop_gap_tokens=stop_gap, max_rounds=4, block_tokens=16)
    assert rule.move(made_tokens=made, computed_tokens=computed, rounds=rounds) == move


@given(
    prompt=st.integers(1, 1000),
    block=st.integers(1, 64),
    stop_gap=st.integers(0, 40),
    limit=st.integers(1, 10),
    per_round=st.lists(st.integers(0, 100), min_size=10, max_size=10),
)
def test_catch_up_always_ends(
    prompt: int, block: int, stop_gap: int, limit: int, per_round: list[int]
) -> None:
    """It waits less than a block for each round, and has at most so many rounds."""
    rule = CatchUp(stop_gap_tokens=stop_gap, max_rounds=limit, block_tokens=block)
    computed, made, rounds, waited = prompt, prompt + per_round[0], 1, 0
    while (move := rule.move(made_tokens=made, computed_tokens=computed, rounds=rounds)) != "hand_over":
        if move == "wait":
            made, waited = made + 1, waited + 1
            assert waited < block
        else:
            computed, rounds, waited = made, rounds + 1, 0
            made += per_round[rounds - 1]
    assert rounds <= limit


@given(
    st.lists(
        st.builds(
            EngineView,
            id=st.text("abc", min_size=1, max_size=3),
            healthy=st.booleans(),
            running=st.integers(0, 9),
            capacity=st.integers(1, 9),
            kv_ready=st.booleans(),
        ),
        unique_by=lambda engine: engine.id,
    )
)
def test_placement_takes_the_least_loaded_and_does_not_depend_on_the_order(engines: list[EngineView]) -> None:
    order = place(engines).order
    assert order == place(reversed(engines)).order
    by_id = {engine.id: engine for engine in engines}
    assert set(order) == {engine.id for engine in engines if engine.healthy and engine.kv_ready}
    assert [by_id[e].load_ratio for e in order] == sorted(by_id[e].load_ratio for e in order)


def engine(engine_id: str, *, running: int = 0, **more: int) -> EngineView:
    return EngineView(id=engine_id, healthy=True, running=running, capacity=8, **more)  # type: ignore[arg-type]


def test_placement_weighs_the_held_prefix_against_load_as_its_page_says() -> None:
    def order(running_on_holder: int) -> tuple[str, ...]:
        holder = engine("md0", running=running_on_holder, held_tokens=1536)
        return place([holder, engine("md1", running=3)], prompt_tokens=2048, affinity_weight_ratio=0.5).order

    assert [order(running)[0] for running in (5, 6, 7)] == ["md0", "md0", "md1"]
    held = place(
        [engine("md0", running=1, held_tokens=64), engine("md1")], prompt_tokens=64, affinity_weight_ratio=0.5
    )
    assert (held.order, held.reason) == (("md0", "md1"), "prefix_held")
    unweighted = place([engine("md0", running=1, held_tokens=64), engine("md1")], prompt_tokens=64)
    assert (unweighted.order[0], unweighted.reason) == ("md1", "least_loaded")
    unknown = place([engine("md0", running=1, held_tokens=64), engine("md1")], affinity_weight_ratio=0.5)
    assert unknown.order[0] == "md1"


def test_placement_counts_what_an_engine_has_yet_to_prefill() -> None:
    queue = engine("p0", running=1, held_tokens=1000, pending_tokens=1500)
    idle = engine("p1")
    assert place([queue, idle], prompt_tokens=2000, affinity_weight_ratio=0.5).order == ("p1", "p0")
    assert place([queue, idle], prompt_tokens=2000, affinity_weight_ratio=0.0).order == ("p1", "p0")
    short = engine("p0", running=1, held_tokens=1000, pending_tokens=100)
    assert place([short, idle], prompt_tokens=2000, affinity_weight_ratio=0.5).order == ("p0", "p1")


@given(st.integers(1, 10**6), st.floats(0, 4), st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_without_knowledge_placement_is_by_load_alone(
    prompt_tokens: int, weight: float, loads: list[int]
) -> None:
    engines = [engine(f"e{i}", running=load) for i, load in enumerate(loads)]
    weighed = place(engines, prompt_tokens=prompt_tokens, affinity_weight_ratio=weight)
    assert weighed.order == place(engines).order


@pytest.mark.parametrize(
    ("params", "reason", "whole"),
    [
        ({"temperature": 0.0, "top_p": 0.9, "logit_bias": {"5": 1}}, None, False),
        ({"repetition_penalty": 1.1}, None, False),
        ({"temperature": 0, "seed": 7}, None, False),
        ({"seed": 7, "presence_penalty": 0.5, "frequency_penalty": -0.5}, None, False),
        ({"structured_outputs": {"json_object": True}}, "structured_output", True),
        ({"thinking_token_budget": 5}, "thinking_token_budget", True),
        ({"prompt_logprobs": 0}, "prompt_logprobs", False),
    ],
)
def test_relayable(params: dict[str, object], reason: str | None, whole: bool) -> None:
    decision = decide_relayable(params)
    assert (decision.reason, decision.whole_on_main) == (reason, whole)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"seed": 7}, "seed"),
        ({"seed": 7, "temperature": 0}, None),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
        ({"presence_penalty": 0.0}, None),
    ],
)
def test_penalties_and_seeds_stay_on_one_engine_where_they_are_not_carried(
    params: dict[str, object], reason: str | None
) -> None:
    decision = decide_relayable(params, sampler_state_carried=False)
    assert (decision.reason, decision.whole_on_main) == (reason, reason is not None)


def test_relayable_by_what_is_not_in_the_sampling_parameters() -> None:
    assert decide_relayable({}, multimodal=True).reason == "multimodal"
    assert decide_relayable({}, echo=True).reason == "echo"
    assert decide_relayable({}, multi_token_bad_words=True).reason == "bad_words"
    assert decide_relayable({}).relayable


@pytest.mark.parametrize(
    ("prefills", "relays", "mains", "reason"),
    [(0, 1, 1, "no_prefill_engine"), (1, 0, 0, "no_decode_engine"), (1, 1, 0, "ok"), (1, 0, 1, "ok")],
)
def test_admission(prefills: int, relays: int, mains: int, reason: str) -> None:
    decision = decide_admission(prefills=prefills, relays=relays, mains=mains)
    assert decision.reason == reason
    assert decision.admitted == (reason == "ok")


@pytest.mark.parametrize(
    ("changes", "action", "reason", "retry_after_s"),
    [
        ({}, "enter", "room", 1),
        ({"running": 100}, "wait", "full", 1),
        ({"running": 100, "queued": 50}, "refuse", "queue_full", 5),
        ({"running": 100, "queued": 50, "worst_priority": 0}, "refuse", "queue_full", 5),
        ({"running": 100, "queued": 50, "worst_priority": 1}, "displace", "more_urgent", 5),
        ({"running": 99, "queued": 3}, "wait", "full", 1),
        ({"running": 100, "queued": 50, "service_time_s": 1000.0}, "refuse", "queue_full", 60),
    ],
)
def test_entry(changes: dict[str, Any], action: str, reason: str, retry_after_s: int) -> None:
    values: dict[str, Any] = {
        "running": 0,
        "queued": 0,
        "priority": 0,
        "worst_priority": None,
        "service_time_s": 8.0,
        "max_concurrent": 100,
        "queue_size": 50,
    }
    decision = decide_entry(EntryInput(**{**values, **changes}))
    assert (decision.action, decision.reason, decision.retry_after_s) == (action, reason, retry_after_s)
