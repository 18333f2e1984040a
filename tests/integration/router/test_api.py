"""The OpenAI API as clients see it: shapes, streams, bad input, limits, keys, pages."""

import asyncio
import json
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError
from tests.kit.bed import Bed, running_bed
from tests.kit.fake_model import FakeModel

USER = [{"role": "user", "content": "Tell me something about bridges, please."}]


async def read_events(bed: Bed, path: str = "/v1/chat/completions", **fields: Any) -> list[str]:
    """The payloads of a streamed answer."""
    answer = await bed.post(path, stream=True, **fields)
    text = await answer.text()
    assert answer.status == 200, text
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def client_of(bed: Bed) -> AsyncOpenAI:
    """The official client."""
    return AsyncOpenAI(base_url=f"{bed.url}/v1", api_key="unused", max_retries=0)


# ---- the official client


@pytest.mark.parametrize("handoff", ["one-shot", "catch-up"])
async def test_openai_client_holds_a_conversation_streaming_and_not(handoff: str) -> None:
    async with (
        running_bed(router={"pipeline": "p-rld-md", "handoff": handoff}) as bed,
        client_of(bed) as client,
    ):
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 6)
        messages: list[Any] = [{"role": "user", "content": "one"}]
        for turn in range(3):
            expected = bed.model.text(bed.model.generate(bed.model.chat_prompt(messages), 60))
            if turn % 2:
                whole = await client.chat.completions.create(model="fake", messages=messages, max_tokens=60)
                text = whole.choices[0].message.content
                assert whole.usage is not None
                assert whole.usage.completion_tokens == 60
            else:
                stream = await client.chat.completions.create(
                    model="fake", messages=messages, max_tokens=60, stream=True
                )
                chunks = [chunk async for chunk in stream]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                assert chunks[-1].choices[0].finish_reason == "length"
            assert text == expected
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"turn {turn}"}]
        record = await bed.last_record()
        assert 0 < record["wan_bytes"] < record["wan_bytes_without_drc"] / 2
        await bed.until_free()


async def test_openai_client_sees_errors_as_its_own_classes() -> None:
    async with running_bed() as bed, client_of(bed) as client:
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model="fake", messages=[], max_tokens=5)
        assert caught.value.status_code == 400
        bed.md0.kill_stream_after = bed.rld0.kill_stream_after = 2
        stream = await client.chat.completions.create(
            model="fake",
            messages=USER,
            max_tokens=50,
            stream=True,
            response_format={"type": "json_object"},
        )
        with pytest.raises(APIError):
            async for _ in stream:
                pass


async def test_openai_client_reads_logprobs_over_the_handoff() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed, client_of(bed) as client:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 6)
        answer = await client.chat.completions.create(
            model="fake",
            messages=USER,
            max_tokens=40,
            logprobs=True,
            top_logprobs=3,  # type: ignore[arg-type]
        )
        assert (await bed.last_record())["eager_tokens"] > 0
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content) == 40
        assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)


# ---- streams


async def test_usage_comes_last_and_only_when_asked_for() -> None:
    async with running_bed() as bed:
        plain = [json.loads(e) for e in (await read_events(bed, messages=USER, max_tokens=4))[:-1]]
        assert all("usage" not in event for event in plain)
        events = await read_events(bed, messages=USER, max_tokens=4, stream_options={"include_usage": True})
        assert events[-1] == "[DONE]"
        last = json.loads(events[-2])
        prompt = len(bed.model.chat_prompt(USER))
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens"] == prompt
        assert last["usage"]["completion_tokens"] == 4
        assert (
            last["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt // 32 * 32
        )  # its second time at P


async def test_continuous_usage_counts_up() -> None:
    async with running_bed() as bed:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await read_events(bed, messages=USER, max_tokens=4, stream_options=options)
        counts = [json.loads(e)["usage"]["completion_tokens"] for e in events[:-1]]
        assert counts == [0, 1, 2, 3, 4, 4]


async def test_first_chunk_has_the_role_and_headers_name_the_pipeline() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        answer = await bed.post(
            "/v1/chat/completions", messages=USER, max_tokens=4, stream=True, headers={"X-Request-Id": "abc"}
        )
        first = json.loads((await answer.content.readline()).removeprefix(b"data: "))
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert first["id"] == "chatcmpl-abc"
        assert answer.headers["x-pdd-pipeline"] == "p-rld-md"
        assert answer.headers["x-pdd-reason"] == "forced"
        assert answer.headers["X-Request-Id"] == "abc"
        await answer.read()
        assert (await bed.record("abc"))["id"] == "abc"


async def test_request_id_is_in_every_hop_and_unique_in_engines() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 6)
        odd = "a/b:c" + "x" * 190
        await asyncio.gather(
            *(
                bed.post("/v1/chat/completions", messages=USER, max_tokens=40, headers={"X-Request-Id": odd})
                for _ in range(2)
            )
        )
        ids = [headers["X-Request-Id"] for engine in bed.engines.values() for headers in engine.headers]
        assert all(hop.startswith(odd) for hop in ids)
        assert len(set(ids)) == len(ids)
        bodies = [body["request_id"] for engine in bed.engines.values() for body in engine.seen]
        assert len(set(bodies)) == len(bodies)
        assert len(bed.agents["p0"].transfers) == 2


