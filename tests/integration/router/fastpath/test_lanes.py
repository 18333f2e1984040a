"""Bytes go through lanes unchanged, whatever an engine sends, however it is cut, whenever they stop."""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.lanes import (
    ENGINE_AROUND,
    NUM_IDS,
    TOKENIZER,
    Chunks,
    chunk,
    event,
    fast_path,
    hellos,
    is_told,
    lane,
    receive,
    steady,
    told,
    told_of,
    write,
    write_and_shut,
)
from tests.kit.tokenizer import EOS

from pdd.router.detokenize import Detokenizer, TextOptions
from pdd.router.fastpath.lanes import Reason

HELLO = 0

# ---- what an engine may send

LAST = b'data: {"id":"r1","choices":[{"token_ids":[0],"finish_reason":"stop"}]}\n\n'
OTHER_CONTENTS = {
    "last token": LAST,
    "error": b'data: {"error":{"message":"no"}}\n\n',
    "usage": b'data: {"id":"r1","choices":[],"usage":{"completion_tokens":3}}\n\n',
    "done": b"data: [DONE]\n\n",
    "comment": b": ping\n\n",
    "other request": event([0]).replace(b"r1", b"r2"),
    "two events": event([0]) + event([0]),
    "half an event": event([0])[:-3],
    "a space in the list": ENGINE_AROUND[0] + b"0, 0" + ENGINE_AROUND[1],
    "no tokens": ENGINE_AROUND[0] + ENGINE_AROUND[1],
    "no number": ENGINE_AROUND[0] + b"0,,0" + ENGINE_AROUND[1],
    "a comma at the end": ENGINE_AROUND[0] + b"0," + ENGINE_AROUND[1],
    "a negative token": event([-1]),
    "a token beyond the vocabulary": event([NUM_IDS]),
    "a huge number": event([2**32]),
    "an added token": event([TOKENIZER.token_to_id(EOS)]),
    "a token without a text after one with": event([0, TOKENIZER.token_to_id(EOS)]),
    "a long list": event([0] * 3000),
    "a huge chunk": event([0] * 50_000),
}
OTHER_BYTES = {
    "an extension": b"%x;a=b\r\n%b\r\n" % (len(event([0])), event([0])),
    "a long head": b"%07x\r\n%b\r\n" % (len(event([0])), event([0])),
    "a wrong head": b"%x\n\n%b\r\n" % (len(event([0])), event([0])),
    "a wrong end": b"%x\r\n%b\n\n" % (len(event([0])), event([0])),
    "the last chunk": b"0\r\n\r\n",
    "no HTTP": b"hello",
}
OTHERS = {name: chunk(content) for name, content in OTHER_CONTENTS.items()} | OTHER_BYTES


@st.composite
def token_chunks(draw: st.DrawFn) -> tuple[bytes, Sequence[int]]:
    """An event of the pattern, with a head of any kind that the pattern allows."""
    told_ids = st.sampled_from([i for i in range(NUM_IDS) if is_told(i)])
    ids = draw(st.lists(st.one_of(told_ids, told_ids, st.integers(0, NUM_IDS)), min_size=1, max_size=4))
    head = draw(st.sampled_from([b"%x\r\n", b"%X\r\n", b"%06x\r\n"]))
    content = event(ids)
    return head % len(content) + content + b"\r\n", ids


def streams() -> st.SearchStrategy[Chunks]:
    """What an engine sends: mostly tokens."""
    others = st.sampled_from(sorted(OTHERS)).map(lambda name: (OTHERS[name], None))
    return st.lists(st.one_of(*[token_chunks()] * 12, others), max_size=30)


def texts_alone(ids: Sequence[int]) -> list[str]:
    """Each token's text if the detokenizer sees them all."""
    detokenizer = Detokenizer(TOKENIZER, [], TextOptions())
    return [detokenizer.more([token_id]) for token_id in ids]


def texts_after(ids: Sequence[int], *, first: int, taken: int, held: int) -> list[str]:
    """The texts of what a detokenizer sees after a lane that took some tokens after the first ones."""
    detokenizer = Detokenizer(TOKENIZER, [], TextOptions())
    for token_id in ids[:first]:
        detokenizer.more([token_id])
    assert detokenizer.is_at_boundary
    if taken:
        detokenizer.resume(ids[: first + taken], held=held, new_tokens=taken)
    return [detokenizer.more([token_id]) for token_id in ids[first + taken :]]


@given(data=st.data())
@settings(max_examples=60)
async def test_any_stream_in_any_pieces(data: st.DataObject) -> None:
    chunks = data.draw(streams())
    stream = b"".join(part for part, _ in chunks)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    expected = told(chunks)
    async with fast_path() as path:
        with lane(path, unread=pieces[0]) as run:
            for piece in pieces[1:]:
                await write(run.engine.theirs, piece)
                await run.caught_up()
            run.engine.theirs.shutdown(socket.SHUT_WR)
            news = await run.ended()
            await run.check(stream, expected)
    assert news.reason is (
        Reason.ENGINE_CLOSED if len(expected.engine) == len(stream) else Reason.OTHER_EVENT
    )
    ids = [HELLO, *(i for _, ids in chunks for i in ids or ())]
    after = texts_after(ids, first=1, taken=len(run.ids), held=news.held)
    assert after == texts_alone(ids)[1 + len(run.ids) :]


