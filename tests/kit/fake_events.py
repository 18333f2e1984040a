"""A publisher of KV events as vLLM's, for fake engines: numbered batches, repeated on request."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pdd.config.load import KvEventAddresses
from pdd.core.block_hash import BlockHasher
from pdd.router.belief import block_name
from pdd.router.kv_follow import NO_MORE, end_context

Event = dict[str, Any]


def stored(
    tokens: Sequence[int],
    hasher: BlockHasher,
    *,
    first: int = 0,
    medium: str = "GPU",
    salt: str | None = None,
    as_numbers: bool = True,
) -> Event:
    """The event of the full blocks of a prompt from block ``first`` on, as vLLM words it."""
    hashes = hasher.block_hashes(tokens, cache_salt=salt)
    names: list[Any] = [block_name(h) if as_numbers else h for h in hashes]
    size = hasher.block_tokens
    extra = [[salt] if salt and not index else None for index in range(first, len(names))]
    return {
        "type": "BlockStored",
        "block_hashes": names[first:],
        "parent_block_hash": names[first - 1] if first else None,
        "token_ids": list(tokens[first * size : len(names) * size]),
        "block_size": size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "extra_keys": extra,
        "group_idx": 0,
    }


def removed(tokens: Sequence[int], hasher: BlockHasher, *, first: int = 0, medium: str = "GPU") -> Event:
    """The event of the same blocks being dropped."""
    names = [block_name(h) for h in hasher.block_hashes(tokens)][first:]
    return {"type": "BlockRemoved", "block_hashes": names, "medium": medium, "group_idx": 0}


CLEARED: Event = {"type": "AllBlocksCleared"}


def batch(events: Sequence[Any], *, ts: float | None = None) -> bytes:
    """The payload of one batch."""
    return msgspec.msgpack.encode([time.time() if ts is None else ts, list(events), 0])


class FakePublisher:
    """One engine's publisher; ``lose`` batches are kept for repetition but reach nobody.

    Args:
        addresses: Where it binds.
        buffer_steps: Batches it can repeat.
    """

    def __init__(self, addresses: KvEventAddresses, *, buffer_steps: int = 10_000) -> None:
        self.lose = 0
        self.num_replays = 0
        self._addresses = addresses
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._seq = 0
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """It listens, and counts from 0."""
        self._publisher.bind(self._addresses.publish)
        self._replay.bind(self._addresses.publish_replay)
        self._task = asyncio.create_task(self._serve_replay())

    async def stop(self) -> None:
        """Nobody listens any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._publisher.close(linger=0)
        self._replay.close(linger=0)
        end_context(self._context)

    async def publish(self, *events: Event, ts: float | None = None) -> None:
        """One batch of events."""
        seq, self._seq = self._seq, self._seq + 1
        payload = batch(events, ts=ts)
        self._buffer.append((seq, payload))
        if self.lose:
            self.lose -= 1
        else:
            await self.send([b"", seq.to_bytes(8, "big"), payload])

    async def send(self, frames: list[bytes]) -> None:
        """Any frames, as a publisher gone mad would send them."""
        await self._publisher.send_multipart(frames)

    async def _serve_replay(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            self.num_replays += 1
            for seq, payload in list(self._buffer):
                if seq >= int.from_bytes(start, "big"):
                    await self._replay.send_multipart([client, b"", b"", seq.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([client, b"", b"", NO_MORE, b""])