async def test_silence_is_filled_with_comments_that_clients_do_not_see() -> None:
    async with running_bed(router={"keep_alive_interval_s": 0.05}) as bed:
        bed.p0.prefill_s = 0.3
        answer = await bed.post("/v1/chat/completions", messages=USER, max_tokens=4, stream=True)
        text = await answer.text()
        assert text.startswith(": keep-alive\n\n")
        async with client_of(bed) as client:
            stream = await client.chat.completions.create(
                model="fake",
                messages=USER,
                max_tokens=4,
                stream=True,  # type: ignore[arg-type]
            )
            assert len([chunk async for chunk in stream]) == 5


async def test_stop_string_over_the_handoff_ends_the_answer_and_frees_the_engines() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        text = bed.reference("find a stop", 80)
        stop = text[40:43]
        cut = text.index(stop)
        body = await bed.chat("find a stop", max_tokens=80, stop=[stop])
        choice = body["choices"][0]
        assert choice["message"]["content"] == text[:cut]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        body = await bed.chat("find a stop", max_tokens=80, stop=[stop], include_stop_str_in_output=True)
        assert body["choices"][0]["message"]["content"] == text[: cut + len(stop)]
        assert all("stop" not in seen["sampling_params"] for e in bed.engines.values() for seen in e.seen)
        await bed.until_free()


async def test_n_answers_are_n_requests() -> None:
    async with running_bed() as bed:
        body = await bed.chat("many", max_tokens=5, n=3)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["completion_tokens"] == 15
        assert len(bed.p0.seen) == 3
        events = [json.loads(e) for e in (await read_events(bed, messages=USER, max_tokens=5, n=2))[:-1]]
        assert {e["choices"][0]["index"] for e in events} == {0, 1}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_token_of_every_choice_has_its_log_probabilities(path: str, stream: bool) -> None:
    chat = path.startswith("/v1/chat")
    fields: dict[str, Any] = {"n": 2, "max_tokens": 30, "return_token_ids": True}
    fields |= (
        {"messages": USER, "logprobs": True, "top_logprobs": 2} if chat else {"prompt": "Hi", "logprobs": 2}
    )
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 6)
        if stream:
            events = [json.loads(e) for e in (await read_events(bed, path, **fields))[:-1]]
            parts = [choice for event in events for choice in event["choices"]]
        else:
            parts = (await (await bed.post(path, **fields)).json())["choices"]
        prompt = bed.model.chat_prompt(USER) if chat else bed.model.tokenizer.encode("Hi").ids
        reply = bed.model.generate(prompt, 30)
        texts = [bed.model.tokenizer.decode([token], skip_special_tokens=False) for token in reply]
        for index in range(2):
            mine = [p for p in parts if p["index"] == index]
            assert [token for p in mine for token in p.get("token_ids") or ()] == reply
            said = [p["logprobs"] for p in mine if p["logprobs"]]
            if chat:
                entries = [entry for part in said for entry in part["content"]]
                assert [entry["token"] for entry in entries] == texts
                assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
            else:
                assert [token for part in said for token in part["tokens"]] == texts
                assert {value for part in said for value in part["token_logprobs"]} == {-0.5}
        assert len(bed.rld0.seen) == 2


# ---- completions


