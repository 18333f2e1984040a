"""The throughput model of PrfaaS: remote prefill of long uncached prompts, KV back over Ethernet.

Owns its equations and their optimum over the threshold and the split of local engines.

Source:
    arXiv 2604.15039: theta_prfaas = min(N / T_prefill(l_long), B_out / S_kv(l_long)); theta_p = N_p /
    T_prefill(l_short); theta_d = N_d BS_max / (T_decode L_out); Lambda_max = min(theta_prfaas / p, theta_p
    / (1 - p), theta_d).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from pdd.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Curve:
    """A measured quantity over uncached length, linear between points and beyond the last two."""

    lengths: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if (
            len(self.lengths) < 2
            or len(self.lengths) != len(self.values)
            or list(self.lengths) != sorted(set(self.lengths))
        ):
            raise ConfigurationError(
                "a curve needs at least two points, with growing lengths and one value each"
            )

    def at(self, length: float) -> float:
        """The value at a length."""
        index = min(max(bisect_right(self.lengths, length) - 1, 0), len(self.lengths) - 2)
        x0, x1 = self.lengths[index], self.lengths[index + 1]
        y0, y1 = self.values[index], self.values[index + 1]
        return y0 + (y1 - y0) * (length - x0) / (x1 - x0)


KIB = 1024.0
MIB = 1024.0**2
PUBLISHED_KV_BYTES = Curve(
    (KIB, 8 * KIB, 32 * KIB, 128 * KIB), tuple(mib * MIB for mib in (190.8, 308.9, 701.3, 2316.3))
)
"""S_kv of the paper's 1T hybrid model."""
PUBLISHED_PREFILL_S = Curve((KIB, 8 * KIB, 32 * KIB, 128 * KIB), (0.44, 0.72, 1.84, 7.40))
"""T_prefill of that model on 8 x H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrfaasInputs:
    """What the equations take.

    Args:
        uncached_tokens: A sample of uncached lengths.
        kv_bytes, prefill_s: The two curves.
        remote_engines: In the compute-dense cluster.
        local_engines: To split between prefill and decode.
        line_bytes_per_s: Out of the remote cluster.
        decode_batch: Requests a decode engine runs at once.
        decode_step_s: Time per token.
        output_tokens: Mean.
    """

    uncached_tokens: Sequence[float]
    kv_bytes: Curve
    prefill_s: Curve
    remote_engines: int
    local_engines: int
    line_bytes_per_s: float
    decode_batch: float
    decode_step_s: float
    output_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrfaasPoint:
    """Throughput at one threshold and split, and which term binds."""

    threshold_tokens: float
    local_prefill: int
    local_decode: int
    long_share: float
    lambda_rps: float
    binding: str


def kv_throughput_bytes_per_s(length: float, *, kv_bytes: Curve, prefill_s: Curve) -> float:
    """KV one prefill instance puts out while it computes prompts of one length."""
    return kv_bytes.at(length) / prefill_s.at(length)


def prfaas_throughput(inputs: PrfaasInputs, *, threshold_tokens: float, local_prefill: int) -> PrfaasPoint:
    """Lambda_max at one threshold and split."""
    longs = [length for length in inputs.uncached_tokens if length > threshold_tokens]
    shorts = [length for length in inputs.uncached_tokens if length <= threshold_tokens]
    share = len(longs) / len(inputs.uncached_tokens)
    decode_engines = inputs.local_engines - local_prefill
    terms = {"decode": decode_engines * inputs.decode_batch / (inputs.decode_step_s * inputs.output_tokens)}
    if longs:
        mean = sum(longs) / len(longs)
        terms["remote prefill"] = inputs.remote_engines / inputs.prefill_s.at(mean) / share
        terms["line"] = inputs.line_bytes_per_s / inputs.kv_bytes.at(mean) / share
    if shorts:
        mean = sum(shorts) / len(shorts)
        terms["local prefill"] = local_prefill / inputs.prefill_s.at(mean) / (1 - share)
    binding = min(terms, key=lambda term: (terms[term], term))
    return PrfaasPoint(
        threshold_tokens=threshold_tokens,
        local_prefill=local_prefill,
        local_decode=decode_engines,
        long_share=share,
        lambda_rps=terms[binding],
        binding=binding,
    )


def prfaas_optimum(inputs: PrfaasInputs, *, thresholds: Sequence[float]) -> PrfaasPoint:
    """The best point over all thresholds and splits; ties go to the lower threshold."""
    best: PrfaasPoint | None = None
    best_rate = -inf
    for threshold in thresholds:
        for local_prefill in range(1, inputs.local_engines):
            point = prfaas_throughput(inputs, threshold_tokens=threshold, local_prefill=local_prefill)
            if point.lambda_rps > best_rate * (1 + 1e-12):
                best, best_rate = point, point.lambda_rps
    if best is None:
        raise ConfigurationError("PrfaaS needs at least one threshold and two local engines")
    return best
