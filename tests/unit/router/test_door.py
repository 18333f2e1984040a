"""Who is let in, who waits, who is sent away; without a clock or a socket."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from pdd.core.errors import DeadlineError, OverloadedError
from pdd.router.decisions import DecisionLog
from pdd.router.door import Door
from pdd.router.metrics import RouterMetrics

NEVER_S = 1e12


def door(max_concurrent: int = 1, queue_size: int = 2) -> Door:
    """A door for few."""
    return Door(
        max_concurrent=max_concurrent,
        queue_size=queue_size,
        metrics=RouterMetrics(),
        decisions=DecisionLog(),
    )


class Guests:
    """Tasks in front of a door, and the order in which they came in."""

    def __init__(self, the_door: Door) -> None:
        self.door = the_door
        self.entered: list[str] = []
        self.leave = asyncio.Event()

    async def come(self, name: str, priority: int = 0, deadline_s: float = NEVER_S) -> None:
        async with self.door.entered(name, priority=priority, deadline_s=deadline_s):
            self.entered.append(name)
            await self.leave.wait()

    async def send(self, name: str, priority: int = 0, deadline_s: float = NEVER_S) -> "asyncio.Task[None]":
        """The guest stands in front of the door, or is in."""
        task = asyncio.create_task(self.come(name, priority, deadline_s))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task


async def test_the_most_urgent_comes_in_first_then_who_came_first() -> None:
    guests = Guests(door(queue_size=9))
    names = [("a", 0), ("b", 1), ("c", 1), ("d", -1)]
    tasks = [await guests.send(name, priority) for name, priority in names]
    assert guests.entered == ["a"]
    guests.leave.set()
    await asyncio.gather(*tasks)
    assert guests.entered == ["a", "d", "b", "c"]


async def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    guests = Guests(door())
    tasks = [await guests.send(name) for name in "abc"]
    with pytest.raises(OverloadedError) as refusal:
        await guests.come("d")
    assert refusal.value.retry_after_s is not None
    assert 1 <= refusal.value.retry_after_s <= 60
    guests.leave.set()
    await asyncio.gather(*tasks)
    assert guests.entered == ["a", "b", "c"]


async def test_a_more_urgent_one_displaces_the_least_urgent_of_a_full_queue() -> None:
    guests = Guests(door())
    tasks = [await guests.send(name, priority) for name, priority in (("a", 0), ("b", 1), ("c", 2))]
    urgent = await guests.send("d", 0)
    with pytest.raises(OverloadedError):
        await tasks[2]
    guests.leave.set()
    await asyncio.gather(*tasks[:2], urgent)
    assert guests.entered == ["a", "d", "b"]


async def test_one_that_leaves_at_the_moment_it_is_displaced_hurts_nobody() -> None:
    guests = Guests(door(queue_size=1))
    tasks = [await guests.send(name, priority) for name, priority in (("a", 0), ("b", 2))]
    guests.leave.set()
    tasks[1].cancel()
    await guests.come("c", 1)  # in the same turn of the event loop
    await tasks[0]
    assert guests.entered == ["a", "c"]


async def test_who_leaves_the_queue_or_waits_in_vain_takes_no_turn() -> None:
    guests = Guests(door(queue_size=9))
    first = await guests.send("a")
    gone = await guests.send("b")
    late = await guests.send("c", deadline_s=asyncio.get_running_loop().time())
    last = await guests.send("d")
    gone.cancel()
    with pytest.raises(DeadlineError):
        await late
    guests.leave.set()
    await asyncio.gather(first, last)
    assert guests.entered == ["a", "d"]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(guests.door.entered("e", priority=0, deadline_s=NEVER_S))


async def test_one_that_is_cancelled_just_as_its_turn_comes_passes_it_on() -> None:
    guests = Guests(door(queue_size=9))
    first = await guests.send("a")
    second = await guests.send("b")
    third = await guests.send("c")
    guests.leave.set()
    await first  # b has its turn now, and has not run yet
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await third
    assert guests.entered[-1] == "c"
