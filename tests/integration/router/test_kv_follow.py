"""Following engines' KV events over sockets, and what placement makes of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from tests.kit.bed import Bed, running_bed, start_publisher
from tests.kit.fake_events import FakePublisher, batch, stored

from pdd.config.load import KvEventAddresses
from pdd.core.block_hash import BlockHasher
from pdd.router import kv_follow
from pdd.router.belief import CacheBelief
from pdd.router.kv_events import KvEventReader
from pdd.router.kv_follow import KvEventFollower, end_context

HASHER = BlockHasher(algo="sha256_cbor", seed="0", block_tokens=4)
TWO_PREFILLS = {"p0": ("prefill", "a"), "p1": ("prefill", "a"), "rld0": ("relay", "a"), "md0": ("main", "b")}
TWO_MAINS = {"p0": ("prefill", "a"), "rld0": ("relay", "a"), "md0": ("main", "b"), "md1": ("main", "c")}


def tokens(number: int) -> list[int]:
    """A block that no other number gives."""
    return [number, 1, 2, 3]


class Following:
    """A publisher, and a reader that follows it."""

    def __init__(self, addresses: KvEventAddresses) -> None:
        self.addresses = addresses
        self.publisher = FakePublisher(addresses)
        self.belief = CacheBelief(max_blocks=1000)
        self.reader = KvEventReader(engine_id="md0", belief=self.belief, hasher=HASHER)

    async def publish(self, number: int) -> None:
        await self.publisher.publish(stored(tokens(number), HASHER))

    async def until(self, *, seq: int, blocks: int) -> None:
        """Wait until so many batches are read; then so many blocks must be known."""
        async with asyncio.timeout(60):
            while self.reader.next_seq != seq:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
        assert self.belief.num_device_blocks == blocks

    async def restart(self, *, buffer_steps: int = 10_000) -> None:
        await self.publisher.stop()
        self.publisher = FakePublisher(self.addresses, buffer_steps=buffer_steps)
        self.publisher.start()


@pytest.fixture
async def following(tmp_path: Path) -> AsyncIterator[Following]:
    own, replay = (f"ipc://{tmp_path / name}" for name in ("kv", "kvr"))
    it = Following(KvEventAddresses(publish=own, publish_replay=replay, follow=own, follow_replay=replay))
    context = zmq.asyncio.Context()
    follower = KvEventFollower(context=context, addresses=it.addresses, reader=it.reader)
    it.publisher.start()
    await it.publish(0)  # before anybody listens
    task = asyncio.create_task(follower.run())
    try:
        await it.until(seq=1, blocks=1)
        yield it
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await it.publisher.stop()
        end_context(context)


async def test_what_was_published_before_the_router_came_is_known(following: Following) -> None:
    await following.publish(1)
    await following.until(seq=2, blocks=2)
    assert following.reader.counts == {"repeated": 1, "read": 1}


async def test_lost_batches_are_repeated(following: Following) -> None:
    following.publisher.lose = 3
    for number in range(1, 5):
        await following.publish(number)
    await following.until(seq=5, blocks=5)
    assert following.reader.counts["lost"] == 0
    assert following.publisher.num_replays == 2


async def test_a_publisher_that_was_restarted_is_followed_from_its_first_batch(following: Following) -> None:
    for number in range(1, 4):
        await following.publish(number)
    await following.until(seq=4, blocks=4)
    await following.restart()
    async with asyncio.timeout(60):
        while following.belief.num_device_blocks != 1:  # 4 would be the old blocks, 5 those and the new
            await following.publish(7)
            await asyncio.sleep(0.02)
    assert following.belief.num_device_blocks == 1


async def test_frames_that_are_no_batch_harm_nobody(following: Following) -> None:
    for frames in ([b""], [b"", b"12"], [b"", b"1" * 9, b""], [b"x", b"y", b"z", b"w"]):
        await following.publisher.send(frames)
    await following.publisher.send([b"topic", (1).to_bytes(8, "big"), b"\xc1\xff"])
    await following.publisher.send([b"topic", (2).to_bytes(8, "big"), batch([stored(tokens(9), HASHER)])])
    await following.until(seq=3, blocks=1)
    assert following.reader.counts["bad"] == 5


async def test_an_address_that_cannot_be_connected_to_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_follow, "RETRY_S", 0.01)
    context = zmq.asyncio.Context()
    addresses = KvEventAddresses(publish="", publish_replay="", follow="no://address", follow_replay=None)
    reader = KvEventReader(engine_id="md0", belief=CacheBelief(max_blocks=1), hasher=HASHER)
    task = asyncio.create_task(KvEventFollower(context=context, addresses=addresses, reader=reader).run())
    async with asyncio.timeout(60):
        while len(caplog.records) < 3 and not task.done():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)
    assert not task.done()
    assert "KV events at no://address: " in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    end_context(context)


async def test_follows_vllms_own_publisher(tmp_path: Path) -> None:
    theirs = pytest.importorskip(
        "vllm.distributed.kv_events", reason="vllm is not installed, so its publisher cannot be followed"
    )
    own, replay = (f"ipc://{tmp_path / name}" for name in ("kv", "kvr"))
    it = Following(KvEventAddresses(publish=own, publish_replay=replay, follow=own, follow_replay=replay))
    context = zmq.asyncio.Context()
    publisher = theirs.ZmqEventPublisher(0, endpoint=own, replay_endpoint=replay)

    def publish(number: int) -> None:
        fields = {k: v for k, v in stored(tokens(number), HASHER).items() if k != "type"}
        publisher.publish(theirs.KVEventBatch(ts=float(number), events=[theirs.BlockStored(**fields)]))

    for number in range(5):
        publish(number)
    follower = KvEventFollower(context=context, addresses=it.addresses, reader=it.reader)
    task = asyncio.create_task(follower.run())
    try:
        await it.until(seq=5, blocks=5)
        publish(5)
        await it.until(seq=6, blocks=6)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        publisher.shutdown()
        end_context(context)
    # Those before the connection come as a repetition, or live if they were published late: none is lost.
    assert set(it.reader.counts) <= {"read", "repeated"}
    assert it.reader.counts["read"] >= 1


# ---- through the router


async def settled(bed: Bed, engine: str, num_batches: int) -> None:
    """Wait until the router has read so many batches of an engine."""
    events = bed.router.fleet.engines[engine].events
    await bed.until(lambda: events.next_seq >= num_batches)


async def test_the_second_turn_goes_where_the_first_is_cached_and_the_prediction_is_exact() -> None:
    async with running_bed(roles=TWO_PREFILLS, kv_events=True) as bed:
        history: list[dict[str, str]] = []
        used: list[str] = []
        for turn in range(4):
            history.append({"role": "user", "content": f"turn {turn} of a talk that goes on and on " * 4})
            answer = await bed.post("/v1/chat/completions", messages=history, max_tokens=40)
            body = await answer.json()
            history.append({"role": "assistant", "content": body["choices"][0]["message"]["content"]})
            record = await bed.record(body["id"])
            used.append(record["prefill"])
            assert record["predicted_cached_tokens"] == record["cached_tokens"]
            assert (record["cached_tokens"] > 0) == (turn > 0)
            await settled(bed, record["prefill"], turn + 1)
            # Somebody else's short request goes to the other one, which is as idle.
            await bed.chat("hi", max_tokens=1)
        assert len(set(used)) == 1


async def test_a_main_engine_that_holds_the_prefix_is_preferred_until_it_is_much_fuller() -> None:
    async with running_bed(roles=TWO_MAINS, router={"pipeline": "p-md"}, kv_events=True) as bed:
        content = "a prompt of several chunks, sent again and again " * 6
        first = await bed.record((await bed.chat(content, max_tokens=5))["id"])
        holder, other = first["main"], {"md0": "md1", "md1": "md0"}[first["main"]]
        state = bed.router.fleet.engines[holder]
        with contextlib.ExitStack() as load:
            mains = []
            for _ in range(6):  # of 8 at once
                body = await bed.chat(content, max_tokens=5)
                mains.append((await bed.record(body["id"]))["main"])
                load.enter_context(state.claims.open())
        assert mains[:4] == [holder] * 4
        assert other in mains


async def test_a_prefix_that_all_share_leaves_the_work_evenly_spread() -> None:
    async with running_bed(roles=TWO_PREFILLS, kv_events=True) as bed:
        shared = "the same long preamble for everybody, word for word. " * 8
        await bed.chat(shared, max_tokens=1)
        for engine in (bed.p0, bed.p1):
            engine.prefill_s = 0.2
        await asyncio.gather(*(bed.chat(f"{shared} {'x' * 300} {n}", max_tokens=1) for n in range(12)))
        shares = sorted(engine.computed_tokens for engine in (bed.p0, bed.p1))
        assert shares[1] <= 1.5 * shares[0]


async def test_evicted_prefixes_and_tenants_apart_are_not_counted_on() -> None:
    async with running_bed(kv_events=True) as bed:
        content = "an answer for one tenant only, of several chunks in length " * 3

        async def ask(**fields: Any) -> dict[str, Any]:
            return await bed.record((await bed.chat(content, max_tokens=2, **fields))["id"])

        await ask(cache_salt="one")
        await settled(bed, "p0", 1)
        assert (await ask(cache_salt="one"))["predicted_cached_tokens"] > 0
        assert (await ask(cache_salt="two"))["predicted_cached_tokens"] == 0
        await bed.p0.reset()
        state = bed.router.fleet.engines["p0"]
        await bed.until(lambda: state.belief.num_device_blocks == 0)
        state.belief.store_is(slots=100, used=0)
        assert (await ask(cache_salt="one"))["predicted_cached_tokens"] == 0


async def test_an_engine_without_events_serves_and_one_whose_events_return_is_followed() -> None:
    async with running_bed(kv_events=True) as bed:
        gone, bed.p0.events = bed.p0.events, None
        assert gone is not None
        await gone.stop()
        await bed.chat("nobody tells what is cached " * 5, max_tokens=5)
        bed.p0.events = start_publisher(bed.router.config, "p0")
        state = bed.router.fleet.engines["p0"]

        async def ask_again() -> bool:
            await bed.chat("somebody tells what is cached " * 5, max_tokens=5)
            return state.events.next_seq > 0

        async with asyncio.timeout(60):
            while not await ask_again():  # noqa: ASYNC110 - each one publishes
                await asyncio.sleep(0.05)
        assert state.belief.num_device_blocks > 0
