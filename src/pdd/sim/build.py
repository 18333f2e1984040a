"""The parts of one run, from a scenario: prefill pools, relays, MDs and the way between the sites."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pdd.policy.wan_order import OrderParams
from pdd.sim.decisions import Crossing
from pdd.sim.decode_engine import DecodeEngine, StartHook
from pdd.sim.fleet import Parts, line_profile
from pdd.sim.kernel import Kernel
from pdd.sim.line import Line, LineProfile
from pdd.sim.main_site import MainSite
from pdd.sim.prefill_pool import PrefillPool
from pdd.sim.relay_site import RelaySite
from pdd.sim.workload.stream import Paths, Workload

Hook = Callable[[int], None]


def build_pools(
    kernel: Kernel, parts: Parts, workload: Workload, paths: Paths, *, on_sendable: Hook, on_done: Hook
) -> tuple[PrefillPool, PrefillPool | None]:
    """The prefill engines of site A, and for PrfaaS those beside decode, which send nothing over the line."""
    fleet = parts.scenario.fleet
    pool = partial(
        PrefillPool, kernel, workload=workload, paths=paths, pooled_cache=fleet.prefill_cache == "pool"
    )
    remote = pool(parts.role(fleet.prefill, "prefill"), on_sendable=on_sendable, on_done=on_done)
    if fleet.architecture != "prfaas" or fleet.local_prefill is None:
        return remote, None
    local = pool(parts.role(fleet.local_prefill, "local_prefill"), on_sendable=_ignore, on_done=on_done)
    return remote, local


def build_mains(
    kernel: Kernel, parts: Parts, workload: Workload, paths: Paths, *, on_start: StartHook, on_done: Hook
) -> MainSite:
    """Site B."""
    fleet = parts.scenario.fleet
    return MainSite(
        kernel,
        parts.role(fleet.main, "main"),
        workload,
        paths,
        has_drc=fleet.main_cache,
        on_start=on_start,
        on_done=on_done,
    )


def build_relays(
    kernel: Kernel,
    parts: Parts,
    workload: Workload,
    prefill: PrefillPool,
    *,
    on_start: StartHook,
    on_done: Hook,
) -> RelaySite | None:
    """The relays of the PDD architectures; where they share the prefill engines, those learn of them."""
    fleet = parts.scenario.fleet
    if not fleet.has_relays:
        return None
    section = fleet.prefill if fleet.relay_shares_prefill or fleet.relay is None else fleet.relay
    model = parts.role(section, "relay")
    engines = [
        DecodeEngine(kernel, model.decode, on_start=on_start, on_done=on_done) for _ in range(section.engines)
    ]
    host_of = prefill.share_with(engines) if fleet.relay_shares_prefill else None
    mean = sum(workload.input_tokens) / len(workload)
    return RelaySite(engines, model, mean_context_tokens=mean, host_of=host_of)


def build_crossing(kernel: Kernel, parts: Parts, workload: Workload, profile: LineProfile | None) -> Crossing:
    """The way KV takes to MD."""
    scenario = parts.scenario
    section, policy, per_token = scenario.line, scenario.policy, parts.kv.bytes_per_token
    block_bytes = round(per_token * workload.block_tokens)
    if section is None or scenario.fleet.architecture == "one-site":
        return Crossing(
            line=None,
            bytes_per_token=per_token,
            block_bytes=block_bytes,
            sent_shrink=1.0,
            rtt_s=0.0,
            flow_bytes_per_s=scenario.fast_link.rate,
            fast_bytes_per_s=scenario.fast_link.rate,
        )
    profile = profile or line_profile(section)
    shrink = 1 / section.compression_ratio
    if section.codec_rate is not None:
        profile = replace(
            profile, flow_bytes_per_s=min(profile.flow_bytes_per_s, section.codec_rate * shrink)
        )
    order = OrderParams(order=policy.wan_order, ageing_s=policy.wan_ageing, masked_steps=policy.masked_steps)
    return Crossing(
        line=Line(kernel, profile, order),
        bytes_per_token=per_token * shrink,
        block_bytes=block_bytes,
        sent_shrink=shrink,
        rtt_s=profile.rtt_s,
        flow_bytes_per_s=profile.flow_bytes_per_s,
        fast_bytes_per_s=scenario.fast_link.rate,
    )


def _ignore(_: int) -> None:
    """Local prefill sends nothing over the line."""
