"""One run: a stream of requests through a fleet, under one architecture.

Owns the life of a request in the simulator. Decisions are the router's own functions (``pdd.policy``);
times come from
``fleet``; queues and flows from ``prefill_pool``, ``line`` and ``decode_engine``.
"""

import gc
from array import array
from collections.abc import Callable, Sequence
from math import inf

from pdd.policy.affinity import CacheCandidate, place_near_cache
from pdd.policy.handoff import HandoffParams, Mode, catch_up_ends, decide_handoff
from pdd.policy.outlier import OutlierInput, decide_outlier
from pdd.policy.pipeline import choose_by_wan_time, wan_time_s
from pdd.policy.relay_threshold import RelayThresholdParams, relay_threshold_s
from pdd.policy.wan_order import WanOrderParams
from pdd.sim.cache import ROOT, PrefixCache
from pdd.sim.decode_engine import Admission, DecodeEngine
from pdd.sim.fleet import Parts, RoleModel, line_profile
from pdd.sim.kernel import ARRIVAL, DEFERRED, Kernel
from pdd.sim.line import OVER, Flow, Line, LineProfile
from pdd.sim.outcome import MD_ONLY, P_MD, P_RLD, P_RLD_MD, REJECTED, Outcome, RunTotals
from pdd.sim.prefill_pool import PrefillPool
from pdd.sim.scenario import PolicySection, RoleSection
from pdd.sim.workload.stream import Paths, Workload

DRAIN_S = 1_200.0
"""After the last arrival a run goes on at most so long; what is then still open was never going to meet an
SLO.
"""
HOT_PREFIX_SESSIONS = 3
"""A prefix is hot if at least so many sessions begin with it."""
HELD_RANK_S = 3_600.0
"""Held transfers (outliers) count as having come so much later."""