@pytest.mark.parametrize("as_ids", [False, True])
async def test_completions_of_text_and_of_token_ids(as_ids: bool) -> None:
    async with running_bed() as bed:
        ids = bed.model.tokenizer.encode("once upon a time").ids
        prompt = ids if as_ids else "once upon a time"
        answer = await bed.post("/v1/completions", prompt=prompt, max_tokens=30, logprobs=2)
        choice = (await answer.json())["choices"][0]
        assert choice["text"] == bed.model.text(bed.model.generate(ids, 30))
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == 30
        assert choice["logprobs"]["text_offset"][0] == 0


async def test_completions_of_many_prompts_and_echo() -> None:
    async with running_bed() as bed:
        answer = await bed.post("/v1/completions", prompt=["one", "two"], max_tokens=5, n=2, echo=True)
        body = await answer.json()
        assert [c["text"][:3] for c in body["choices"]] == ["one", "one", "two", "two"]
        assert body["usage"]["prompt_tokens"] == 6
        assert answer.headers["x-pdd-reason"] == "not_relayable:echo"
        events = await read_events(bed, "/v1/completions", prompt="one", max_tokens=2, echo=True)
        assert json.loads(events[0])["choices"][0]["text"] == "one"


async def test_completions_default_to_sixteen_tokens() -> None:
    async with running_bed() as bed:
        answer = await bed.post("/v1/completions", prompt="hello")
        assert (await answer.json())["usage"]["completion_tokens"] == 16


async def test_token_ids_on_request() -> None:
    async with running_bed() as bed:
        body = await bed.chat("ids", max_tokens=20, return_token_ids=True)
        prompt = bed.model.chat_prompt([{"role": "user", "content": "ids"}])
        assert body["prompt_token_ids"] == prompt
        assert body["choices"][0]["token_ids"] == bed.model.generate(prompt, 20)


# ---- what is not relayable


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"response_format": {"type": "json_object"}}, "structured_output"),
        ({"bad_words": ["two tokens"]}, "bad_words"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_what_is_not_relayable_goes_p_md_and_says_so(fields: dict[str, Any], reason: str) -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        answer = await bed.post("/v1/chat/completions", messages=USER, max_tokens=20, **fields)
        body = await answer.json()
        assert answer.status == 200, body
        assert answer.headers["x-pdd-pipeline"] == "p-md"
        assert answer.headers["x-pdd-reason"] == f"not_relayable:{reason}"
        assert bed.rld0.seen == []
        if reason != "prompt_logprobs":
            assert len(bed.md0.seen[0]["token_ids"]) == len(
                bed.model.chat_prompt(USER)
            )  # MD makes every token
        else:
            assert body["prompt_logprobs"] == [None]
        async with bed.client.get(f"{bed.url}/metrics") as page:
            assert f'pdd_not_relayable_total{{what="{reason}"}} 1.0' in await page.text()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"seed": 3, "temperature": 1.0}, "seed"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ],
)
async def test_seeds_and_penalties_are_relayed_where_every_engine_continues_them(
    fields: dict[str, Any], reason: str
) -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 6)
        answer = await bed.post("/v1/chat/completions", messages=USER, max_tokens=20, **fields)
        assert answer.headers["x-pdd-pipeline"] == "p-rld-md"
        prompt = bed.model.chat_prompt(USER)
        for engine in (bed.rld0, bed.md0):
            carried = engine.seen[-1]["sampling_params"]["extra_args"]["pdd"]
            assert carried == {"prompt_tokens": len(prompt), reason: fields[reason]}
    async with running_bed(router={"pipeline": "p-rld-md"}, vllm_args=["--speculative-config", "{}"]) as bed:
        answer = await bed.post("/v1/chat/completions", messages=USER, max_tokens=20, **fields)
        assert answer.headers["x-pdd-reason"] == f"not_relayable:{reason}"


@pytest.mark.parametrize("sampler", ["", "v2"])
async def test_an_engine_that_says_it_samples_otherwise_keeps_seeds_from_being_relayed(sampler: str) -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        agent = bed.agents["md0"]
        agent.sampler = sampler
        await agent.say("engine", connected=True)
        heard = bed.router.fleet.engines["md0"].agent
        await bed.until(lambda: heard.sampler == sampler)
        answer = await bed.post("/v1/chat/completions", messages=USER, max_tokens=5, seed=3, temperature=1.0)
        assert answer.headers["x-pdd-reason"] == "not_relayable:seed"


