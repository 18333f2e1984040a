"""Engines that come, go, fail and return: readiness, breakers, reloads, start order, keys."""

import asyncio
import itertools
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.kit.bed import Bed, bed_config, running_bed

from pdd.config.follow import follow_config
from pdd.config.schema import PddConfig
from pdd.policy.breaker import BreakerParams
from pdd.router import fleet as router_fleet
from pdd.router.claims import Claim

TWO_PREFILLS = {"p0": ("prefill", "a"), "p1": ("prefill", "a"), "rld0": ("relay", "a"), "md0": ("main", "b")}
TWO_OF_ALL = {**TWO_PREFILLS, "rld1": ("relay", "a"), "md1": ("main", "c")}


async def ready(bed: Bed) -> bool:
    """What a probe of ``/ready`` says."""
    async with bed.client.get(f"{bed.url}/ready") as answer:
        return answer.status == 200


async def until_ready(bed: Bed) -> None:
    """Wait as a probe does."""
    async with asyncio.timeout(60):
        while not await ready(bed):  # noqa: ASYNC110 - a probe polls
            await asyncio.sleep(0.02)


# ---- readiness


async def test_ready_does_not_flip_while_the_far_site_is_dark_and_the_relay_can_serve() -> None:
    async with running_bed() as bed:
        assert await ready(bed)
        await bed.md0.stop()
        await bed.agents["md0"].stop()
        await bed.until(lambda: not bed.router.fleet.engines["md0"].healthy)
        assert await ready(bed)
        body = await bed.chat("the far site is dark", max_tokens=20)
        assert body["choices"][0]["message"]["content"] == bed.reference("the far site is dark", 20)
        await bed.rld0.stop()
        await bed.until(lambda: not bed.router.fleet.engines["rld0"].healthy)
        assert not await ready(bed)


@pytest.mark.parametrize("seed", range(2))
async def test_any_start_order_converges(seed: int) -> None:
    async with running_bed() as bed:
        fakes = [*bed.engines.values(), *bed.agents.values()]
        for fake in fakes:
            await fake.stop()
        await bed.until(lambda: bool(bed.router.fleet.missing_for_ready()))
        random.Random(seed).shuffle(fakes)
        for fake in fakes:
            await fake.start()
            await asyncio.sleep(0.05)
        await until_ready(bed)
        await bed.chat("after all", max_tokens=10)


async def test_health_is_200_and_ready_503_until_the_last_part_is_there() -> None:
    async with running_bed(wait_ready=False) as bed:
        await bed.p0.stop()
        async with bed.client.get(f"{bed.url}/health") as answer:
            assert answer.status == 200
        fleet = bed.router.fleet
        await bed.until(lambda: fleet.engines["md0"].view.healthy and fleet.engines["md0"].view.kv_ready)
        assert not await ready(bed)
        await bed.p0.start()
        await until_ready(bed)


async def test_engines_that_want_a_key_get_it_everywhere() -> None:
    async with running_bed(api_key="secret-of-the-engines") as bed:
        await until_ready(bed)
        body = await bed.chat("with a key", max_tokens=20)
        assert body["choices"][0]["message"]["content"] == bed.reference("with a key", 20)
        assert bed.p0.num_refused == bed.rld0.num_refused == bed.md0.num_refused == 0


# ---- engines that fail


async def test_an_engine_that_keeps_failing_is_asked_last_and_tried_again_later() -> None:
    router = {"breaker_failures": 2, "breaker_open_s": 1000}
    async with running_bed(roles=TWO_PREFILLS, router=router) as bed:
        bed.p0.reply_status = 500
        for n in range(2):
            await bed.chat(f"question {n}", max_tokens=3)
        asked = len(bed.p0.seen)
        await bed.chat("asked elsewhere", max_tokens=3)
        assert len(bed.p0.seen) == asked
        bed.p0.reply_status = None
        state = bed.router.fleet.engines["p0"]
        assert state.view.tripped
        state._breaker_params = BreakerParams(failures=2, open_s=0.0)  # that time is over
        await bed.chat("a trial", max_tokens=3)
        assert len(bed.p0.seen) == asked + 1
        state._breaker_params = BreakerParams(failures=2, open_s=1000)
        assert not state.view.tripped


async def test_the_only_engine_is_asked_even_if_its_breaker_is_open() -> None:
    async with running_bed(router={"breaker_failures": 1, "breaker_open_s": 100}) as bed:
        bed.p0.reply_status = 500
        answer = await bed.post("/v1/completions", prompt="fails", max_tokens=3)
        assert answer.status == 500
        bed.p0.reply_status = None
        await bed.chat("works again", max_tokens=3)


