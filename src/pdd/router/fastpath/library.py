"""The native library, loaded: its functions with their types, and nothing more.

Its interface is the end of ``fastpath.cpp``; the structures here are those there.
"""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path

from pdd.core.errors import ConfigurationError

PATH = Path(__file__).with_name("_fastpath.so")


class LaneStruct(Structure):
    """``pdd_lane``."""

    _fields_ = (
        ("engine_fd", c_int32),
        ("client_fd", c_int32),
        ("engine_before", c_char_p),
        ("engine_after", c_char_p),
        ("client_before", c_char_p),
        ("client_after", c_char_p),
        ("num_engine_before", c_uint32),
        ("num_engine_after", c_uint32),
        ("num_client_before", c_uint32),
        ("num_client_after", c_uint32),
        ("room", c_uint32),
        ("last_s", c_double),
        ("unread", c_char_p),
        ("num_unread", c_uint32),
    )


class NewsStruct(Structure):
    """``pdd::News``."""

    _fields_ = (
        ("reason", c_int32),
        ("num_ids", c_uint32),
        ("ids", POINTER(c_uint32)),
        ("held_tokens", c_uint32),
        ("num_unread", c_uint32),
        ("unread", c_void_p),
        ("num_unsent", c_uint32),
        ("unsent", c_void_p),
        ("last_s", c_double),
        ("max_gap_s", c_double),
        ("num_gaps", c_uint32),
        ("gaps_s", POINTER(c_double)),
    )


@cache
def load() -> ctypes.CDLL:
    """The library; its calls let other Python threads run.

    Raises:
        ConfigurationError: If it was not built, or not for this machine.
    """
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        raise ConfigurationError(f"the native fast path cannot be loaded: {error}") from error
    signatures = {
        "pdd_fastpath_open": (c_void_p, (c_void_p, c_uint32, c_char_p, c_uint32)),
        "pdd_fastpath_close": (None, (c_void_p,)),
        "pdd_fastpath_returned_fd": (c_int, (c_void_p,)),
        "pdd_fastpath_lend": (c_int64, (c_void_p, POINTER(LaneStruct))),
        "pdd_fastpath_take_returned": (c_int32, (c_void_p, POINTER(c_int64), c_int32)),
        "pdd_fastpath_look": (c_int32, (c_void_p, c_int64, c_int32, POINTER(NewsStruct))),
        "pdd_fastpath_forget": (None, (c_void_p, c_int64)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
