"""What a run recorded about each request: plain columns, filled while it runs.

Owns the columns and the names of the pipelines. Statistics are made from them in ``metrics``.
"""

from __future__ import annotations  # array is not subscriptable at run time before Python 3.12

from array import array
from dataclasses import dataclass

PENDING, P_MD, P_RLD_MD, P_RLD, MD_ONLY, REJECTED = range(6)
PIPELINE_NAMES = ("pending", "p-md", "p-rld-md", "p-rld", "md", "rejected")
"""``p-rld``: ended on the relay (an outlier, or where that pipeline is allowed); ``md``: MD computed the
tail itself.
"""


@dataclass(slots=True)
class Outcome:
    """Columns by request; times are absolute, NaN-free: 0 means it has not happened."""

    pipeline: bytearray
    is_done: bytearray
    was_relayed: bytearray
    first_s: array[float]
    second_s: array[float]
    end_s: array[float]
    landed_s: array[float]
    relay_tokens: array[float]
    stall_s: array[float]
    wan_bytes: array[float]
    main_hit_tokens: array[int]

    @classmethod
    def for_requests(cls, count: int) -> Outcome:
        """Empty columns."""
        zeros = bytes(8 * count)
        return cls(
            pipeline=bytearray(count),
            is_done=bytearray(count),
            was_relayed=bytearray(count),
            first_s=array("d", zeros),
            second_s=array("d", zeros),
            end_s=array("d", zeros),
            landed_s=array("d", zeros),
            relay_tokens=array("d", zeros),
            stall_s=array("d", zeros),
            wan_bytes=array("d", zeros),
            main_hit_tokens=array("q", zeros),
        )