@pytest.mark.parametrize("name", OTHERS)
async def test_what_is_no_token_is_left_in_place(name: str) -> None:
    before, after = hellos(3), hellos(2)
    stream = steady(before) + OTHERS[name] + steady(after)
    async with fast_path() as path:
        with lane(path) as run:
            await asyncio.gather(write(run.engine.theirs, stream), run.ended())
            run.engine.theirs.shutdown(socket.SHUT_WR)
            assert run.stop().reason is Reason.OTHER_EVENT
            await run.check(stream, told_of(before))


@pytest.mark.parametrize("num_unread", [0, 1, 60, 1000])
async def test_what_was_read_before_comes_first(num_unread: int) -> None:
    ids = hellos(100)
    stream, expected = steady(ids), told_of(ids)
    async with fast_path() as path:
        with lane(path, unread=stream[:num_unread]) as run:
            await write(run.engine.theirs, stream[num_unread:])
            got = await receive(run.client.theirs, len(expected.client))
            run.engine.theirs.shutdown(socket.SHUT_WR)
            await run.check(stream, expected, got=got)


async def test_what_was_read_before_may_end_the_lane() -> None:
    stream = steady(hellos(2)) + OTHERS["error"]
    async with fast_path() as path:
        with lane(path, unread=stream) as run:
            assert (await run.ended()).unread == OTHERS["error"]
            run.engine.theirs.shutdown(socket.SHUT_WR)
            await run.check(stream, told_of(hellos(2)))


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8])
async def test_no_more_tokens_are_taken_than_there_is_room_for(num_tokens: int) -> None:
    chunks: Chunks = [(chunk(event(ids)), ids) for ids in ([0, 1], [2], [0, 1, 2, 0], [0, 1])]
    stream = b"".join(data for data, _ in chunks)
    async with fast_path() as path:
        with lane(path, room=num_tokens) as run:
            await write(run.engine.theirs, stream)
            assert (await run.ended()).reason is Reason.OTHER_EVENT
            run.engine.theirs.shutdown(socket.SHUT_WR)
            await run.check(stream, told(chunks, room=num_tokens))


# ---- stopped in the middle


@given(num_client_bytes=st.integers(0, 40_000), seed=st.integers(0, 3))
@settings(max_examples=30)
async def test_a_lane_stopped_at_any_moment(num_client_bytes: int, seed: int) -> None:
    ids = hellos(1000)
    stream = steady(ids)
    async with fast_path() as path:
        with lane(path) as run:
            writing = asyncio.ensure_future(
                write_and_shut(run.engine.theirs, stream, piece_bytes=97 + 50 * seed)
            )
            got = await receive(run.client.theirs, num_client_bytes)
            run.stop()
            expected = told_of(ids[: len(run.ids)])
            await asyncio.gather(writing, run.check(stream, expected, got=got))
            assert len(got) == num_client_bytes


async def test_a_stopped_lane_says_what_a_character_still_lacks() -> None:
    ids = [0, next(i for i in range(NUM_IDS) if told_of([0, i]).held == 1)]
    stream = steady(ids)
    async with fast_path() as path:
        with lane(path) as run:
            await write_and_shut(run.engine.theirs, stream, piece_bytes=10)
            assert (await run.ended()).held == 1
            await run.check(stream, told_of(ids))


async def test_looks_tell_each_token_once_while_the_lane_runs() -> None:
    ids = hellos(20_000)
    stream, expected = steady(ids), told_of(ids)
    async with fast_path() as path:
        with lane(path) as run:
            writing = asyncio.ensure_future(write_and_shut(run.engine.theirs, stream, piece_bytes=20_000))
            reading = asyncio.ensure_future(receive(run.client.theirs, len(expected.client)))
            num_looks = 0
            while run.news is None:
                run.note(path.look(run.number))
                num_looks += 1
                assert run.ids == ids[: len(run.ids)]
                await asyncio.sleep(0)
            await writing
            assert num_looks > 10
            await run.check(stream, expected, got=await reading)


async def test_all_borrowers_know_all_their_tokens_after_a_refresh() -> None:
    async with fast_path() as path:
        with ExitStack() as stack:
            runs = [stack.enter_context(lane(path)) for _ in range(3)]
            for num_tokens, run in enumerate(runs):
                await write(run.engine.theirs, steady(hellos(num_tokens)))
                await receive(run.client.theirs, len(told_of(hellos(num_tokens)).client))
            path.refresh()
            path.refresh()
            assert [run.ids for run in runs] == [hellos(n) for n in range(3)]


async def test_times_are_told_once() -> None:
    async with fast_path() as path:
        with lane(path) as run:
            looks = []
            for _ in range(3):
                await write(run.engine.theirs, steady([HELLO]))
                await receive(run.client.theirs, len(told_of([HELLO]).client))
                looks.append(path.look(run.number))
            again = path.look(run.number)
    assert [len(news.gaps_s) for news in looks] == [1, 1, 1]
    assert looks[0].max_gap_s == looks[0].last_s  # the one before came at zero
    assert looks[2].last_s - looks[1].last_s == pytest.approx(looks[2].max_gap_s)
    assert (again.max_gap_s, list(again.gaps_s), again.last_s) == (0, [], looks[2].last_s)
