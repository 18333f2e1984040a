"""One run: a stream of requests through a fleet, under one architecture.

Owns the life of a request in the simulator. Decisions are asked of ``decisions``; times come from ``fleet``;
queues and flows from ``prefill_pool``, ``line``, ``relay_site`` and ``main_site``.
"""

from array import array
from collections.abc import Callable

import numpy as np

from pdd.sim.build import build_crossing, build_mains, build_pools, build_relays
from pdd.sim.decisions import Decisions
from pdd.sim.decode_engine import Admission
from pdd.sim.fleet import Parts, RoleModel
from pdd.sim.kernel import ARRIVAL, DEFERRED, Kernel, collector_off
from pdd.sim.line import OVER, Flow, LineProfile
from pdd.sim.outcome import MD_ONLY, P_MD, P_RLD, P_RLD_MD, REJECTED, Outcome
from pdd.sim.relay_site import RelaySite
from pdd.sim.totals import RunTotals, count_totals
from pdd.sim.warm import place_hot_prefixes, warm_up
from pdd.sim.workload.stream import Paths, Workload

DRAIN_S = 1_200.0
"""After the last arrival a run goes on at most so long; what is then still open was never going to meet an
SLO.
"""


class FleetRun:
    """State of one run; ``run()`` plays it to its end."""

    def __init__(
        self, parts: Parts, workload: Workload, paths: Paths, *, line: LineProfile | None = None
    ) -> None:
        scenario = parts.scenario
        kernel = self.kernel = Kernel()
        self.workload, self._kv = workload, parts.kv
        self._inputs, self._outputs = workload.input_tokens, workload.output_tokens
        self.outcome = Outcome.for_requests(len(workload))
        self.prefill, self.local_prefill = build_pools(
            kernel, parts, workload, paths, on_sendable=self._sendable, on_done=self._prefilled
        )
        self.mains = build_mains(
            kernel, parts, workload, paths, on_start=self._main_starts, on_done=self._finish
        )
        self.relays = build_relays(
            kernel, parts, workload, self.prefill, on_start=self._relay_starts, on_done=self._relay_done
        )
        self._crossing = build_crossing(kernel, parts, workload, line)
        self.line = self._crossing.line
        pools = [self.prefill, *([self.local_prefill] if self.local_prefill is not None else [])]
        self._decide = Decisions(
            parts,
            workload,
            mains=self.mains,
            relays=self.relays,
            crossing=self._crossing,
            homes=warm_up(workload, paths, self.mains, pools),
        )
        self._relayed_pipeline = P_RLD if scenario.fleet.architecture == "pdd-with-p-rld" else P_RLD_MD
        self._fast_rtt_s = scenario.fast_link.rtt
        self._kv_only_grows = not self._kv.fixed_bytes(1.0)
        self._is_local = bytearray(len(workload))
        self._flows: dict[int, Flow] = {}
        self.actual_arrival_s = array("d", workload.arrival_s)
        self._successor: dict[int, int] = {}
        self._after = workload.after if scenario.workload.is_causal else [-1] * len(workload)
        self._num_done = self._num_rejected = 0
        self._tail_tokens, self._hold_s = self._plain_starts(parts.role(scenario.fleet.main, "main"))
        blocks = place_hot_prefixes(paths.tree, self.mains) if scenario.policy.hot_prefix_copies else 0
        self.hot_bytes = float(blocks * self._crossing.block_bytes)

    def _plain_starts(self, main: RoleModel) -> tuple[list[int], list[float]]:
        """For each request the tokens MD computes itself when no relay made any, and how long its place is
        taken before the first token: loading the KV, computing that tail, a round trip.
        """
        times = main.decode
        tokens = np.asarray(self._inputs)
        tails = tokens % self.workload.block_tokens
        load_s = tokens * main.load_s_per_token
        extend_s = tails * (times.extend_s + times.extend_per_context_s * tokens)
        self._load_s_per_token = main.load_s_per_token
        return tails.tolist(), (load_s + extend_s + self._crossing.rtt_s).tolist()

    def run(self, *, on_progress: Callable[[float], None] | None = None) -> RunTotals:
        """Plays all arrivals and up to ``DRAIN_S`` of what they left open."""
        arrivals = self.workload.arrival_s
        with collector_off():
            self.kernel.run(
                until_s=arrivals[-1] + DRAIN_S,
                arrivals=arrivals,
                on_arrival=self._arrive,
                on_progress=on_progress,
            )
        return count_totals(
            self.workload,
            self.outcome,
            events=self.kernel.events,
            num_done=self._num_done,
            num_rejected=self._num_rejected,
            pools=[self.prefill, *([self.local_prefill] if self.local_prefill is not None else [])],
            mains=self.mains,
            line=self.line,
            hot_bytes=self.hot_bytes,
        )

    # -- arrival

    def _arrive(self, request: int) -> None:
        before = self._after[request]
        if before >= 0 and not self.outcome.is_done[before]:
            self._successor[before] = request
        else:
            self._enter(request)

    def _enter(self, request: int) -> None:
        self.actual_arrival_s[request] = self.kernel.now_s
        outcome, tokens = self.outcome, self._inputs[request]
        if tokens + self._outputs[request] > self.mains.capacity_tokens:
            outcome.pipeline[request] = REJECTED
            self._num_rejected += 1
            self._follow_up(request)
            return
        hit = outcome.main_hit_tokens[request] = self._decide.main_for(request)
        if self._decide.prefills_on_main(tokens - hit, hit):
            outcome.pipeline[request] = MD_ONLY
            self.mains.join(request)
            return
        outcome.pipeline[request] = P_MD
        relays, local = self.relays, self.local_prefill
        if relays is not None:
            relay = self._decide.relay_for(request, tokens - hit)
            if relay >= 0:
                outcome.pipeline[request] = self._relayed_pipeline
                relays.take(request, relay)
        elif local is not None and self._decide.prefills_locally(self.prefill.uncached_tokens(request)):
            self._is_local[request] = 1
            local.submit(request)
            return
        self.prefill.submit(request)

    # -- prefill and transfer

    def _sendable(self, request: int) -> None:
        """The first chunk of KV exists: the transfer to MD begins."""
        line, relays, outcome = self.line, self.relays, self.outcome
        if line is None or outcome.pipeline[request] == P_RLD:
            return
        tokens, hit = self._inputs[request], outcome.main_hit_tokens[request]
        if self._kv_only_grows:
            num_bytes = (tokens - hit) * self._crossing.bytes_per_token
        else:
            num_bytes = self._kv.delta_bytes(tokens, hit) * self._crossing.sent_shrink
        outcome.wan_bytes[request] = num_bytes
        if relays is None or request not in relays.of:
            line.send(request, num_bytes, on_done=self._crossed)
            return
        flow = line.send(
            request,
            num_bytes,
            on_done=self._crossed,
            priority=self._decide.wan_priority(
                request, num_bytes, known_ratio=1 - self.prefill.miss_tokens[request] / tokens
            ),
            is_unmasked=False,
        )
        if flow.state != OVER:
            self._flows[request] = flow

    def _prefilled(self, request: int) -> None:
        outcome, kernel = self.outcome, self.kernel
        now = outcome.first_s[request] = kernel.now_s
        if self._outputs[request] == 1:
            self._finish(request)
            return
        relays = self.relays
        if self.line is None or self._is_local[request]:
            kernel.at(self._fast_arrival_s(request), DEFERRED, self._landed, request)
            return
        if relays is not None and request in relays.of:
            arrival_s = now if relays.is_shared else self._fast_arrival_s(request)
            kernel.at(arrival_s, DEFERRED, self._reach_relay, request)
        if outcome.landed_s[request]:  # the line was faster than the prefill; only the last chunk is missing
            last_s = self.prefill.last_chunk_tokens(request) * self._crossing.bytes_per_token
            last_s /= self._crossing.flow_bytes_per_s
            kernel.at(now + self._crossing.rtt_s + last_s, DEFERRED, self._landed, request)

    def _fast_arrival_s(self, request: int) -> float:
        """When all KV has reached an engine of the same site: the cached part goes while the rest is
        computed.
        """
        local = self.local_prefill
        pool = local if local is not None and self._is_local[request] else self.prefill
        per_token = self._kv.bytes_per_token / self._crossing.fast_bytes_per_s
        by_end_s = self.kernel.now_s + pool.last_chunk_tokens(request) * per_token
        return max(by_end_s, pool.started_s[request] + self._inputs[request] * per_token) + self._fast_rtt_s

    def _crossed(self, request: int) -> None:
        """The last byte has left the line."""
        outcome, relays = self.outcome, self.relays
        if not outcome.first_s[request]:
            self._flows.pop(request, None)
            outcome.landed_s[request] = self.kernel.now_s
        elif relays is not None and request in relays.of:
            self._flows.pop(request, None)
            now = outcome.landed_s[request] = self.kernel.now_s
            self.kernel.at(now + self._crossing.rtt_s, DEFERRED, self._landed, request)
        else:
            self._landed(request)  # the round trip is part of its hold: one event less

    def _landed(self, request: int) -> None:
        """MD holds the prompt's KV."""
        outcome, mains = self.outcome, self.mains
        outcome.landed_s[request] = self.kernel.now_s
        if not outcome.is_done[request]:
            mains.keep(request)
            mains.join(request)

    # -- relay

    def _reach_relay(self, request: int) -> None:
        relays = self.relays
        assert relays is not None
        if request in relays.of:  # else MD was faster than the fast link
            relays.engine(request).join(request, self._inputs[request], self._outputs[request] - 1)

    def _relay_starts(self, request: int) -> Admission | None:
        relays, outcome = self.relays, self.outcome
        assert relays is not None
        if request not in relays.of or outcome.is_done[request]:
            return None  # MD took over while it queued
        tokens = self._inputs[request]
        hold_s = relays.load_s(tokens)
        outcome.was_relayed[request] = 1
        outcome.second_s[request] = self.kernel.now_s + hold_s + relays.engine(request).step_s
        return tokens, self._outputs[request] - 1, 0.0, hold_s

    def _relay_done(self, request: int) -> None:
        """The whole answer came from the relay: its transfer is cancelled at once."""
        outcome = self.outcome
        outcome.relay_tokens[request] = self._outputs[request] - 1
        outcome.pipeline[request] = P_RLD
        flow = self._flows.pop(request, None)
        if flow is not None and self.line is not None:
            outcome.wan_bytes[request] -= self.line.cancel(flow)
        self._finish(request)

    def _leave_relay(self, request: int) -> None:
        assert self.relays is not None
        self.relays.release(request)

    # -- main decode

    def _main_starts(self, request: int) -> Admission | None:
        outcome, relays = self.outcome, self.relays
        if outcome.is_done[request]:
            return None
        if relays is not None and request in relays.of:
            return self._hand_over(request, relays)
        if outcome.pipeline[request] == MD_ONLY:
            return self._prefill_on_main(request)
        main = self.mains.engines[self.mains.of[request]]
        hold_s = self._hold_s[request]
        first_s, begin_s = outcome.first_s[request], self.kernel.now_s + hold_s
        outcome.second_s[request] = (first_s if first_s > begin_s else begin_s) + main.step_s
        return self._inputs[request], self._outputs[request] - 1, self._tail_tokens[request], hold_s

    def _prefill_on_main(self, request: int) -> Admission:
        """MD computes the tail itself and makes the first token."""
        outcome, mains = self.outcome, self.mains
        tokens, output = self._inputs[request], self._outputs[request]
        main = mains.engines[mains.of[request]]
        tail = tokens - outcome.main_hit_tokens[request]
        load_s, extend_s = tokens * self._load_s_per_token, main.extend_time_s(tail, tokens)
        outcome.first_s[request] = self.kernel.now_s + load_s + extend_s + main.step_s
        mains.keep(request)
        hold_s = load_s + extend_s + self._crossing.rtt_s
        begin_s = max(outcome.first_s[request], self.kernel.now_s + hold_s)
        outcome.second_s[request] = begin_s + main.step_s
        return tokens, output, tail, hold_s

    def _hand_over(self, request: int, relays: RelaySite) -> Admission:
        outcome, now = self.outcome, self.kernel.now_s
        tokens, output = self._inputs[request], self._outputs[request]
        main = self.mains.engines[self.mains.of[request]]
        load_s = tokens * self._load_s_per_token
        plan = relays.hand_over(
            request,
            main,
            tokens=tokens,
            output_tokens=output,
            load_s=load_s,
            rtt_s=self._crossing.rtt_s,
            decide=self._decide.handoff,
        )
        if plan is None:  # still queued at the relay: MD serves it from the first token on
            relays.release(request)
            outcome.pipeline[request] = P_MD
            outcome.second_s[request] = now + load_s + main.step_s
            return tokens, output - 1, 0.0, load_s
        if plan.catch_up_s is not None:
            self.kernel.at(now + plan.catch_up_s, DEFERRED, self._leave_relay, request)
        else:
            relays.release(request)
        outcome.stall_s[request] = plan.stall_s
        outcome.relay_tokens[request] = made = plan.made_tokens
        return tokens + made, output - 1 - made, plan.gap_tokens, plan.hold_s

    def _finish(self, request: int) -> None:
        outcome = self.outcome
        if outcome.is_done[request]:
            return
        outcome.is_done[request] = 1
        outcome.end_s[request] = self.kernel.now_s
        self.mains.give_back(request)
        relays = self.relays
        if relays is not None and request in relays.of:
            relays.release(request)
        self._num_done += 1
        if request in self._successor:
            self._follow_up(request)

    def _follow_up(self, request: int) -> None:
        """A turn that waited for this answer comes after its gap."""
        following = self._successor.pop(request, None)
        if following is not None:
            gap_s = self.workload.gap_s[following]
            self.kernel.at(self.kernel.now_s + gap_s, ARRIVAL, self._enter, following)