# ---- engines that come and go


def write(path: Path, config: PddConfig, ids: list[str]) -> None:
    """The configuration with these engines, replaced at once."""
    lines = ["[model]", 'path = "unused"', 'name = "fake"', "[kv]", "block_size_tokens = 32"]
    for engine in config.engines:
        if engine.id in ids:
            lines += [
                "[[engines]]",
                f'id = "{engine.id}"',
                f'role = "{engine.role}"',
                f'site = "{engine.site}"',
            ]
            lines += [f"port = {engine.port}", "data_port = 1", f"control_port = {engine.control_port}"]
            lines += ["max_num_seqs = 8"]
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines))
    new.rename(path)


async def test_engines_come_and_go_with_the_file_and_no_request_is_lost(tmp_path: Path) -> None:
    async with running_bed(roles=TWO_OF_ALL) as bed:
        for engine in bed.engines.values():
            engine.itl_s = 0.004
        whole = bed_config(bed, TWO_OF_ALL, {})
        path = tmp_path / "pdd.toml"
        write(path, whole, list(TWO_OF_ALL))
        fleet = bed.router.fleet
        follower = asyncio.create_task(follow_config(path, fleet.apply, poll_s=0.02))
        stop = asyncio.Event()

        async def client(number: int) -> int:
            for turn in itertools.count():
                if stop.is_set():
                    return turn
                content = f"client {number} turn {turn}"
                body = await bed.chat(content, max_tokens=30)
                assert body["choices"][0]["message"]["content"] == bed.reference(content, 30)
            return 0

        async with asyncio.TaskGroup() as clients:
            tasks = [clients.create_task(client(n)) for n in range(4)]
            for ids in (["p1", "rld1", "md1"], list(TWO_OF_ALL), ["p0", "rld0", "md0"], list(TWO_OF_ALL)):
                write(path, whole, ids)

                def is_applied(wanted: list[str] = ids) -> bool:
                    views = [v for role in ("prefill", "relay", "main") for v in fleet.views(role)]  # type: ignore[arg-type]
                    return {v.id for v in views if v.healthy and v.kv_ready} == set(wanted)

                await bed.until(is_applied)
                gone = [bed.engines[e] for e in TWO_OF_ALL if e not in ids]
                # Also what was planned with them and has not reached them yet.
                states = [fleet.engines[engine.id] for engine in gone]
                await bed.until(lambda states=states: not any(s.view.running for s in states))  # type: ignore[misc]
                seen = [len(engine.seen) for engine in gone]
                await asyncio.sleep(0.2)
                assert [len(engine.seen) for engine in gone] == seen
            stop.set()
        assert all(task.result() > 0 for task in tasks)
        follower.cancel()
        await bed.until_free()


async def test_an_engine_that_moves_and_moves_back_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_fleet, "LATE_NEWS_S", 0.0)
    async with running_bed(router={"request_timeout_s": 0.05}) as bed:
        config = bed.router.config
        moved = [e.model_copy(update={"port": 1}) if e.id == "md0" else e for e in config.engines]
        bed.router.fleet.apply(config.model_copy(update={"engines": tuple(moved)}))
        bed.router.fleet.apply(config)

        def num_watches() -> int:
            return sum(task.get_name() == "health md0" for task in asyncio.all_tasks())

        await bed.until(lambda: num_watches() == 1)
        await until_ready(bed)


async def test_a_watch_that_ends_by_a_bug_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def stumble(_state: router_fleet.EngineState) -> None:
        raise ValueError("stumbled")

    monkeypatch.setattr(router_fleet.EngineState, "follow_caches", stumble)
    async with running_bed():
        assert "caches md0" in caplog.text


async def test_a_wrong_file_changes_nothing(tmp_path: Path) -> None:
    async with running_bed() as bed:
        path = tmp_path / "pdd.toml"
        path.write_text("[model]")
        applied: list[Any] = []
        follower = asyncio.create_task(follow_config(path, applied.append, poll_s=0.01))
        await asyncio.sleep(0.05)
        for text in ("[model", "[model]\npath = 1", "", "[model]\nname = 'caf\xe9'"):
            path.write_text(text, encoding="latin-1")
            await asyncio.sleep(0.05)
        path.unlink()
        await asyncio.sleep(0.05)
        assert applied == []
        assert not follower.done()
        follower.cancel()
        await bed.chat("still here", max_tokens=3)


# ---- agents


