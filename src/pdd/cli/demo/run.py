"""Runs the demo: prepare the model, boot the two sites, ask the script's questions, report, serve."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pdd.cli.demo import report, script
from pdd.cli.demo.client import DemoClient
from pdd.cli.demo.screen import Screen
from pdd.cli.demo.settings import DEMO_MODEL, DemoModel, DemoSettings, demo_config, own_model
from pdd.config.load import load_config
from pdd.config.schema import PddConfig
from pdd.core.errors import PddError
from pdd.launch.fleet import (
    agent_program,
    engine_program,
    link_program,
    pdd_argv,
    reference_program,
    router_program,
)
from pdd.launch.ports import free_ports
from pdd.launch.program import Program
from pdd.launch.supervisor import Supervisor

DEMO_MAX_MODEL_LEN = 4096
"""Room for the script twice over; the engines' memory is sized by it."""
MODEL_S = 600.0
REQUEST_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """All that flags say about a demo."""

    settings: DemoSettings
    once: bool
    reference: bool
    json_path: Path | None
    config_out: Path | None
    cache: Path
    run_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Whom the script asks: the router, and a plain engine if answers are compared."""

    router: DemoClient
    reference: DemoClient | None


async def run_demo(supervisor: Supervisor, screen: Screen, options: DemoOptions) -> int:
    """The script has run and, unless ``once``, the endpoint was served until Ctrl-C; returns the exit status.

    Raises:
        ConfigurationError: If a port is taken or the model cannot be had.
        LaunchError: If a program does not become ready.
    """
    reference_port = free_ports(1)[0] if options.reference else None
    with screen:
        model = await _prepare_model(supervisor, options)
        config_path = _write_config(options, model)
        config = load_config(config_path, environ={})
        await _boot(supervisor, config, config_path, reference_port)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as session:
        router_url = f"http://{config.router.host}:{config.router.port}"
        reference_url = f"http://127.0.0.1:{reference_port}"
        endpoints = Endpoints(
            router=DemoClient(session, url=router_url, model=model.name),
            reference=DemoClient(session, url=reference_url, model=model.name) if reference_port else None,
        )
        started_s = time.monotonic()
        results = await _run_script(endpoints, screen)
        all_well = _report(results, screen, options, elapsed_s=time.monotonic() - started_s)
        if options.once:
            return 0 if all_well else 1
        supervisor.serving = True
        _print_examples(screen, router_url, model.name)
        await asyncio.Event().wait()
        return 0


async def _prepare_model(supervisor: Supervisor, options: DemoOptions) -> DemoModel:
    name = options.settings.model
    if name != DEMO_MODEL:
        return own_model(name)
    # In a process of its own, so that torch's memory is given back before the engines need it.
    argv = pdd_argv("model", "demo", "--cache", str(options.cache))
    lines = await supervisor.run(
        Program(name="model", argv=argv, env={"OMP_NUM_THREADS": "1"}, ready_timeout_s=MODEL_S, ends=True)
    )
    return DemoModel(
        path=lines[-1], name="SmolLM2-135M-Instruct", dtype="float32", max_model_len=DEMO_MAX_MODEL_LEN
    )


def _write_config(options: DemoOptions, model: DemoModel) -> Path:
    text = demo_config(options.settings, model, run_dir=options.run_dir)
    path = options.run_dir / "pdd.toml"
    path.write_text(text, encoding="utf-8")
    if options.config_out is not None:
        options.config_out.write_text(text, encoding="utf-8")
    return path


async def _boot(
    supervisor: Supervisor, config: PddConfig, config_path: Path, reference_port: int | None
) -> None:
    """Both sites, the line between them and the router are ready."""
    agents = [agent_program(config, engine, config_path=config_path) for engine in config.engines]
    engines = [engine_program(config, engine) for engine in config.engines]
    if reference_port is not None:
        engines.append(reference_program(config, port=reference_port))
    link, router = (
        link_program(config, config_path=config_path),
        router_program(config, config_path=config_path),
    )
    supervisor.check([*agents, *engines, link, router])
    await _start_together(supervisor, [link, *agents])
    await _start_together(supervisor, engines)
    await supervisor.start(router)


async def _start_together(supervisor: Supervisor, programs: list[Program]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for program in programs:
                group.create_task(supervisor.start(program))
    except* PddError as failures:
        raise failures.exceptions[0] from None


async def _run_script(endpoints: Endpoints, screen: Screen) -> list[report.Result]:
    console = screen.console
    results = []
    conversation = script.Conversation()
    for number, turn in enumerate(script.TURNS, start=1):
        console.print(f"\n[bold]turn {number}[/]  {turn.question}")
        result, text = await _ask(
            endpoints,
            f"turn {number}",
            conversation.messages,
            turn.max_tokens,
            lambda piece: console.print(piece, end="", markup=False, style="cyan", soft_wrap=True),
        )
        console.print()
        results.append(result)
        next_turn = script.TURNS[number] if number < len(script.TURNS) else None
        conversation.answered(text, next_turn.question if next_turn else None)
    console.print("\n[bold]three unrelated requests at once[/]")
    asked = [
        _ask(
            endpoints, f"other {number}", [{"role": "user", "content": question}], script.UNRELATED_MAX_TOKENS
        )
        for number, question in enumerate(script.UNRELATED, start=1)
    ]
    for question, (result, text) in zip(script.UNRELATED, await asyncio.gather(*asked), strict=True):
        console.print(question)
        console.print(text, markup=False, style="cyan", soft_wrap=True)
        results.append(result)
    return results


async def _ask(
    endpoints: Endpoints,
    label: str,
    messages: list[script.Message],
    max_tokens: int,
    on_text: Callable[[str], None] = lambda _: None,
) -> tuple[report.Result, str]:
    """One request's result and text. The reference is asked afterwards, so as not to slow the answer."""
    request_id = f"demo-{os.getpid()}-{label.replace(' ', '-')}"
    answer = await endpoints.router.chat(
        messages, max_tokens=max_tokens, request_id=request_id, on_text=on_text
    )
    equal = None
    if endpoints.reference is not None and answer.error is None:
        plain = await endpoints.reference.chat(messages, max_tokens=max_tokens, request_id=request_id)
        equal = (plain.text, plain.finish_reason) == (answer.text, answer.finish_reason)
    record = await endpoints.router.record(request_id)
    result = report.Result(label=label, error=answer.error, record=record, equal_to_reference=equal)
    return result, answer.text


def _report(results: list[report.Result], screen: Screen, options: DemoOptions, *, elapsed_s: float) -> bool:
    values = report.summary(results, elapsed_s=elapsed_s)
    console = screen.console
    console.print()
    console.print(report.table(results, width=console.width))
    for line in report.handoff_lines(results, rtt_s=options.settings.rtt_s):
        console.print(line, markup=False, soft_wrap=True)
    console.print(report.summary_line(values), markup=False)
    if options.json_path is not None:
        report.write_json(options.json_path, results, values)
    return all(result.ended_well for result in results)


def _print_examples(screen: Screen, url: str, model: str) -> None:
    screen.console.print(
        f"""
Serving {url}/v1 until Ctrl-C. Try it from another terminal:

curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "{model}", "stream": true, "max_tokens": 60,
  "messages": [{{"role": "user", "content": "Why is the sea salty?"}}]}}'

.venv/bin/python - <<'EOF'
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.chat.completions.create(model="{model}", max_tokens=60,
    messages=[{{"role": "user", "content": "Why is the sea salty?"}}])
print(answer.choices[0].message.content)
EOF
""",
        markup=False,
        soft_wrap=True,
    )
