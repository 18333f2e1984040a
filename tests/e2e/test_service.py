"""What a user and an operator see of a real fleet: clients, limits, costs at rest, faults and clean ends."""

import asyncio
import time

import aiohttp
import openai
import pytest
from tests.e2e.client import HANDED_OVER_TOKENS, random_prompt, wait_until
from tests.e2e.fleet import CHUNK_TOKENS, Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

LONG_TEXT = "The river does not hurry, and yet it reaches the sea: ça coule, 海へ流れる, 🌊. "


@pytest.mark.parametrize("mode", ["one-shot", "catch-up", "p-md"])
async def test_the_official_client_holds_a_conversation(fleet: Fleet, mode: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{fleet.router(mode).url}/v1", api_key="none")
    messages: list[dict[str, str]] = [{"role": "user", "content": LONG_TEXT * 8}]
    for turn in range(3):
        whole = await client.chat.completions.create(
            model="pdd",
            messages=messages,
            max_tokens=40,
            temperature=0,  # type: ignore[arg-type]
        )
        stream = await client.chat.completions.create(
            model="pdd", messages=messages, max_tokens=40, temperature=0, stream=True,  # type: ignore[arg-type]
            stream_options={"include_usage": True},
        )  # fmt: skip
        text, usage = "", None
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == whole.choices[0].message.content
        assert usage is not None
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens == 40
        assert usage.prompt_tokens == whole.usage.prompt_tokens
        if turn:
            assert whole.usage.prompt_tokens_details is not None
            assert (whole.usage.prompt_tokens_details.cached_tokens or 0) >= CHUNK_TOKENS
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And then? {turn}"}]
    await client.close()


async def test_text_is_what_one_engine_would_have_written(fleet: Fleet) -> None:
    """Multi-byte characters split over tokens survive the boundary between engines."""
    prompt = random_prompt(150, seed=700)
    expected = await fleet.reference_text(prompt, max_tokens=120)
    answer = await fleet.router("one-shot").complete(prompt, max_tokens=120)
    assert answer.text == expected


BAD_REQUESTS: list[tuple[str, object, int]] = [
    ("malformed JSON", b'{"model": "pdd", ', 400),
    ("unknown model", {"model": "other", "prompt": "x"}, 404),
    ("wrong type", {"model": "pdd", "prompt": "x", "max_tokens": "many"}, 400),
    ("wrong type of temperature", {"model": "pdd", "prompt": "x", "temperature": "hot"}, 400),
    ("no tokens", {"model": "pdd", "prompt": "x", "max_tokens": 0}, 400),
    ("negative tokens", {"model": "pdd", "prompt": "x", "max_tokens": -1}, 400),
    ("unknown field", {"model": "pdd", "prompt": "x", "frobnicate": True}, 400),
    ("beyond every limit", {"model": "pdd", "prompt": [200] * 5000, "max_tokens": 1}, 400),
    ("beyond the limit with the answer", {"model": "pdd", "prompt": [200] * 4090, "max_tokens": 10}, 400),
    (
        "engine parameters",
        {"model": "pdd", "prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}},
        400,
    ),
    ("token beyond the vocabulary", {"model": "pdd", "prompt": [10**7], "max_tokens": 2}, 400),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "body", "status"), BAD_REQUESTS, ids=[row[0] for row in BAD_REQUESTS])
async def test_bad_input_is_an_openai_error_with_its_status(
    fleet: Fleet, name: str, body: object, status: int, stream: bool
) -> None:
    if isinstance(body, dict):
        body = {**body, "stream": stream}
    url = f"{fleet.router('one-shot').url}/v1/completions"
    kwargs = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with fleet.session.post(url, headers={"Content-Type": "application/json"}, **kwargs) as response:
        answer = await response.json(content_type="application/json")
        assert response.status == status, (name, answer)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == status
    assert answer["error"]["message"]


async def test_empty_messages_are_refused(fleet: Fleet) -> None:
    url = f"{fleet.router('one-shot').url}/v1/chat/completions"
    async with fleet.session.post(url, json={"model": "pdd", "messages": []}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == 400


async def test_a_prompt_at_the_limit_is_answered(fleet: Fleet) -> None:
    prompt = random_prompt(fleet.max_model_len - 1, seed=710)
    answer = await fleet.router("one-shot").complete(prompt, max_tokens=1)
    assert answer.tokens == await fleet.reference.complete(prompt, max_tokens=1)
    prompt = random_prompt(fleet.max_model_len - 12, seed=711)
    answer = await fleet.router("one-shot").complete(prompt, max_tokens=12)
    assert answer.tokens == await fleet.reference.complete(prompt, max_tokens=12)


async def test_what_cannot_be_relayed_goes_p_md_and_says_so(fleet: Fleet) -> None:
    prompt = random_prompt(100, seed=720)
    answer = await fleet.router("auto").complete(prompt, max_tokens=12, bad_words=["no such saying"])
    assert answer.headers["x-pdd-pipeline"] == "p-md"
    assert "bad_words" in answer.headers["x-pdd-reason"]
    assert len(answer.tokens) == 12


async def test_prompts_beyond_the_primary_tier_still_end(fleet: Fleet) -> None:
    """RLD's primary tier holds fewer chunks than one of these prompts; two at once are far beyond it."""
    assert fleet.relay_primary_chunks * CHUNK_TOKENS < 2500
    prompts = [random_prompt(2500, seed=730 + i) for i in range(3)]
    one = await fleet.router("one-shot").complete(prompts[0], max_tokens=20)
    two = await asyncio.gather(*(fleet.router("one-shot").complete(p, max_tokens=20) for p in prompts[1:]))
    for prompt, answer in zip(prompts, [one, *two], strict=True):
        assert answer.tokens == await fleet.reference.complete(prompt, max_tokens=20)


async def test_a_client_that_leaves_frees_every_engine_within_two_seconds(fleet: Fleet) -> None:
    for held in (True, False):
        if held:
            await fleet.line.hold()
        try:
            times_s: list[float] = []
            while len(times_s) < 3 and min(times_s, default=2.0) >= 2:  # one that stood still says little
                times_s.append(await freed_s(fleet, random_prompt(600, seed=740 + held + 2 * len(times_s))))
            print(f"engines were free {times_s} s after the client left (line held: {held})")
            assert min(times_s) < 2
        finally:
            await fleet.line.resume()


async def freed_s(fleet: Fleet, prompt: list[int]) -> float:
    """Time from a client's leaving in the middle of its answer until no engine runs anything."""
    body = {"model": "pdd", "prompt": prompt, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        response = await session.post(f"{fleet.router('one-shot').url}/v1/completions", json=body)
        await response.content.readuntil(b"\n\n")
        await wait_until(fleet.any_engine_is_running, what="the request running on an engine")
        response.close()
    left_s = time.monotonic()
    await wait_until(fleet.every_engine_is_free, what="every engine being free", timeout_s=20)
    return time.monotonic() - left_s


async def test_an_engine_at_rest_costs_next_to_nothing(fleet: Fleet) -> None:
    """CPU time, not wall time: what the processes themselves used in the window."""
    await wait_until(fleet.every_engine_is_free, what="every engine being free")
    await asyncio.sleep(2)
    with fleet.one_router():
        used = await fleet.cpu_share(window_s=8)
    print("CPU shares at rest:", used)
    for name, share in used.items():
        assert share < 0.05, (name, used)


async def test_transfers_in_flight_do_not_wake_the_main_engine(fleet: Fleet) -> None:
    await wait_until(fleet.every_engine_is_free, what="every engine being free")
    idle = (await fleet.cpu_share(window_s=8))["md0"]
    await fleet.line.hold()
    try:
        prompts = [random_prompt(600, seed=750 + i) for i in range(8)]
        requests = [asyncio.create_task(fleet.router("p-md").complete(p, max_tokens=4)) for p in prompts]
        await wait_until(lambda: fleet.num_open_transfers("p0", at_least=8), what="eight transfers in flight")
        await asyncio.sleep(1)
        busy = (await fleet.cpu_share(window_s=8))["md0"]
    finally:
        await fleet.line.resume()
    await asyncio.gather(*requests)
    print(f"CPU share of MD's engine: idle {idle:.4f}, with eight transfers in flight {busy:.4f}")
    assert busy <= idle + 0.10


async def test_a_restarted_main_engine_finds_its_prefix_in_the_agents_store(fleet: Fleet) -> None:
    history = random_prompt(640, seed=760)
    first = await fleet.router("one-shot").complete(history, max_tokens=HANDED_OVER_TOKENS)
    history = [*history, *first.tokens, *random_prompt(20, seed=761)]
    fleet.kill_engine("md0")
    await fleet.wait_engine_restarted("md0")
    answer = await fleet.router("one-shot").complete(history, max_tokens=HANDED_OVER_TOKENS)
    assert answer.tokens == await fleet.reference.complete(history, max_tokens=HANDED_OVER_TOKENS)
    assert answer.record["md_cached_tokens"] >= 640
    assert answer.record["wan_bytes"] <= 3 * fleet.chunk_bytes


async def test_metrics_of_router_and_agents_can_be_scraped(fleet: Fleet) -> None:
    async with fleet.session.get(f"{fleet.router('one-shot').url}/metrics") as response:
        text = await response.text()
    assert "pdd_handoff_total" in text
