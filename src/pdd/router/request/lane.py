"""An answer's sockets go to the fast path while nothing but more text is expected.

It owns the lane while there is one. Whoever is about to do anything with the answer takes it back first.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from pdd.router.detokenize import PROMPT_TAIL_TOKENS
from pdd.router.engines import EngineEnd
from pdd.router.fastpath.lanes import Ends, FastPath, News
from pdd.router.metrics import RouterMetrics
from pdd.router.request.answer import Answer
from pdd.router.request.machine.table import RequestMachine

MAX_SKIPPED_OFFERS = 1024
"""An answer whose lanes end before their first token is offered ever more seldom."""


class AnswerLane:
    """Lends one answer's sockets.

    Args:
        fast_path: The thread that borrows them; none if everything goes by the event loop.
        machine: Told of the tokens; knows how many more would change nothing.
        answer: Told of the tokens too; knows the client.
        prompt_ids: What the answer follows.
        metrics: Where lanes are counted.
        is_idle: Whether nothing waits to be done with the answer.
        wake: Called when the client takes nothing more for now.
    """

    def __init__(
        self,
        *,
        fast_path: FastPath | None,
        machine: RequestMachine,
        answer: Answer,
        prompt_ids: Sequence[int],
        metrics: RouterMetrics,
        is_idle: Callable[[], bool],
        wake: Callable[[], None],
    ) -> None:
        self._fast_path = fast_path
        self._machine = machine
        self._answer = answer
        self._prompt_ids = prompt_ids
        self._metrics = metrics
        self._is_idle = is_idle
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._lane: int | None = None
        self._engine: EngineEnd
        self._last_s = 0.0
        self._taken = 0
        self._skips = self._skips_left = 0

    def offer(self, leg: int, engine: EngineEnd) -> None:
        """Lend the sockets soon, if nothing else is to be done by then."""
        if self._fast_path is None or self._answer.client is None:
            return
        if self._skips_left:
            self._skips_left -= 1
        else:
            engine.connection.before_chunk(engine.around[1] + b"\r\n", partial(self._lend, leg, engine))

    def heard_s(self) -> float:
        """When the engine was last heard, on the loop's clock; now if it is the client that is slow."""
        if self._lane is not None and self._fast_path is not None:
            self.note(self._fast_path.look(self._lane))
        return self._last_s

    def note(self, news: News) -> None:
        """Tokens were given to the client."""
        self._last_s = self._loop.time() if news.unsent else news.last_s
        if not news.ids:
            return
        self._taken += len(news.ids)
        self._machine.take(news.ids)
        self._answer.note_given(news)
        self._metrics.fast_path_tokens.inc(len(news.ids))

    def take_back(self) -> None:
        """The sockets are the event loop's again, and all that came is known; nothing if they were before."""
        if self._lane is None:
            return
        assert self._fast_path is not None
        assert self._answer.client is not None
        number, self._lane = self._lane, None
        news = self._fast_path.stop(number)
        self.note(news)
        self._metrics.fast_path_lanes.labels(reason=news.reason.name.lower()).inc()
        self._skips = 0 if self._taken else min(MAX_SKIPPED_OFFERS, 2 * self._skips + 1)
        self._skips_left = self._skips
        if self._taken:
            tail = self._tail(PROMPT_TAIL_TOKENS + news.held)
            self._answer.go_on(tail, held=news.held, new_tokens=self._taken)
        if not self._answer.client.socket.take_back(news.unsent):
            self._wake()
        self._engine.connection.take_back(news.unread)

    def _lend(self, leg: int, engine: EngineEnd) -> None:
        if self._lane is None and not self._try_to_lend(leg, engine):
            engine.connection.take_back()

    def _try_to_lend(self, leg: int, engine: EngineEnd) -> bool:
        client, room = self._answer.client, self._machine.room_for_more(leg)
        if not room or not self._is_idle() or not self._answer.can_be_lent(self._machine.speaking):
            return False
        assert self._fast_path is not None
        assert client is not None
        if (client_fd := client.socket.lend(self)) is None:
            return False
        if (lent := engine.connection.lend(self)) is not None:
            engine_fd, unread = lent
            self._engine, self._last_s, self._taken = engine, self._loop.time(), 0
            ends = Ends(
                engine_fd=engine_fd,
                unread=unread,
                engine_around=engine.around,
                client_fd=client_fd,
                client_around=client.around,
                room=room,
                last_s=self._answer.last_token_s,
            )
            self._lane = self._fast_path.lend(ends, self)
            if self._lane is not None:
                return True
            engine.connection.take_back(unread)
        client.socket.take_back(b"")
        return False

    def _tail(self, count: int) -> list[int]:
        """The last tokens of prompt and answer."""
        tail = list(self._machine.tokens[-count:])
        missing = count - len(tail)
        return [*self._prompt_ids[-missing:], *tail] if missing else tail