async def test_single_token_bad_words_are_relayed() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        answer = await bed.post("/v1/chat/completions", messages=USER, max_tokens=5, seed=1, temperature=0)
        assert answer.headers["x-pdd-pipeline"] == "p-rld-md"


# ---- parameters over the legs


async def test_every_leg_asks_only_for_what_is_left() -> None:
    async with running_bed(router={"pipeline": "p-rld-md", "handoff": "one-shot"}) as bed:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 6)
        await bed.chat("count", max_tokens=60, min_tokens=50)
        (p,), (rld,), (md,) = bed.p0.seen, bed.rld0.seen, bed.md0.seen
        assert (p["sampling_params"]["max_tokens"], p["sampling_params"]["min_tokens"]) == (1, 1)
        assert (rld["sampling_params"]["max_tokens"], rld["sampling_params"]["min_tokens"]) == (59, 49)
        sent = len(md["token_ids"]) - len(p["token_ids"])
        assert sent > 1
        assert md["sampling_params"]["max_tokens"] == 60 - sent
        assert md["sampling_params"].get("min_tokens", 0) == max(0, 50 - sent)
        assert p["kv_transfer_params"]["pdd"]["targets"] == ["rld0", "md0"]
        assert p["kv_transfer_params"]["pdd"]["prompt_tokens"] == len(p["token_ids"])
        assert "kv_transfer_params" not in rld
        assert "kv_transfer_params" not in md


async def test_one_token_needs_only_p_and_orders_no_transfer() -> None:
    async with running_bed() as bed:
        body = await bed.chat("just one", max_tokens=1)
        assert body["usage"]["completion_tokens"] == 1
        assert "kv_transfer_params" not in bed.p0.seen[0]
        assert bed.rld0.seen == bed.md0.seen == []


async def test_eos_as_first_token_needs_no_decode_engine() -> None:
    model = FakeModel()
    length = len(model.chat_prompt(USER))
    async with running_bed(model=FakeModel(eos_lengths=frozenset({length}))) as bed:
        bed.agents["p0"].landing_s["md0"] = 1.0
        answer = await bed.post("/v1/chat/completions", messages=USER, max_tokens=10)
        choice = (await answer.json())["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")
        assert bed.rld0.seen == bed.md0.seen == []
        await bed.until_free()
        answer = await bed.post("/v1/chat/completions", messages=USER, max_tokens=64, ignore_eos=True)
        assert (await answer.json())["usage"]["completion_tokens"] == 64


# ---- bad input