async def test_an_agent_that_restarts_and_has_said_more_than_before_is_recognised() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        agent = bed.agents["p0"]
        agent.hold("md0")
        bed.rld0.itl_s = 0.02
        task = asyncio.create_task(bed.chat("the agent restarts", max_tokens=60))
        await bed.until(lambda: bool(bed.rld0.running))
        await agent.stop(forget=True)
        for _ in range(50):
            await agent.say("link", peer="md0", state="up")
        await agent.start()
        body = await task
        assert body["choices"][0]["message"]["content"] == bed.reference("the agent restarts", 60)
        record = await bed.record(body["id"])
        assert record["eager_tokens"] == 59


async def test_a_cancel_reaches_an_agent_that_was_away_for_a_moment() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        agent = bed.agents["p0"]
        agent.hold("md0")
        bed.rld0.itl_s = 0.02
        task = asyncio.create_task(bed.chat("cancelled while nobody listens", max_tokens=20))
        await bed.until(lambda: bool(bed.rld0.running))
        await agent.stop()
        await task
        await asyncio.sleep(0.2)
        await agent.start()
        await bed.until_free()
        assert [peer for _, peer in agent.cancelled] == ["md0"]


# ---- automatic handoff mode


async def test_automatic_mode_follows_the_relays_load_both_ways_without_flapping() -> None:
    async with running_bed(router={"pipeline": "p-rld-md"}) as bed:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 14)
        relay = bed.router.fleet.engines["rld0"]
        modes: list[str] = []
        with ExitStack() as others:
            load: list[Claim] = []

            async def at(others_running: int) -> None:
                while len(load) < others_running:
                    load.append(others.enter_context(relay.claims.open()))
                while len(load) > others_running:
                    load.pop().close()
                body = await bed.chat(f"load {others_running} question {len(modes)}", max_tokens=60)
                modes.append((await bed.record(body["id"]))["handoff_mode"])

            # With the request itself: up to 8 of 8, to and fro between the two ratios, and down again.
            for others_running in (0, 2, 4, 5, 7, 5, 4, 5, 4, 3, 2, 0, 3, 4, 3):
                await at(others_running)
        up = ["catch-up"] * 3 + ["one-shot"] * 7
        assert modes == [*up, *["catch-up"] * 5]
        page = bed.router.metrics.text().decode()
        for mode in ("one-shot", "catch-up"):
            assert f'pdd_handoff_auto_switches_total{{engine="rld0",mode="{mode}"}} 1.0' in page


# ---- several answers planned at once


def served(bed: Bed, *engines: str) -> list[int]:
    """How many generate requests each engine got."""
    return [len(bed.engines[engine].seen) for engine in engines]


def open_at_engines(bed: Bed) -> list[int]:
    """What the router counts at each engine, in requests and in tokens."""
    views = [state.view for state in bed.router.fleet.engines.values()]
    return [view.running for view in views] + [view.pending_tokens for view in views]


@pytest.mark.parametrize("pipeline", ["p-md", "p-rld-md"])
async def test_the_choices_of_one_request_are_spread_like_as_many_requests(pipeline: str) -> None:
    async with running_bed(roles=TWO_OF_ALL, router={"pipeline": pipeline, "handoff": "one-shot"}) as bed:
        body = await bed.chat("the same for all", n=4, max_tokens=20)
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert texts == [bed.reference("the same for all", 20)] * 4
        assert served(bed, "p0", "p1") == [2, 2]
        planned = [bed.router.records.get(f"{body['id'].partition('-')[2]}{end}") for end in ("", "-1")]
        assert [record.prefill for record in planned if record] == ["p0", "p1"]
        relays = [record.relay for record in bed.router.records.all()]
        assert sorted(str(relay) for relay in relays) == (
            ["None"] * 4 if pipeline == "p-md" else ["rld0", "rld0", "rld1", "rld1"]
        )
        assert sorted(str(record.main) for record in bed.router.records.all()) == ["md0"] * 2 + ["md1"] * 2
        await bed.until(lambda: set(open_at_engines(bed)) == {0})


async def test_what_is_refused_after_a_part_of_it_was_planned_takes_no_room() -> None:
    async with running_bed(roles=TWO_OF_ALL) as bed:
        answer = await bed.post("/v1/completions", prompt=["short", "long " * 1200], n=3, max_tokens=5)
        assert answer.status == 400
        assert set(open_at_engines(bed)) == {0}


async def test_one_request_tries_an_engine_whose_breaker_is_half_open_also_of_those_planned_at_once() -> None:
    async with running_bed(roles=TWO_OF_ALL, router={"pipeline": "p-md", "breaker_open_s": 0.0}) as bed:
        for _ in range(3):
            bed.router.fleet.engines["md0"].note_failure()
        await bed.chat("which of them is it", n=4, max_tokens=5)
        assert sorted(str(record.main) for record in bed.router.records.all()) == ["md0"] + ["md1"] * 3
