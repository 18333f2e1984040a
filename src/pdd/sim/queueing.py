"""Checks of the simulator's own parts against queueing theory.

Owns single-server experiments whose answers are known in closed form, played on the very classes a fleet
run uses.
"""

import random
from dataclasses import dataclass

from pdd.policy.wan_order import OrderParams
from pdd.sim.decode_engine import DecodeEngine, DecodeTimes
from pdd.sim.kernel import Kernel
from pdd.sim.line import Line, LineProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCheck:
    """One experiment.

    Args:
        name: The queue.
        expected_s, measured_s: Mean time in the system.
        arrivals, done, in_flight: Counts at the end.
    """

    name: str
    expected_s: float
    measured_s: float
    arrivals: int
    done: int
    in_flight: int

    @property
    def error_ratio(self) -> float:
        """Measured against expected."""
        return self.measured_s / self.expected_s - 1


def check_line(
    name: str, *, load: float, fixed_size: bool, shared: bool, arrivals: int, seed: int
) -> QueueCheck:
    """M/M/1 or M/D/1 first-come (one flow at a time), or processor sharing (all flows at once), on the line.

    Source:
        M/M/1: 1 / (mu - lambda). M/D/1 (Pollaczek-Khinchine): 1/mu + rho / (2 mu (1 - rho)). M/G/1
        processor sharing: 1 / (mu (1 - rho)), whatever the sizes.
    """
    kernel = Kernel()
    profile = LineProfile(rate_bytes_per_s=1.0, rtt_s=0.0, flow_bytes_per_s=1.0, pool=10**9 if shared else 1)
    line = Line(kernel, profile, OrderParams(order="first-come"))
    rng = random.Random(seed)
    times = _poisson(rng, load, arrivals)
    total = 0.0
    done = 0

    def finished(request: int) -> None:
        nonlocal total, done
        total += kernel.now_s - times[request]
        done += 1

    def arrive(request: int) -> None:
        size = 1.0 if fixed_size else rng.expovariate(1.0)
        line.send(request, size, on_done=finished)

    kernel.run(arrivals=times, on_arrival=arrive, until_s=times[-1])
    in_flight = arrivals - done
    kernel.run()
    expected = 1 / (1 - load) if shared or not fixed_size else 1 + load / (2 * (1 - load))
    return QueueCheck(
        name=name,
        expected_s=expected,
        measured_s=total / done,
        arrivals=arrivals,
        done=arrivals - in_flight,
        in_flight=in_flight,
    )


def check_decode_engine(*, load: float, arrivals: int, seed: int) -> QueueCheck:
    """Processor sharing on the decode engine: with a step time in proportion to the batch it is M/M/1-PS."""
    kernel = Kernel()
    rng = random.Random(seed)
    times = _poisson(rng, load, arrivals)
    sizes = [rng.expovariate(1.0) for _ in times]
    total = 0.0
    done = 0

    def finished(request: int) -> None:
        nonlocal total, done
        total += kernel.now_s - times[request]
        done += 1

    engine = DecodeEngine(
        kernel,
        DecodeTimes(
            base_s=[float(batch) for batch in range(2_000)], per_context_s=0.0, capacity_tokens=float("inf")
        ),
        on_start=lambda request: (0.0, sizes[request], 0.0, 0.0),
        on_done=finished,
    )
    kernel.run(
        arrivals=times,
        on_arrival=lambda request: engine.join(request, 0.0, sizes[request]),
        until_s=times[-1],
    )
    in_flight = arrivals - done
    kernel.run()
    return QueueCheck(
        name="M/M/1 processor sharing (decode engine)",
        expected_s=1 / (1 - load),
        measured_s=total / done,
        arrivals=arrivals,
        done=arrivals - in_flight,
        in_flight=in_flight,
    )


def all_queue_checks(*, arrivals: int = 200_000, load: float = 0.6, seed: int = 3) -> list[QueueCheck]:
    """The four experiments."""
    return [
        check_line(
            "M/M/1 (line, one flow at a time)",
            load=load,
            fixed_size=False,
            shared=False,
            arrivals=arrivals,
            seed=seed,
        ),
        check_line(
            "M/D/1 (line, one flow at a time)",
            load=load,
            fixed_size=True,
            shared=False,
            arrivals=arrivals,
            seed=seed,
        ),
        check_line(
            "M/M/1 processor sharing (line)",
            load=load,
            fixed_size=False,
            shared=True,
            arrivals=arrivals,
            seed=seed,
        ),
        check_line(
            "M/D/1 processor sharing (line)",
            load=load,
            fixed_size=True,
            shared=True,
            arrivals=arrivals,
            seed=seed,
        ),
        check_decode_engine(load=load, arrivals=arrivals, seed=seed),
    ]


def _poisson(rng: random.Random, rate: float, count: int) -> list[float]:
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times