BAD: list[tuple[dict[str, Any], int, str | None]] = [
    ({"messages": []}, 400, "messages"),
    ({"messages": "hello"}, 400, "messages"),
    ({}, 400, "messages"),
    ({"messages": USER, "max_tokens": 0}, 400, "max_tokens"),
    ({"messages": USER, "max_tokens": -1}, 400, "max_tokens"),
    ({"messages": USER, "max_tokens": "5"}, 400, "max_tokens"),
    ({"messages": USER, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({"messages": USER, "n": 0}, 400, "n"),
    ({"messages": USER, "temperature": "hot"}, 400, "temperature"),
    ({"messages": USER, "made_up": 1}, 400, "made_up"),
    ({"messages": USER, "model": "other"}, 404, "model"),
    ({"messages": USER, "kv_transfer_params": {"pdd": {}}}, 400, "kv_transfer_params"),
    ({"messages": USER, "tools": [{"type": "function"}]}, 400, "tools"),
    ({"messages": USER, "tool_choice": "auto"}, 400, "tool_choice"),
    ({"messages": USER, "top_logprobs": 3}, 400, "top_logprobs"),
    ({"messages": USER, "stop": [""]}, 400, "stop"),
    ({"messages": USER, "stop": 5}, 400, "stop"),
    ({"messages": USER, "echo": True}, 400, "echo"),
    ({"messages": [{"role": "user"}]}, 400, "messages"),
    ({"messages": USER, "max_tokens": 5000}, 400, None),
]


async def test_bad_input_is_refused_alike_streaming_and_not_and_disturbs_no_engine() -> None:
    async with running_bed() as bed:
        for fields, status, param in BAD:
            for stream in (False, True):
                answer = await bed.post("/v1/chat/completions", **{"stream": stream, **fields})
                body = await answer.json()
                error = body["error"]
                assert answer.status == error["code"] == status, (fields, body)
                assert answer.headers["Content-Type"].startswith("application/json")
                assert set(error) == {"message", "type", "param", "code"}
                assert error["param"] == param, (fields, body)
                assert error["message"]
        assert all(engine.seen == [] for engine in bed.engines.values())
        assert (await bed.chat("still fine", max_tokens=3))["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000])
async def test_malformed_bodies(raw: bytes) -> None:
    async with running_bed() as bed, bed.client.post(f"{bed.url}/v1/completions", data=raw) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "BadRequestError"


async def test_stream_options_without_stream_is_refused() -> None:
    async with running_bed() as bed:
        answer = await bed.post("/v1/chat/completions", messages=USER, stream_options={"include_usage": True})
        assert answer.status == 400


async def test_a_prompt_between_the_limits_of_two_engines_is_refused_before_any_work() -> None:
    async with running_bed(wait_ready=False) as bed:
        bed.md0.max_model_len = 200
        fleet = bed.router.fleet
        await bed.until(lambda: all(s.view.healthy and s.view.kv_ready for s in fleet.engines.values()))
        answer = await bed.post("/v1/completions", prompt="x" * 190, max_tokens=11)
        body = await answer.json()
        assert (answer.status, body["error"]["code"]) == (400, 400)
        assert "200" in body["error"]["message"]
        assert all(engine.seen == [] for engine in bed.engines.values())
        answer = await bed.post("/v1/completions", prompt="x" * 190, max_tokens=10)
        assert answer.status == 200
        answer = await bed.post("/v1/completions", prompt="x" * 200)
        assert answer.status == 400


async def test_bodies_up_to_the_limit_pass_and_larger_ones_get_413() -> None:
    async with running_bed(router={"max_body_bytes": 300_000}) as bed:
        for engine in bed.engines.values():
            engine.max_model_len = 1_000_000
        for state in bed.router.fleet.engines.values():
            state.max_model_len = 1_000_000
        for size in (33 * 1024, 129 * 1024):
            answer = await bed.post("/v1/completions", prompt="x" * size, max_tokens=1)
            assert answer.status == 200
        answer = await bed.post("/v1/completions", prompt="x" * 310_000, max_tokens=1)
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (413, 413)
        assert "300000" in error["message"]


# ---- keys, pages, headers


async def test_api_keys() -> None:
    async with running_bed(router={"api_keys": ["right"]}) as bed:
        for key in (None, "Bearer wrong", "Basic right", "right"):
            headers = {"Authorization": key} if key else None
            answer = await bed.post("/v1/chat/completions", messages=USER, max_tokens=1, headers=headers)
            assert answer.status == 401
            assert (await answer.json())["error"]["type"] == "AuthenticationError"
        headers = {"Authorization": "Bearer right"}
        assert (
            await bed.post("/v1/chat/completions", messages=USER, max_tokens=1, headers=headers)
        ).status == 200
        async with bed.client.get(f"{bed.url}/health") as answer:
            assert answer.status == 200


async def test_headers_that_would_choose_a_backend_are_ignored() -> None:
    async with running_bed() as bed:
        headers = {"x-prefiller-host-port": "127.0.0.1:1", "x-data-parallel-host-port": "127.0.0.1:1"}
        answer = await bed.post("/v1/chat/completions", messages=USER, max_tokens=3, headers=headers)
        assert answer.status == 200
        sent = {name.lower() for engine in bed.engines.values() for h in engine.headers for name in h}
        assert "x-prefiller-host-port" not in sent


async def test_pages() -> None:
    async with running_bed() as bed:
        async with bed.client.get(f"{bed.url}/v1/models") as answer:
            (card,) = (await answer.json())["data"]
            assert (card["id"], card["max_model_len"]) == ("fake", 4096)
        for path, status in (
            ("/version", 200),
            ("/ping", 200),
            ("/v1/models/fake", 200),
            ("/v1/models/none", 404),
            ("/pdd/requests/none", 404),
            ("/nowhere", 404),
            ("/v1/chat/completions", 405),
        ):
            async with bed.client.get(bed.url + path) as answer:
                assert answer.status == status, path
                if status >= 400:
                    assert (await answer.json())["error"]["code"] == status


async def test_ready_only_when_a_whole_path_exists() -> None:
    async with running_bed() as bed:
        async with bed.client.get(f"{bed.url}/ready") as answer:
            assert answer.status == 200
        await bed.p0.stop()
        bed.router.fleet.engines["p0"].suspect()
        async with bed.client.get(f"{bed.url}/ready") as answer:
            assert answer.status == 503
            assert "p0" in (await answer.json())["missing"][0]
        async with bed.client.get(f"{bed.url}/health") as answer:
            assert answer.status == 200
        await bed.p0.start()
        await bed.until(lambda: not bed.router.fleet.missing_for_ready())


async def test_a_pair_that_does_not_fit_is_no_path_and_is_named() -> None:
    async with running_bed() as bed:
        agent = bed.agents["p0"]
        await agent.say("link", peer="rld0", state="incompatible", reason="dtype: a != b")
        await bed.until(lambda: bool(bed.router.fleet.incompatible()))
        async with bed.client.get(f"{bed.url}/ready") as answer:
            assert answer.status == 200
            assert (await answer.json())["incompatible"] == [
                {"from": "p0", "to": "rld0", "reason": "dtype: a != b"}
            ]
        await agent.say("link", peer="md0", state="incompatible", reason="hash: a != b")
        await bed.until(lambda: bool(bed.router.fleet.missing_for_ready()))
        async with bed.client.get(f"{bed.url}/ready") as answer:
            assert answer.status == 503
            assert (await answer.json())["missing"] == ["p0 and md0: hash: a != b"]
        await agent.say("link", peer="md0", state="up", reason=None)
        await bed.until(lambda: not bed.router.fleet.missing_for_ready())


async def test_a_client_may_ask_for_a_shorter_deadline() -> None:
    async with running_bed() as bed:
        bed.p0.prefill_s = 5
        answer = await bed.post(
            "/v1/completions", prompt="slow", max_tokens=5, headers={"X-Request-Timeout": "0.2"}
        )
        assert answer.status == 504
        assert (await answer.json())["error"]["type"] == "TimeoutError"
        await bed.until_free()
        bed.p0.prefill_s = 0
        for wrong in ("soon", "0", "-1", "inf", "nan"):
            answer = await bed.post(
                "/v1/completions", prompt="x", max_tokens=5, headers={"X-Request-Timeout": wrong}
            )
            assert answer.status == 400, wrong


async def test_beyond_the_queue_is_429_with_retry_after_and_urgent_requests_go_first() -> None:
    router = {"pipeline": "p-md", "max_concurrent_requests": 1, "queue_size": 2}
    async with running_bed(router=router) as bed:
        bed.agents["p0"].hold("md0")  # the first stays in until the others have queued

        async def ask(name: str, **fields: Any) -> int:
            answer = await bed.post("/v1/completions", prompt=name, max_tokens=3, **fields)
            if answer.status == 429:
                assert int(answer.headers["Retry-After"]) >= 1
                assert (await answer.json())["error"]["type"] == "RateLimitError"
            else:
                order.append(name)
            return answer.status

        order: list[str] = []
        tasks = [asyncio.create_task(ask("first"))]
        await bed.until(lambda: bool(bed.agents["p0"].transfers))
        for name, priority in (("later", 5), ("late", 4), ("urgent", 0)):
            tasks.append(asyncio.create_task(ask(name, priority=priority)))
            await bed.until(
                lambda: (
                    bed.router.metrics.queued.collect()[0].samples[0].value >= len(tasks) - 1
                    or len(tasks) > 3
                )
            )
        await bed.until(tasks[1].done)  # the urgent one took its place
        bed.agents["p0"].let_land("md0")
        assert await asyncio.gather(*tasks) == [200, 429, 200, 200]
        assert order == ["first", "urgent", "late"]
        await bed.until_free()


@pytest.mark.parametrize("room", [1, 2, 3])
async def test_an_answer_ends_where_the_smaller_engine_is_full(room: int) -> None:
    """MD takes fewer tokens than P, and the client names no bound: nobody is asked for none."""
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        messages = [{"role": "user", "content": "Hello there"}]
        full = len(bed.model.chat_prompt(messages)) + room
        bed.router.fleet.engines["md0"].max_model_len = full
        body = await bed.chat("Hello there", ignore_eos=True)
        assert body["usage"]["completion_tokens"] == room
        asked = [seen["sampling_params"]["max_tokens"] for seen in bed.md0.seen]
        assert asked == ([] if room == 1 else [room - 1])
