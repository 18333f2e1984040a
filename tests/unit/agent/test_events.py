import asyncio
import threading

from pdd.agent.events import RING_EVENTS, EventLog


def test_events_are_numbered_and_replayed() -> None:
    log = EventLog()
    for i in range(3):
        log.emit("progress", {"i": i})
    assert log.seq == 3
    assert log.after(1) == [{"event": "progress", "seq": 2, "i": 1}, {"event": "progress", "seq": 3, "i": 2}]
    assert log.after(3) == []


def test_the_ring_is_bounded() -> None:
    log = EventLog()
    for _ in range(RING_EVENTS + 10):
        log.emit("x", {})
    events = log.after(0)
    assert len(events) == RING_EVENTS
    assert events[0]["seq"] == 11


async def test_a_reader_sees_what_other_threads_say_in_order() -> None:
    log = EventLog()
    log.emit("before", {})
    thread = threading.Thread(target=lambda: [log.emit("x", {}) for _ in range(50)])
    seen: list[int] = []
    async with asyncio.timeout(30):
        async for event in log.follow(0, ping_s=30):
            if event["event"] == "before":
                thread.start()
            seen.append(event["seq"])
            if len(seen) == 51:
                break
    assert seen == list(range(1, 52))
    thread.join()


async def test_silence_is_filled_with_pings() -> None:
    log = EventLog()
    async with asyncio.timeout(30):
        async for event in log.follow(0, ping_s=0.001):
            assert event == {"event": "ping", "seq": 0}
            break


def test_each_life_of_an_agent_has_a_name_of_its_own() -> None:
    assert EventLog().boot != EventLog().boot
