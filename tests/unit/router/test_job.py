"""The bodies engines get: what is left to generate, who gets the order, and that vLLM takes them."""

from typing import Any

import pytest

from pdd.core.errors import RemoteProtocolError
from pdd.router.detokenize import TextOptions
from pdd.router.request.job import Job, Rendered, read_rendered

PARAMS = {
    "temperature": 0.5,
    "max_tokens": 50,
    "min_tokens": 20,
    "seed": 3,
    "stop": ["x"],
    "prompt_logprobs": 1,
}


def job(**params: Any) -> Job:
    """A job over three prompt tokens."""
    rendered = read_rendered(
        {"token_ids": [1, 2, 3], "sampling_params": {**PARAMS, **params}, "model": "m", "cache_salt": "s"}
    )
    return Job(
        request_id="abc",
        transfer_prefix="abc-0-123456789012",
        rendered=rendered,
        text=TextOptions(),
        max_tokens=50,
    )


def test_prefill_asks_for_one_token_and_carries_the_order() -> None:
    body = job().prefill_body(1, [], transfer="t", targets=("rld0", "md0"), whole_on_main=False)
    assert body["sampling_params"]["max_tokens"] == body["sampling_params"]["min_tokens"] == 1
    assert body["sampling_params"]["prompt_logprobs"] == 1
    assert body["cache_salt"] == "s"
    assert body["kv_transfer_params"] == {
        "pdd": {"transfer": "t", "targets": ["rld0", "md0"], "prompt_tokens": 3}
    }
    alone = job().prefill_body(1, [], transfer="t", targets=("md0",), whole_on_main=False)
    assert alone["kv_transfer_params"]["pdd"]["unmasked"] is True


def test_prefill_whose_token_is_dropped_samples_nothing() -> None:
    body = job().prefill_body(1, [], transfer="t", targets=("md0",), whole_on_main=True)
    assert body["sampling_params"] == {
        "prompt_logprobs": 1,
        "max_tokens": 1,
        "n": 1,
        "detokenize": False,
        "temperature": 0.0,
    }


def test_prefill_without_targets_has_no_order() -> None:
    assert "kv_transfer_params" not in job().prefill_body(
        1, [], transfer="t", targets=(), whole_on_main=False
    )


@pytest.mark.parametrize(("sent", "least"), [(0, 20), (19, 1), (20, None), (30, None)])
def test_decode_asks_for_what_is_left(sent: int, least: int | None) -> None:
    body = job().decode_body(2, list(range(sent)))
    params = body["sampling_params"]
    assert params["max_tokens"] == 50 - sent
    assert params.get("min_tokens") == least
    assert "prompt_logprobs" not in params
    assert "stop" not in params
    assert "kv_transfer_params" not in body
    assert body["token_ids"] == [1, 2, 3, *range(sent)]


def test_ids_begin_with_the_clients_and_differ_per_leg() -> None:
    ids = {job().hop_id(leg) for leg in range(5)}
    assert len(ids) == 5
    assert all(hop.startswith("abc-") for hop in ids)


def test_rendered_parameters_without_a_limit_have_vllms_default() -> None:
    assert read_rendered({"token_ids": [1], "sampling_params": {}}).max_tokens == 16


def test_vllm_renders_what_we_read_and_takes_what_we_send() -> None:
    protocol = pytest.importorskip(
        "vllm.entrypoints.scale_out.token_in_token_out.protocol",
        reason="vllm is not installed, so its bodies cannot be checked",
    )
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=50,
        min_tokens=20,
        stop=["x"],
        logit_bias={"5": 2.0},
        logprobs=True,
        top_logprobs=3,
        bad_words=["no"],
        response_format={"type": "json_object"},
        cache_salt="salt",
    )
    params = request.to_sampling_params(50, {})
    theirs = protocol.GenerateRequest(
        token_ids=[1, 2, 3], sampling_params=params, model="m", cache_salt="salt"
    )
    rendered: Rendered = read_rendered(theirs.model_dump())
    ours = Job(request_id="a", transfer_prefix="a-0-1", rendered=rendered, text=TextOptions(), max_tokens=50)
    bodies = [
        ours.prefill_body(1, [], transfer="t", targets=("md0",), whole_on_main=False),
        ours.prefill_body(1, [7], transfer="t", targets=("md0",), whole_on_main=True),
        ours.decode_body(2, [7]),
        ours.round_body(3, [7]),
    ]
    for body in bodies:
        taken = protocol.GenerateRequest.model_validate(body)
        assert taken.sampling_params.stop == []
        assert taken.sampling_params.max_tokens == body["sampling_params"]["max_tokens"]
    decode = protocol.GenerateRequest.model_validate(bodies[2]).sampling_params
    assert (decode.min_tokens, decode.logit_bias, decode.logprobs) == (19, {5: 2.0}, 3)
    assert decode.structured_outputs.json_object


def test_a_seed_is_carried_from_the_first_token_on_and_penalties_once_there_is_an_answer() -> None:
    ours = job(presence_penalty=0.5, repetition_penalty=1.1)
    first = ours.prefill_body(1, [], transfer="t", targets=("md0",), whole_on_main=False)["sampling_params"]
    assert first["extra_args"] == {"pdd": {"prompt_tokens": 3, "seed": 3}}
    assert (first["presence_penalty"], first["repetition_penalty"], first["seed"]) == (0.5, 1.1, 3)
    later = ours.decode_body(2, [7, 8])["sampling_params"]
    assert later["extra_args"] == {
        "pdd": {"prompt_tokens": 3, "seed": 3, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    }
    assert not {"presence_penalty", "repetition_penalty"} & later.keys()


def test_nothing_is_carried_for_greedy_answers_without_penalties() -> None:
    body = job(temperature=0, extra_args={"mine": 1}, repetition_penalty=1.1).decode_body(2, [7])
    assert body["sampling_params"]["extra_args"] == {"mine": 1}
    assert body["sampling_params"]["repetition_penalty"] == 1.1


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        {"token_ids": [1]},
        {"token_ids": [10**20], "sampling_params": {}},
        {"token_ids": [-1], "sampling_params": {}},
        {"token_ids": ["a"], "sampling_params": {}},
        {"token_ids": [1], "sampling_params": None},
    ],
)
def test_a_rendering_that_is_none_is_the_engines_fault(answer: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="rendering is not of the schema"):
        read_rendered(answer)
