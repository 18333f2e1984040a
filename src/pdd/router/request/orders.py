"""What agents are told about a request's KV, and which engines are to expect it.

It keeps no prompt: late news of a transfer, which may order a release, come long after the answer.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from pdd.router.agents import AgentEvent
from pdd.router.claims import Claim
from pdd.router.fleet import Fleet
from pdd.router.request.events import StartPrefill
from pdd.router.request.job import transfer_id


class Orders:
    """The orders of one request; each is carried out in the background.

    Args:
        fleet: Where the agents are.
        background: Runs to the end what is told an agent, whatever becomes of the request.
        transfer_prefix: Of the ids of the request's transfers.
    """

    def __init__(
        self, *, fleet: Fleet, background: Callable[[Coroutine[Any, Any, None]], None], transfer_prefix: str
    ) -> None:
        self.prefills: dict[int, str] = {}
        self.targets: dict[int, tuple[str, ...]] = {}
        self._fleet = fleet
        self._background = background
        self._transfer_prefix = transfer_prefix
        self._expected: dict[str, Claim] = {}

    def note(self, effect: StartPrefill, listener: Callable[[AgentEvent], None]) -> None:
        """P gets the order with its request; what becomes of it is heard, and its targets are expected."""
        self.prefills[effect.attempt] = effect.engine
        self.targets[effect.attempt] = effect.targets
        self.expect_none()
        for engine in effect.targets:  # asked once the KV is there: others are placed with that in mind
            self._expected[engine] = self._fleet.engines[engine].claims.open()
        if effect.targets:
            agent = self._fleet.engines[effect.engine].agent
            agent.listen(self._transfer(effect.attempt), listener)

    def begins(self, engine: str) -> None:
        """The engine runs the request: it is expected there no more."""
        if (claim := self._expected.pop(engine, None)) is not None:
            claim.close()

    def expect_none(self) -> None:
        """The request is expected nowhere."""
        for claim in self._expected.values():
            claim.close()
        self._expected.clear()

    def cancel(self, attempt: int, peer: str) -> None:
        """P's agent stops sending to the peer."""
        agent = self._fleet.engines[self.prefills[attempt]].agent
        self._background(agent.cancel(self._transfer(attempt), [peer]))

    def resume(self, attempt: int) -> None:
        """P's agent sends what it held."""
        agent = self._fleet.engines[self.prefills[attempt]].agent
        self._background(agent.resume(self._transfer(attempt)))

    def release(self, attempt: int, peer: str) -> None:
        """The peer's agent ends the lease on what landed."""
        self._background(self._fleet.engines[peer].agent.release(self._transfer(attempt)))

    def _transfer(self, attempt: int) -> str:
        return transfer_id(self._transfer_prefix, attempt)
