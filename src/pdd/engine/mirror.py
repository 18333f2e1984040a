"""What an engine knows through its agent: which chunks the store holds, and which jobs are open.

Pure: messages in, messages out; ``agent_link`` moves them. The states and what leads to them::

    AWAY ──greeted──> GREETED ──Welcome──> UP
      ^                  │                  │ Refused, or a message that breaks the protocol
      └──────lost────────┴───── ENDING <────┘

Job rule: a job ends when the agent answers it, or when the connection is lost: then no copy of it can run any
more. In ENDING one may, so its jobs stay open although nothing is said or believed any more.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from pdd.core.errors import RemoteProtocolError
from pdd.wire.local import (
    LOCAL_VERSION,
    BeginTransfer,
    FinishRequest,
    FromAgent,
    KeysChanged,
    LoadChunks,
    LoadDone,
    Message,
    Refused,
    StoreChunks,
    StoreDone,
    Touch,
    Welcome,
)


class LinkState(Enum):
    """Where the connection is; see the module's picture."""

    AWAY = "away"
    GREETED = "greeted"
    UP = "up"
    ENDING = "ending"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJob:
    """A job that no longer touches the primary tier.

    ``loaded`` are the keys of a load job whose slots hold good bytes; None for store jobs.
    """

    job: int
    ok: bool
    loaded: frozenset[bytes] | None = None


class Mirror:
    """One engine's picture of its agent. Methods return the messages that are to be sent now."""

    def __init__(self) -> None:
        """Nobody is connected, and nothing is known."""
        self.state = LinkState.AWAY
        self.keys: set[bytes] = set()
        self._orders: dict[str, BeginTransfer] = {}
        self._jobs: dict[int, frozenset[bytes] | None] = {}
        self._finished: deque[FinishedJob] = deque()

    @property
    def has_open_jobs(self) -> bool:
        """Whether a job may still touch the primary tier."""
        return bool(self._jobs)

    def take_finished(self) -> list[FinishedJob]:
        """The jobs that ended since the last call."""
        finished = list(self._finished)
        self._finished.clear()
        return finished

    # What the engine does.

    def begin(self, order: BeginTransfer) -> list[Message]:
        """The order is in force until the request finishes, also for an agent that comes later."""
        self._orders[order.request] = order
        return self._if_up(order)

    def finish(self, request: str) -> list[Message]:
        """The request's order, if it has one, is complete."""
        if self._orders.pop(request, None) is None:
            return []
        return self._if_up(FinishRequest(request=request))

    def submit_store(self, message: StoreChunks) -> list[Message]:
        """The job is open, or has failed where no agent is connected."""
        return self._submit(message.job, None, message)

    def submit_load(self, message: LoadChunks) -> list[Message]:
        """The job is open, or has failed where no agent is connected."""
        return self._submit(message.job, frozenset(message.keys), message)

    def touch(self, keys: Iterable[bytes]) -> list[Message]:
        """Those of the keys that are in the store become the last to be evicted."""
        present = [key for key in keys if key in self.keys]
        return self._if_up(Touch(keys=present)) if present else []

    # What happens to the connection.

    def greeted(self) -> None:
        """A connection stands and this engine has introduced itself."""
        self.state = LinkState.GREETED

    def handle(self, message: FromAgent) -> list[Message]:
        """The message is known.

        Raises:
            RemoteProtocolError: If the agent refuses this engine or breaks the protocol; call ``end`` then.
        """
        match message:
            case Welcome() if self.state is LinkState.GREETED:
                return self._welcome(message)
            case Refused():
                raise RemoteProtocolError(f"this engine is refused: {message.reason}")
            case KeysChanged() if self.state is LinkState.UP:
                self.keys.difference_update(message.removed)
                self.keys.update(message.added)
            case StoreDone() if message.job in self._jobs and self._jobs[message.job] is None:
                self._end_job(message.job, loaded=None)
            case LoadDone() if self._jobs.get(message.job) is not None:
                self._end_job(message.job, loaded=message.loaded)
            case _:
                raise RemoteProtocolError(f"unexpected {type(message).__name__} from the agent")
        return []

    def end(self) -> None:
        """Nothing of what the agent says counts any more; jobs stay open until it is gone."""
        self.state = LinkState.ENDING
        self.keys.clear()

    def lost(self) -> None:
        """The agent is gone: its jobs have ended, and nothing is known of its store."""
        self.state = LinkState.AWAY
        self.keys.clear()
        for job in list(self._jobs):
            self._end_job(job, loaded=())

    def _welcome(self, message: Welcome) -> list[Message]:
        if message.version != LOCAL_VERSION:
            raise RemoteProtocolError(f"agent speaks version {message.version}, this engine {LOCAL_VERSION}")
        self.state = LinkState.UP
        self.keys = set(message.keys)
        # An agent that restarted knows no order. What it missed is lost, but it can say so.
        return list(self._orders.values())

    def _if_up(self, message: Message) -> list[Message]:
        return [message] if self.state is LinkState.UP else []

    def _submit(self, job: int, keys: frozenset[bytes] | None, message: Message) -> list[Message]:
        self._jobs[job] = keys
        if self.state is not LinkState.UP:
            self._end_job(job, loaded=())
            return []
        return [message]

    def _end_job(self, job: int, *, loaded: Collection[bytes] | None) -> None:
        """``loaded`` None: a store job that was done."""
        keys = self._jobs.pop(job)
        if keys is None:
            self._finished.append(FinishedJob(job=job, ok=loaded is None))
            return
        good = keys.intersection(loaded or ())
        self._finished.append(FinishedJob(job=job, ok=good == keys, loaded=good))
