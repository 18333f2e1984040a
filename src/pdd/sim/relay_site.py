"""The relays of a run: RLD engines, or P's own engines between their chunks; and the handoff's timeline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdd.policy.handoff import HandoffDecision, Mode
from pdd.sim.decode_engine import DecodeEngine
from pdd.sim.fleet import RoleModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """How one request moves from RLD to MD.

    Args:
        gap_tokens: Eager tokens MD recomputes at once; RLD may make more while they catch up.
        made_tokens: Eager tokens in all.
        hold_s: Until MD makes its first token.
        stall_s: Of that, what the client sees.
        catch_up_s: How long RLD goes on; None if it stops at once.
    """

    gap_tokens: float
    made_tokens: float
    hold_s: float
    stall_s: float
    catch_up_s: float | None


class RelaySite:
    """Relays and who is on them.

    ``load[relay]`` counts open requests, ``least`` is the relay with the fewest, lowest index first;
    ``of[request]`` is the relay of one. Where relays share the prefill
    engines, all of them are relay 0: which of them a request gets is not known before it is prefilled.
    """

    __slots__ = ("_host_of", "_load_s_per_token", "_mode", "capacity", "engines", "least", "load", "of")

    def __init__(
        self,
        engines: Sequence[DecodeEngine],
        model: RoleModel,
        *,
        mean_context_tokens: float,
        host_of: Sequence[int] | None,
    ) -> None:
        """
        Args:
            engines: Of the relays, or of the prefill engines they share.
            model: Of one.
            mean_context_tokens: Of the workload; bounds what a relay runs at once.
            host_of: By request, the prefill engine that computed it, where relays share those.
        """
        self.engines = engines
        self._host_of = host_of
        self._load_s_per_token = 0.0 if host_of is not None else model.load_s_per_token
        num_relays = 1 if host_of is not None else len(engines)
        self.capacity = max(1, min(model.section.max_batch, _slots(model, mean_context_tokens)))
        self.capacity *= len(engines) // num_relays
        self.load = [0] * num_relays
        self.least = 0
        self._mode: list[Mode] = ["catch-up"] * num_relays
        self.of: dict[int, int] = {}

    @property
    def is_shared(self) -> bool:
        """Whether relays run on the prefill engines."""
        return self._host_of is not None

    def engine(self, request: int) -> DecodeEngine:
        """The engine that decodes the request."""
        return self.engines[self._host_of[request] if self._host_of is not None else self.of[request]]

    def load_ratio(self, request: int) -> float:
        """How full the request's relay is."""
        return self.load[self.of[request]] / self.capacity

    def load_s(self, tokens: float) -> float:
        """Copying landed KV from host to device; none where P computed it on the same engine."""
        return tokens * self._load_s_per_token

    def take(self, request: int, relay: int) -> None:
        """The request will come to the relay."""
        self.of[request] = relay
        self._count(relay, 1)

    def release(self, request: int) -> None:
        """The request neither runs nor waits here."""
        relay = self.of.get(request)
        if relay is None:
            return
        engine = self.engine(request)
        del self.of[request]
        self._count(relay, -1)
        if request in engine.joined:
            engine.remove(request)

    def _count(self, relay: int, more: int) -> None:
        load = self.load
        load[relay] += more
        self.least = load.index(min(load))

    def hand_over(
        self,
        request: int,
        main: DecodeEngine,
        *,
        tokens: int,
        output_tokens: int,
        load_s: float,
        rtt_s: float,
        decide: Callable[..., HandoffDecision],
    ) -> Handover | None:
        """The timeline of a request's handoff now; None if the relay has not begun it.

        Args:
            request: Which.
            main: MD.
            tokens: Of the prompt.
            output_tokens: Of the answer.
            load_s: MD copies the prompt's KV from host to device.
            rtt_s: Of the line.
            decide: The handoff policy.
        """
        engine = self.engine(request)
        if request not in engine.joined:
            return None
        relay = self.of[request]
        gap = engine.made_tokens(request)
        decision = decide(
            gap_tokens=gap, relay_load_ratio=self.load_ratio(request), previous=self._mode[relay]
        )
        self._mode[relay] = decision.auto_mode
        if decision.mode == "one-shot":
            stall_s = rtt_s / 2 + load_s + main.extend_time_s(gap, tokens)
            return Handover(gap_tokens=gap, made_tokens=gap, hold_s=stall_s, stall_s=stall_s, catch_up_s=None)
        rounds, left, catch_up_s = 0, gap, 0.0
        while decision.catch_up.move(made_tokens=int(left), computed_tokens=0, rounds=rounds) == "round":
            round_s = rtt_s + main.extend_time_s(left, tokens) + main.step_s + (load_s if not rounds else 0.0)
            catch_up_s += round_s
            left = round_s / engine.step_s
            rounds += 1
        stall_s = rtt_s / 2 + main.extend_time_s(left, tokens)
        return Handover(
            gap_tokens=gap,
            made_tokens=min(output_tokens - 1.0, gap + catch_up_s / engine.step_s),
            hold_s=catch_up_s + stall_s,
            stall_s=stall_s,
            catch_up_s=catch_up_s,
        )


def _slots(model: RoleModel, context_tokens: float) -> int:
    """Requests of a mean context one relay runs at once: by memory and by time per token."""
    times = model.decode
    slots = int(times.capacity_tokens / context_tokens)
    while (
        slots > 1
        and times.base_s[min(slots, len(times.base_s) - 1)] + times.per_context_s * slots * context_tokens
        > times.max_step_s
    ):
        slots -= 1
    return slots
