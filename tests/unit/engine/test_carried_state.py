"""Penalties and seeded draws that go on behind tokens of another engine, against vLLM's own code."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed, so its sampler cannot be compared with")

import numpy as np
import torch
from vllm.model_executor.layers.utils import apply_penalties
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from pdd.core.errors import ConfigurationError
from pdd.engine.carried_state import V1Draws, V1Penalties, V2Penalties, wind
from pdd.wire.carried import carry

VOCAB = 300
CPU = torch.device("cpu")
PROMPT, BEFORE = [1, 2, 3, 4, 2], [5, 6, 5]
RAW = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="raw_logprobs"))


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**carry(values, prompt_tokens=len(PROMPT), sent_tokens=len(BEFORE)))


def logits(rows: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def added(index: int, values: SamplingParams, output: list[int]) -> BatchUpdate:
    request = (index, values, PROMPT + BEFORE, output)
    return BatchUpdate(batch_size=2, removed=[], added=[request], moved=[])


def whole_penalties(row: torch.Tensor, output: list[int]) -> torch.Tensor:
    """What one engine that made every token would do."""
    tokens = torch.tensor([PROMPT]), torch.tensor([output])
    return apply_penalties(row.clone(), *tokens, *(torch.tensor([v]) for v in (0.5, 0.25, 1.2)))


def test_v1_penalties_count_the_tokens_of_earlier_engines() -> None:
    processor, output = V1Penalties(RAW, CPU, is_pin_memory=False), [5]
    sampling = params(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.2)
    assert (sampling.presence_penalty, sampling.repetition_penalty) == (0.0, 1.0)
    processor.update_state(added(1, sampling, output))
    output.append(9)  # vLLM's list grows
    given = logits()
    got = processor.apply(given.clone())
    assert torch.equal(got[0], given[0])
    assert torch.equal(got[1:], whole_penalties(given[1:], [*BEFORE, 5, 9]))


def test_v2_penalties_count_the_tokens_of_earlier_engines() -> None:
    slots = torch.zeros(4, 64, dtype=torch.int32)
    slots[3, :10] = torch.tensor([*PROMPT, *BEFORE, 5, 9])
    processor = V2Penalties(RAW, SimpleNamespace(all_token_ids=SimpleNamespace(gpu=slots)))
    sampling = params(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.2)
    assert processor.add_request(3, sampling)
    assert not processor.add_request(0, SamplingParams())
    context = SimpleNamespace(
        idx_mapping_np=np.array([0, 3]), expanded_idx_mapping=torch.tensor([0, 3]), pos=torch.tensor([7, 9])
    )
    given = logits()
    got = processor.apply(given.clone(), context)
    assert torch.equal(got[0], given[0])
    assert torch.equal(got[1:], whole_penalties(given[1:], [*BEFORE, 5, 9]))
    assert not processor.add_request(3, SamplingParams())  # the slot is another's now
    assert torch.equal(processor.apply(given.clone(), context), given)


def test_v1_draws_go_on_where_the_other_engine_stopped() -> None:
    alone, generator = TopKTopPSampler(), torch.Generator().manual_seed(7)
    steps = [logits(1, seed) for seed in range(6)]
    expected = [int(alone.forward(step.clone(), {0: generator}, None, None)[0]) for step in steps]
    processor, output = V1Draws(RAW, CPU, is_pin_memory=False), list[int]()
    processor.update_state(added(1, params(seed=7, temperature=1.0), output))
    drawn = []
    for number, step in enumerate(steps[len(BEFORE) :]):
        batch = torch.cat([logits(1), step])
        if number == 1:
            processor.apply(batch.clone())  # a step inside the prompt draws, too, and is dropped
        if number == 2:
            move = (1, 0, MoveDirectionality.UNIDIRECTIONAL)
            processor.update_state(BatchUpdate(batch_size=1, removed=[], added=[], moved=[move]))
            batch = step
        row = processor.apply(batch.clone())[-1]
        assert int(torch.isfinite(row).sum()) == 1
        drawn.append(int(row.argmax()))
        output.append(drawn[-1])
    assert drawn == expected[len(BEFORE) :]


def test_v1_draws_obey_top_k_and_leave_greedy_and_unseeded_requests_alone() -> None:
    processor, given = V1Draws(RAW, CPU, is_pin_memory=False), logits()
    processor.update_state(added(0, params(seed=7, temperature=1.0, top_k=1), []))
    processor.update_state(added(1, params(temperature=1.0), []))
    got = processor.apply(given.clone())
    assert int(got[0].argmax()) == int(given[0].argmax())
    assert torch.equal(got[1], given[1])


def test_winding_is_drawing() -> None:
    wound, stepped = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    wind(wound, draws=4, vocab=VOCAB, device=CPU)
    for _ in range(4):
        TopKTopPSampler().forward(logits(1), {0: stepped}, None, None)
    assert torch.equal(wound.get_state(), stepped.get_state())


def test_vllm_makes_no_generator_of_its_own_for_a_carried_seed() -> None:
    carried, plain = params(seed=7, temperature=1.0), SamplingParams(seed=7)
    for sampling in (carried, plain):
        V1Draws.validate_params(sampling)
    assert (carried.seed, plain.seed) == (None, 7)


@pytest.mark.parametrize("processor", [V1Penalties, V1Draws, V2Penalties])
def test_garbled_state_is_refused(processor: Any) -> None:
    with pytest.raises(ValueError, match=r"extra_args\.pdd"):
        processor.validate_params(SamplingParams(extra_args={"pdd": {"prompt_tokens": "x"}}))


def test_log_probabilities_behind_the_draw_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="logprobs-mode"):
        V1Draws(
            SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="processed_logprobs")),
            CPU,
            is_pin_memory=False,
        )
