"""The client of the parse process, without the process."""

from pathlib import Path
from typing import Any, cast

from pdd.core.errors import PddError
from pdd.router.parsing import ParserClient
from pdd.wire.parsing import Parsed, pack


class Transport:
    """Takes what is sent."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data


def stumble(_reply: Parsed) -> None:
    raise ValueError("stumbled")


async def test_a_reply_that_cannot_be_used_ends_its_answer_and_no_other() -> None:
    client = ParserClient(Path("not/asked"))
    client.connection_made(cast(Any, Transport()))
    heard: list[Parsed] = []
    async with client.answer({}, [], deadline_s=1e12) as bad, client.answer({}, [], deadline_s=1e12) as good:
        bad.feed("x", [1], finished=False, then=stumble)
        good.feed("x", [1], finished=True, then=heard.append)
        client.data_received(pack(Parsed(0)) + pack(Parsed(1)))
        assert isinstance(bad.error, PddError)
        assert "stumbled" in str(bad.error)
        assert [reply.stream for reply in heard] == [1]
        assert good.error is None
