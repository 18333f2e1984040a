"""The router as a process of its own: it names a port in use, and drains on SIGTERM."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from tests.kit.bed import ROLES, Bed, bed_config, running_bed

from pdd.launch.ports import free_ports

MAIN = """
import sys
from pathlib import Path
from pdd.config.schema import PddConfig
from pdd.router.main import run_router
sys.exit(run_router(PddConfig.model_validate_json(Path(sys.argv[1]).read_text())))
"""


@asynccontextmanager
async def router_process(
    bed: Bed, tmp_path: Path, port: int, **router: object
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A router over the bed's fakes in a process of its own."""
    bed.model.tokenizer.save(str(tmp_path / "tokenizer.json"))
    overrides = {
        "router": {"port": port, "pipeline": "p-rld-md", **router},
        "model": {"path": str(tmp_path), "name": "fake"},
    }
    file = tmp_path / "config.json"
    file.write_text(bed_config(bed, ROLES, overrides).model_dump_json())
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", MAIN, str(file))
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until_ready(url: str) -> None:
    """Wait for the process to have a whole path."""
    async with asyncio.timeout(120), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)


async def until_refused(url: str) -> None:
    """Wait for the process to take no new connection."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with aiohttp.ClientSession() as session, session.get(f"{url}/health"):
                    await asyncio.sleep(0.02)
            except aiohttp.ClientConnectionError:
                return


async def test_sigterm_lets_open_answers_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    async with running_bed() as bed:
        port = free_ports(1)[0]
        url = f"http://127.0.0.1:{port}"
        async with router_process(bed, tmp_path, port, drain_timeout_s=100) as process:
            await until_ready(url)
            bed.md0.flows.clear()
            bed.rld0.flows.clear()
            body = {
                "model": "fake",
                "messages": [{"role": "user", "content": "drain"}],
                "max_tokens": 50,
                "stream": True,
            }
            async with bed.client.post(f"{url}/v1/chat/completions", json=body) as answer:
                await answer.content.readline()
                process.send_signal(signal.SIGTERM)
                await until_refused(url)  # and the answer, which P began, is still open
                bed.md0.flows.set()
                bed.rld0.flows.set()
                rest = await answer.text()
            lines = [line for line in rest.splitlines() if line]
            assert lines[-1] == "data: [DONE]"
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            assert text == bed.reference("drain", 50)
            assert await asyncio.wait_for(process.wait(), 60) == 0
            await bed.until_free()


async def test_sigterm_ends_what_does_not_end_in_time_and_frees_the_engines(tmp_path: Path) -> None:
    async with running_bed() as bed:
        port = free_ports(1)[0]
        url = f"http://127.0.0.1:{port}"
        async with router_process(bed, tmp_path, port, drain_timeout_s=0.2) as process:
            await until_ready(url)
            bed.md0.itl_s = bed.rld0.itl_s = 1.0  # nothing ends by itself in that time
            body = {"model": "fake", "prompt": "drain", "max_tokens": 500, "stream": True}
            async with bed.client.post(f"{url}/v1/completions", json=body) as answer:
                await answer.content.readline()
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), 60) == 0
            await bed.until_free()


async def test_a_port_in_use_is_an_exit_status(tmp_path: Path) -> None:
    async with running_bed() as bed:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            async with router_process(bed, tmp_path, taken.getsockname()[1]) as process:
                assert await asyncio.wait_for(process.wait(), 120) == 1
