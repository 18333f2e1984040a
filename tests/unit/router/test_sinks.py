"""Where pieces of answers go."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdd.core.errors import DeadlineError
from pdd.router.api.shapes import Choice
from pdd.router.api.sinks import ParsedSink, Run, run_all
from pdd.router.parsing import ParsedStream
from pdd.router.request.answer import Piece
from pdd.wire.parsing import Message, Parsed


class Writer:
    """Stands for what writes to the client; ``takes`` says whether the client reads."""

    tells_tokens = False

    def __init__(self) -> None:
        self.takes = True
        self.num_written = 0

    def begin(self) -> None:
        pass

    def write(self, piece: Piece, content: dict[str, Any]) -> bool:
        self.num_written += 1
        return self.takes

    async def ready(self) -> None:
        self.takes = True


def test_a_client_that_takes_nothing_holds_back_an_answer_that_is_parsed() -> None:
    sent: list[Message] = []
    writer = Writer()
    parsed = ParsedStream(0, sent.append, deadline_s=float("inf"))
    driver = SimpleNamespace(record=SimpleNamespace(cached_tokens=0))
    run = Run(choice=Choice(index=0, prompt_ids=[], begun=True), driver=cast(Any, driver))
    sink = ParsedSink(run, cast(Any, writer), parsed, named_tool=False, bare=False)

    def put() -> bool:
        go_on = sink.put(Piece(text="x", tokens=(), num_tokens=1, finish=None, stop_reason=None))
        parsed.take(Parsed(0, {"content": "x"}))
        return go_on

    assert put()
    writer.takes = False
    put()  # what it means comes back later, and then nobody takes it
    assert not put()
    asyncio.run(sink.ready())
    assert put()
    assert len(sent) == writer.num_written == 4


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("error", [DeadlineError("late"), ConnectionResetError("gone")])
def test_an_error_of_one_choice_is_the_error_of_all(error: Exception, num_choices: int) -> None:
    async def fail(_sink: object) -> None:
        raise error

    async def wait(_sink: object) -> None:
        await asyncio.Event().wait()

    runs = [SimpleNamespace(driver=SimpleNamespace(run=run)) for run in (fail, *[wait] * (num_choices - 1))]
    with pytest.raises(type(error)) as raised:
        asyncio.run(run_all([cast(Any, (run, None)) for run in runs]))
    assert raised.value is error