class FleetRun:
    """State of one run; ``run()`` plays it to its end."""

    def __init__(
        self, parts: Parts, workload: Workload, paths: Paths, *, line: LineProfile | None = None
    ) -> None:
        scenario = parts.scenario
        fleet, policy = scenario.fleet, scenario.policy
        self.parts, self.workload, self.paths, self.policy = parts, workload, paths, policy
        self.kernel = Kernel()
        self.outcome = Outcome.for_requests(len(workload))
        self.architecture = fleet.architecture
        self.relays_allowed = fleet.architecture.startswith("pdd")
        self._num_done = self._num_rejected = 0
        self._kv = parts.kv
        self._kv_only_grows = not self._kv.fixed_bytes(1.0)
        self._block_tokens = workload.block_tokens
        self._inputs, self._outputs = workload.input_tokens, workload.output_tokens
        self._block_bytes = round(parts.kv.bytes_per_token * workload.block_tokens)
        self._fast = scenario.fast_link
        self._build_prefill(fleet.prefill, fleet.local_prefill if fleet.architecture == "prfaas" else None)
        self._build_main(fleet.main)
        self._build_relays(fleet.relay)
        self._build_line(line)
        self._build_policies(policy)
        self.actual_arrival_s = array("d", workload.arrival_s)
        self._successor: dict[int, int] = {}
        self._is_causal = scenario.workload.is_causal
        self._warm_up()
        self.hot_bytes = self._place_hot_prefixes() if policy.hot_prefix_copies else 0.0

    def _build_prefill(self, section: RoleSection, local: RoleSection | None) -> None:
        def pool(role: RoleSection, name: str, on_sendable: Callable[[int], None]) -> PrefillPool:
            return PrefillPool(
                self.kernel,
                self.parts.role(role, name),
                self.workload,
                self.paths,
                pooled_cache=self.parts.scenario.fleet.prefill_cache == "pool",
                on_sendable=on_sendable,
                on_done=self._prefilled,
            )

        self.prefill = pool(section, "prefill", self._sendable)
        self.local_prefill = pool(local, "local_prefill", _ignore) if local is not None else None
        self._is_local = bytearray(len(self.workload))
        self._chunk_tokens = section.chunk_tokens

    def _build_main(self, section: RoleSection) -> None:
        model = self._main_model = self.parts.role(section, "main")
        self._main_capacity_tokens = model.decode.capacity_tokens
        count = section.engines
        self.mains = [
            DecodeEngine(self.kernel, model.decode, on_start=self._main_starts, on_done=self._main_done)
            for _ in range(count)
        ]
        blocks = section.cache / (self._kv.bytes_per_token * self.workload.block_tokens)
        self.main_caches = [PrefixCache(self.paths.tree, blocks) for _ in range(count)]
        self._main_of = [0] * len(self.workload)
        self._main_load = [0.0] * count
        self._has_drc = self.parts.scenario.fleet.main_cache

    def _build_relays(self, section: RoleSection | None) -> None:
        self.relays: list[DecodeEngine] = []
        self._relay_of: dict[int, int] = {}
        self._relay_model: RoleModel | None = None
        if section is None or not self.relays_allowed:
            return
        model = self._relay_model = self.parts.role(section, "relay")
        self.relays = [
            DecodeEngine(self.kernel, model.decode, on_start=self._relay_starts, on_done=self._relay_done)
            for _ in range(section.engines)
        ]
        self._relay_load = [0] * section.engines
        self._relay_mode: list[Mode] = ["catch-up"] * section.engines
        mean = sum(self.workload.input_tokens) / len(self.workload)
        self._relay_capacity = max(1, min(section.max_batch, _slots(model, mean)))

    def _build_line(self, profile: LineProfile | None) -> None:
        scenario, policy = self.parts.scenario, self.policy
        self.line: Line | None = None
        self._flows: dict[int, Flow] = {}
        self._sent_shrink = 1.0
        if scenario.line is None or self.architecture == "one-site":
            return
        profile = profile or line_profile(scenario.line)
        self._sent_shrink = 1 / scenario.line.compression_ratio
        if scenario.line.codec_rate is not None:
            flow_rate = min(profile.flow_bytes_per_s, scenario.line.codec_rate * self._sent_shrink)
            profile = LineProfile(
                rate_bytes_per_s=profile.rate_bytes_per_s,
                rtt_s=profile.rtt_s,
                flow_bytes_per_s=flow_rate,
                pool=profile.pool,
            )
        self._profile = profile
        order = WanOrderParams(
            order=policy.wan_order, patience_ratio=policy.patience_ratio, masked_grace_s=policy.masked_grace
        )
        self.line = Line(self.kernel, profile, order)

    def _build_policies(self, policy: PolicySection) -> None:
        self._handoff_params = HandoffParams(
            forced="auto",
            one_shot_max_gap_tokens=policy.one_shot_max_gap_tokens,
            catch_up_gap_tokens=policy.catch_up_gap_tokens,
            catch_up_max_rounds=policy.catch_up_max_rounds,
            busy_ratio=policy.busy_ratio,
            idle_ratio=policy.idle_ratio,
        )
        params = RelayThresholdParams(stretch_ratio=policy.relay_stretch_ratio)
        capacity = self._relay_capacity if self.relays else 1
        self._threshold_s = [
            relay_threshold_s(
                second_token_slo_s=policy.second_token_slack,
                relay_load_ratio=load / capacity,
                params=params,
            )
            for load in range(capacity + 1)
        ]

    def run(self, *, on_progress: Callable[[float], None] | None = None) -> RunTotals:
        """Plays all arrivals and up to ``DRAIN_S`` of what they left open."""
        arrivals = self.workload.arrival_s
        # Nothing here is cyclic, and a full collection walks every column: a tenth of the time of a long run.
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            self._play(arrivals, on_progress)
        finally:
            if was_collecting:
                gc.enable()
        return self._totals()

    def _play(self, arrivals: Sequence[float], on_progress: Callable[[float], None] | None) -> None:
        self.kernel.run(
            until_s=arrivals[-1] + DRAIN_S,
            arrivals=arrivals,
            on_arrival=self._arrive,
            on_progress=on_progress,
        )

    # -- arrival

    def _arrive(self, request: int) -> None:
        if self._is_causal:
            before = self.workload.after[request]
            if before >= 0 and not self.outcome.is_done[before]:
                self._successor[before] = request
                return
        self._enter(request)

    def _enter(self, request: int) -> None:
        self.actual_arrival_s[request] = self.kernel.now_s
        tokens, output = self._inputs[request], self._outputs[request]
        if tokens + output > self._main_capacity_tokens:
            self.outcome.pipeline[request] = REJECTED
            self._num_rejected += 1
            self._follow_up(request)
            return
        hit = self._choose_main(request, tokens, output)
        if tokens - hit <= self.policy.main_prefill_max_tokens and hit:
            self.outcome.pipeline[request] = MD_ONLY
            self._join_main(request)
            return
        pool = self.prefill
        if self.relays_allowed:
            self._choose_pipeline(request, tokens - hit, output)
        else:
            self.outcome.pipeline[request] = P_MD
            if (
                self.local_prefill is not None
                and self.prefill.uncached_tokens(request) <= self._offload_above
            ):
                self._is_local[request] = 1
                pool = self.local_prefill
        pool.submit(request)

    @property
    def _offload_above(self) -> int:
        return self.parts.scenario.fleet.offload_above_tokens

    def _choose_main(self, request: int, tokens: int, output: int) -> int:
        """Sets the request's MD and returns the tokens it holds of the prompt."""
        load = self._main_load
        chosen = load.index(min(load))
        hit = self._main_hit(request, chosen, tokens) if self._has_drc else 0
        home = self._home_of_warm.get(request, -1)
        if home < 0:
            parent = self.workload.parent[request]
            home = self._main_of[parent] if parent >= 0 else -1
        if home >= 0 and home != chosen and self._has_drc:
            home_hit = self._main_hit(request, home, tokens)
            if home_hit > hit:
                if self.mains[home].has_room(tokens, output):
                    # No wait and less to send: the policy could only say the same.
                    chosen, hit = home, home_hit
                    load[home] += tokens + output
                    self.outcome.main_hit_tokens[request] = hit
                    self._main_of[request] = home
                    return hit
                decision = place_near_cache(
                    (
                        CacheCandidate(
                            id=home,
                            wait_s=self._main_wait_s(home, tokens, output),
                            work_s=self._cross_s(tokens - home_hit),
                        ),
                        CacheCandidate(
                            id=chosen,
                            wait_s=self._main_wait_s(chosen, tokens, output),
                            work_s=self._cross_s(tokens - hit),
                        ),
                    )
                )
                if decision.id == home:
                    chosen, hit = home, home_hit
        self._main_of[request] = chosen
        load[chosen] += tokens + output
        self.outcome.main_hit_tokens[request] = hit
        return hit

    def _main_hit(self, request: int, engine: int, tokens: int) -> int:
        paths = self.paths
        hit = self.main_caches[engine].hit_blocks(paths.prompt_segment[request], paths.prompt_blocks[request])
        hit *= self._block_tokens
        return hit if hit < tokens else tokens - 1

    def _main_wait_s(self, engine: int, tokens: int, output: int) -> float:
        """A rough wait for a place: those queued ahead, at the pace at which places become free."""
        main = self.mains[engine]
        if main.has_room(tokens, output) or not main.num_running:
            return 0.0
        return (len(main.waiting) + 1) * output * main.step_s / main.num_running

    def _cross_s(self, tokens: int) -> float:
        if self.line is None:
            return tokens * self._kv.bytes_per_token / self._fast.rate
        return tokens * self._kv.bytes_per_token * self._sent_shrink / self.line.share_bytes_per_s

    def _choose_pipeline(self, request: int, missing: int, output: int) -> None:
        line = self.line
        assert line is not None
        relay = self._relay_load.index(min(self._relay_load))
        # Where low hits may end on RLD, its being full sends nobody elsewhere: that is what the pipeline
        # rule forbids.
        running = 0 if self.architecture == "pdd-with-p-rld" else self._relay_load[relay]
        capacity = self._relay_capacity
        # Beyond its capacity a relay queues: the threshold stays that of a full one.
        threshold_s = self._threshold_s[running if running < capacity else capacity]
        rate = line.share_bytes_per_s
        wan_s = wan_time_s(
            queued_bytes=int(line.queue_s() * rate) if line.waiting_bytes else 0,
            missing_bytes=-(-missing // self.workload.block_tokens) * self._block_bytes,
            rate_bytes_per_s=rate / self._sent_shrink,
            rtt_s=self._profile.rtt_s,
        )
        pipeline, _ = choose_by_wan_time(
            wan_s, second_token_slo_s=threshold_s, relay_running=running, relay_capacity=capacity
        )
        # A single token needs no second engine; a prompt larger than the relay's memory cannot have one.
        if (
            pipeline == "p-md"
            or output <= 1
            or not self.relays[relay].fits_ever(self._inputs[request], output)
        ):
            self.outcome.pipeline[request] = P_MD
            return
        self.outcome.pipeline[request] = P_RLD if self.architecture == "pdd-with-p-rld" else P_RLD_MD
        self._relay_load[relay] += 1
        self._relay_of[request] = relay

    # -- prefill and transfer

    def _sendable(self, request: int) -> None:
        """The first chunk of KV exists: the transfer to MD begins."""
        line = self.line
        if line is None or self.outcome.pipeline[request] == P_RLD:
            return
        tokens = self._inputs[request]
        hit = self.outcome.main_hit_tokens[request]
        if self._kv_only_grows:
            num_bytes = (tokens - hit) * self._kv.bytes_per_token * self._sent_shrink
        else:
            num_bytes = self._kv.delta_bytes(tokens, hit) * self._sent_shrink
        self.outcome.wan_bytes[request] = num_bytes
        relay = self._relay_of.get(request)
        load = self._relay_load[relay] / self._relay_capacity if relay is not None else 0.0
        flow = line.send(
            request,
            num_bytes,
            masked=relay is not None,
            relay_load_ratio=min(1.0, load),
            on_done=self._crossed,
            hold_s=HELD_RANK_S if relay is not None and self._is_outlier(relay, num_bytes) else 0.0,
        )
        if flow.state != OVER:
            self._flows[request] = flow

    def _is_outlier(self, relay: int, num_bytes: float) -> bool:
        if not self.policy.hold_outliers or self.line is None:
            return False
        facts = OutlierInput(
            relayed=True,
            predicted_wan_s=num_bytes / self.line.share_bytes_per_s + self.line.queue_s(),
            max_tokens=int(self.policy.outlier_output_tokens),
            history_tokens=None,
            relay_itl_s=self.relays[relay].step_s,
            margin_ratio=1.0,
            known_ratio=0.0,  # the variant holds every turn alike
            returning_ratio=1.0,
        )
        return decide_outlier(facts).is_outlier

    def _prefilled(self, request: int) -> None:
        kernel, outcome = self.kernel, self.outcome
        now = kernel.now_s
        outcome.first_s[request] = now
        if self._outputs[request] == 1:
            self._finish(request)
            return
        tokens = self._inputs[request]
        if self.line is None or self._is_local[request]:
            pool = (
                self.prefill
                if self.local_prefill is None or not self._is_local[request]
                else self.local_prefill
            )
            kernel.at(self._fast_arrival_s(request, tokens, pool), DEFERRED, self._landed, request)
            return
        if request in self._relay_of:
            kernel.at(
                self._fast_arrival_s(request, tokens, self.prefill), DEFERRED, self._reach_relay, request
            )
        crossed = outcome.landed_s[request]
        if crossed:  # the line was faster than the prefill; only the last chunk is still missing
            last = (
                min(self.prefill.miss_tokens[request], self._chunk_tokens)
                * self._kv.bytes_per_token
                * self._sent_shrink
            )
            kernel.at(
                now + self._profile.rtt_s + last / self._profile.flow_bytes_per_s,
                DEFERRED,
                self._landed,
                request,
            )

    def _fast_arrival_s(self, request: int, tokens: int, pool: PrefillPool) -> float:
        """When all KV has reached an engine of the same site: the cached part goes while the rest is
        computed.
        """
        per_token = self._kv.bytes_per_token / self._fast.rate
        last = min(pool.miss_tokens[request], self._chunk_tokens)
        begun_s = pool.started_s[request]
        return max(self.kernel.now_s + last * per_token, begun_s + tokens * per_token) + self._fast.rtt

    def _crossed(self, request: int) -> None:
        """The last byte has left the line."""
        self._flows.pop(request, None)
        now = self.kernel.now_s
        self.outcome.landed_s[request] = now
        if not self.outcome.first_s[request]:
            return
        if request in self._relay_of:
            self.kernel.at(now + self._profile.rtt_s, DEFERRED, self._landed, request)
        else:
            self._landed(request)  # the round trip is part of its hold: one event less

    def _landed(self, request: int) -> None:
        """MD holds the prompt's KV."""
        outcome = self.outcome
        outcome.landed_s[request] = self.kernel.now_s
        if outcome.is_done[request]:
            return
        if self._has_drc:
            paths = self.paths
            cache = self.main_caches[self._main_of[request]]
            cache.insert(paths.full_segment[request], paths.full_blocks[request])
        self.mains[self._main_of[request]].join(request, self._inputs[request], self._outputs[request] - 1)

    def _join_main(self, request: int) -> None:
        self.mains[self._main_of[request]].join(request, self._inputs[request], self._outputs[request] - 1)

    # -- relay

    def _reach_relay(self, request: int) -> None:
        if request in self._relay_of:  # else MD was faster than the fast link
            relay = self.relays[self._relay_of[request]]
            relay.join(request, self._inputs[request], self._outputs[request] - 1)

    def _relay_starts(self, request: int) -> Admission | None:
        relay = self._relay_of.get(request)
        if relay is None or self.outcome.is_done[request]:
            return None  # MD took over while it queued
        tokens = self._inputs[request]
        assert self._relay_model is not None
        hold_s = tokens * self._relay_model.load_s_per_token
        self.outcome.was_relayed[request] = 1
        self.outcome.second_s[request] = self.kernel.now_s + hold_s + self.relays[relay].step_s
        return Admission(context_tokens=tokens, tokens=self._outputs[request] - 1, hold_s=hold_s)

    def _relay_done(self, request: int) -> None:
        """The whole answer came from the relay: its transfer is cancelled at once."""
        outcome = self.outcome
        outcome.relay_tokens[request] = self._outputs[request] - 1
        outcome.pipeline[request] = P_RLD
        self._release_relay(request)
        flow = self._flows.pop(request, None)
        if flow is not None and self.line is not None:
            outcome.wan_bytes[request] -= self.line.cancel(flow)
        self._finish(request)

    def _release_relay(self, request: int) -> int:
        relay = self._relay_of.pop(request)
        self._relay_load[relay] -= 1
        return relay

    # -- main decode

    def _main_starts(self, request: int) -> Admission | None:
        outcome = self.outcome
        if outcome.is_done[request]:
            return None
        tokens, output = self._inputs[request], self._outputs[request]
        main = self.mains[self._main_of[request]]
        load_s = tokens * self._main_model.load_s_per_token
        if request in self._relay_of:
            return self._hand_over(request, tokens, output, main, load_s)
        now = self.kernel.now_s
        tail = tokens % self._block_tokens
        if outcome.pipeline[request] == MD_ONLY:
            tail = tokens - outcome.main_hit_tokens[request]
            outcome.first_s[request] = now + load_s + main.extend_time_s(tail, tokens) + main.step_s
            output += 1  # nobody else made the first token
            if self._has_drc:
                self.main_caches[self._main_of[request]].insert(
                    self.paths.full_segment[request], self.paths.full_blocks[request]
                )
        hold_s = load_s + (main.extend_time_s(tail, tokens) if tail else 0.0)
        if self.line is not None:
            hold_s += self._profile.rtt_s
        outcome.second_s[request] = max(outcome.first_s[request], now + hold_s) + main.step_s
        return Admission(context_tokens=tokens, tokens=output - 1, extend_tokens=tail, hold_s=hold_s)

    def _hand_over(
        self, request: int, tokens: int, output: int, main: DecodeEngine, load_s: float
    ) -> Admission:
        relay_index = self._relay_of[request]
        relay = self.relays[relay_index]
        rtt_s = self._profile.rtt_s
        if request not in relay.joined:  # still queued at the relay: MD serves it from the first token on
            self._release_relay(request)
            self.outcome.pipeline[request] = P_MD
            self.outcome.second_s[request] = self.kernel.now_s + load_s + main.step_s
            return Admission(context_tokens=tokens, tokens=output - 1, hold_s=load_s)
        gap = relay.made_tokens(request)
        decision = decide_handoff(
            gap_tokens=int(gap),
            relay_load_ratio=self._relay_load[relay_index] / self._relay_capacity,
            previous=self._relay_mode[relay_index],
            params=self._handoff_params,
        )
        self._relay_mode[relay_index] = decision.auto_mode
        made, catch_up_s = gap, 0.0
        if decision.mode == "catch-up":
            rounds, left = 0, gap
            while not catch_up_ends(
                gap_tokens=int(left),
                rounds=rounds,
                stop_gap_tokens=decision.stop_gap_tokens,
                max_rounds=decision.max_rounds,
            ):
                round_s = (
                    rtt_s + main.extend_time_s(left, tokens) + main.step_s + (load_s if not rounds else 0.0)
                )
                catch_up_s += round_s
                left = round_s / relay.step_s
                rounds += 1
            made = min(output - 1.0, gap + catch_up_s / relay.step_s)
            self.outcome.stall_s[request] = rtt_s / 2 + main.extend_time_s(left, tokens)
            hold_s = catch_up_s + self.outcome.stall_s[request]
            self.kernel.at(self.kernel.now_s + catch_up_s, DEFERRED, self._leave_relay, request)
        else:
            hold_s = self.outcome.stall_s[request] = rtt_s / 2 + load_s + main.extend_time_s(gap, tokens)
            self._leave_relay(request)
        self.outcome.relay_tokens[request] = made
        return Admission(
            context_tokens=tokens + made, tokens=output - 1 - made, extend_tokens=gap, hold_s=hold_s
        )

    def _leave_relay(self, request: int) -> None:
        if request in self._relay_of:
            relay = self.relays[self._release_relay(request)]
            if request in relay.joined:
                relay.remove(request)

    def _main_done(self, request: int) -> None:
        if not self.outcome.is_done[request]:
            self._finish(request)

    def _finish(self, request: int) -> None:
        outcome = self.outcome
        outcome.is_done[request] = 1
        outcome.end_s[request] = self.kernel.now_s
        self._main_load[self._main_of[request]] -= self._inputs[request] + self._outputs[request]
        if request in self._relay_of:
            self._leave_relay(request)
        self._num_done += 1
        if request in self._successor:
            self._follow_up(request)

    def _follow_up(self, request: int) -> None:
        """A turn that waited for this answer comes after its gap."""
        following = self._successor.pop(request, None)
        if following is not None:
            self.kernel.at(
                self.kernel.now_s + self.workload.gap_s[following], ARRIVAL, self._enter, following
            )

    # -- the rest

    def _warm_up(self) -> None:
        """Sessions that began before the window find their history on one MD and in the prefill cache."""
        tree, segments = self.paths.tree, self.paths.prompt_segment
        self._home_of_warm: dict[int, int] = {}
        for order, (request, blocks) in enumerate(sorted(self.workload.warm_blocks.items(), reverse=True)):
            segment = segments[request]
            while segment != ROOT and tree.start[segment] >= blocks:
                segment = tree.parent[segment]
            main = order % len(self.main_caches)
            self.main_caches[main].insert(segment, blocks)
            self._home_of_warm[request] = main
            self.prefill.warm(request, segment, blocks)
            if self.local_prefill is not None:
                self.local_prefill.warm(request, segment, blocks)

    def _place_hot_prefixes(self) -> float:
        """Prefixes that many sessions begin with are put on every MD; returns the bytes this sends."""
        tree = self.paths.tree
        children: dict[int, int] = {}
        for above in tree.parent:
            children[above] = children.get(above, 0) + 1
        ends = {
            segment: inf
            for segment in children
            if segment != ROOT and children[segment] >= HOT_PREFIX_SESSIONS
        }
        for segment, above in enumerate(tree.parent):
            if above in ends:
                ends[above] = min(ends[above], tree.start[segment])
        hot = {segment: int(end) for segment, end in ends.items() if tree.parent[segment] == ROOT}
        for cache in self.main_caches:
            for segment, end in hot.items():
                cache.insert(segment, end)
        blocks = sum(end - tree.start[segment] for segment, end in hot.items())
        return float(blocks * self._block_bytes * len(self.main_caches))

    def _totals(self) -> RunTotals:
        span = self.workload.arrival_s[-1] - self.workload.arrival_s[0] or 1.0
        pools = [self.prefill] + ([self.local_prefill] if self.local_prefill is not None else [])
        engines = sum(pool.num_engines for pool in pools)
        relay_tokens, made = sum(self.outcome.relay_tokens), sum(self.workload.output_tokens)
        line_ratio = 0.0
        if self.line is not None:
            line_ratio = (
                self.line.sent_bytes
                / span
                / min(self._profile.rate_bytes_per_s, self._profile.flow_bytes_per_s * self._profile.pool)
            )
        return RunTotals(
            end_s=self.workload.arrival_s[-1],
            events=self.kernel.events,
            num_in_flight=len(self.workload) - self._num_done - self._num_rejected,
            num_rejected=self._num_rejected,
            num_done=self._num_done,
            prefill_busy_ratio=sum(pool.busy_s for pool in pools) / span / engines,
            relay_busy_ratio=relay_tokens / made if made else 0.0,
            main_busy_ratio=1 - relay_tokens / made if made else 0.0,
            line_busy_ratio=line_ratio,
            prefill_computed_tokens=sum(pool.computed_tokens for pool in pools),
            main_evicted_tokens=sum(cache.evicted_blocks for cache in self.main_caches)
            * self.workload.block_tokens,
            wan_sent_bytes=(self.line.sent_bytes if self.line is not None else 0.0) + self.hot_bytes,
            hot_bytes=self.hot_bytes,
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


def _ignore(_: int) -> None:
    """Local prefill sends nothing over the line."""
