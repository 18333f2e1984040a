"""Tool calls and reasoning over the joined stream, by vLLM's own parsers in a real parse process."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage
from tests.kit.bed import Bed, running_bed
from tests.kit.scripted import ScriptedModel, write_tokenizer

pytest.importorskip("vllm", reason="vllm is not installed, so its parsers cannot be tried")

USER: list[Any] = [{"role": "user", "content": "weather in Ulm?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = '{"name": "weather", "arguments": {"city": "Ulm"}}'
TEXT = f"<think>Ulm, sähr</think>Äh …\n<tool_call>\n{CALL}\n</tool_call>"
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a parse process that listens."""
    folder = tmp_path_factory.mktemp("parser")
    folder.chmod(0o700)
    write_tokenizer(folder)
    config = folder / "pdd.toml"
    engine = '{id = "p0", role = "prefill", port = 1, data_port = 2, control_port = 3}'
    names = ", ".join(f'{key} = "{value}"' for key, value in PARSERS.items())
    config.write_text(
        f'run_dir = "{folder}"\nmodel = {{path = "{folder}", name = "fake", {names}}}\nengines = [{engine}]\n'
    )
    process = Popen([sys.executable, "-m", "pdd.cli", "parser", "--config", str(config)])
    try:
        while not (folder / "parser-8000.sock").exists():
            assert process.poll() is None, "the parse process ended"
            with contextlib.suppress(TimeoutError):
                asyncio.run(asyncio.sleep(0.1))
        yield folder
    finally:
        process.terminate()
        assert process.wait(60) == 0
    assert not (folder / "parser-8000.sock").exists()


@contextlib.asynccontextmanager
async def parsing_bed(run_dir: Path, text: str = TEXT) -> AsyncIterator[tuple[Bed, AsyncOpenAI]]:
    """A router whose engines say ``text``."""
    model = ScriptedModel()
    model.say(USER, text)
    async with (
        running_bed(
            model=model, run_dir=str(run_dir), router={"pipeline": "p-rld-md"}, parsers=PARSERS
        ) as bed,
        AsyncOpenAI(base_url=f"{bed.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield bed, client


def said(message: ChatCompletionMessage) -> tuple[Any, ...]:
    """What a message says, without the ids of its calls."""
    calls = [
        (call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
        if call.type == "function"
    ]
    return (message.model_extra or {}).get("reasoning"), message.content, calls


async def joined(client: AsyncOpenAI, **fields: Any) -> tuple[tuple[Any, ...], str | None, Any]:
    """A streamed answer's deltas put together, its finish reason and its usage."""
    reasoning, content, calls, finish, usage = "", "", dict[int, list[str]](), None, None
    stream = await client.chat.completions.create(
        model="fake", messages=USER, stream=True, stream_options={"include_usage": True}, **fields
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            reasoning += (choice.delta.model_extra or {}).get("reasoning") or ""
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                parts = calls.setdefault(call.index, ["", ""])
                parts[0] += call.function.name or ""
                parts[1] += call.function.arguments or ""
    return (reasoning or None, content or None, [tuple(parts) for parts in calls.values()]), finish, usage


EXPECTED = ("Ulm, sähr", "Äh …\n", [("weather", '{"city": "Ulm"}')])


async def test_streamed_calls_and_reasoning_are_the_same_wherever_the_answer_is_cut(run_dir: Path) -> None:
    async with parsing_bed(run_dir) as (bed, client):
        assert isinstance(bed.model, ScriptedModel)
        for engine in bed.engines.values():
            engine.itl_s = 0.0
        for cut in range(1, len(bed.model.script)):
            bed.agents["p0"].lands_after["md0"] = (bed.rld0, cut)
            answer, finish, usage = await joined(client, tools=TOOLS)
            assert (answer, finish) == (EXPECTED, "tool_calls"), cut
            assert usage.completion_tokens == len(bed.model.script) + 1
            assert usage.completion_tokens_details.reasoning_tokens > 5


async def test_a_whole_answer_is_parsed_alike(run_dir: Path) -> None:
    async with parsing_bed(run_dir) as (bed, client):
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 20)
        answer = await client.chat.completions.create(model="fake", messages=USER, tools=TOOLS, n=2)
        assert [said(choice.message) for choice in answer.choices] == [EXPECTED] * 2
        assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
        ids = {call.id for choice in answer.choices for call in choice.message.tool_calls or ()}
        assert len(ids) == 2


async def test_without_tools_or_with_none_a_call_is_text(run_dir: Path) -> None:
    async with parsing_bed(run_dir) as (_, client):
        text = TEXT.partition("</think>")[2]
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            answer, finish, _ = await joined(client, **fields)
            assert (answer, finish) == (("Ulm, sähr", text, []), "stop")


async def test_required_and_named_calls_have_the_finish_reasons_of_vllm(run_dir: Path) -> None:
    """This parser has the grammar of its own markers for both; the finish reason tells them apart."""
    named: Any = {"type": "function", "function": {"name": "weather"}}
    async with parsing_bed(run_dir) as (_, client):
        for choice, reason in (("required", "tool_calls"), (named, "stop")):
            fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice}
            answer, finish, _ = await joined(client, **fields)
            assert (answer, finish) == (EXPECTED, reason)
            whole = await client.chat.completions.create(model="fake", messages=USER, **fields)
            assert (said(whole.choices[0].message), whole.choices[0].finish_reason) == (EXPECTED, reason)


async def test_hidden_reasoning_leaves_no_trace(run_dir: Path) -> None:
    async with parsing_bed(run_dir) as (bed, _):
        body = await bed.chat(
            USER[0]["content"], include_reasoning=False, logprobs=True, return_token_ids=True
        )
        choice = body["choices"][0]
        assert choice["message"]["reasoning"] is None
        assert not choice["token_ids"]
        assert "Ulm" in choice["message"]["content"]
        assert not choice["logprobs"]["content"]


async def test_calls_in_parallel_can_be_forbidden(run_dir: Path) -> None:
    twice = f"<think>x</think><tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    async with parsing_bed(run_dir, twice) as (_, client):
        assert len((await joined(client, tools=TOOLS))[0][2]) == 2
        assert len((await joined(client, tools=TOOLS, parallel_tool_calls=False))[0][2]) == 1


async def test_without_the_process_the_answer_is_a_clear_error(tmp_path: Path) -> None:
    async with parsing_bed(tmp_path) as (bed, _):
        answer = await bed.post("/v1/chat/completions", messages=USER, tools=TOOLS)
        assert answer.status == 503
        assert "the parsers are not ready" in (await answer.json())["error"]["message"]
    async with running_bed() as bed:
        answer = await bed.post("/v1/chat/completions", messages=USER, tools=TOOLS)
        assert answer.status == 400
        assert "model.tool_call_parser" in (await answer.json())["error"]["message"]
