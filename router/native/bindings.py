"""`router/native/router.c`, called through ctypes: the prefix index, and the choice of workers.

Calls hold Python's lock: they take microseconds, and would wait longer to get the lock back.
"""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char_p, c_double, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from engine.native import load

SOURCE = Path(__file__).parent / "router.c"

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "index_new": (c_void_p, [c_uint32, c_uint32]),
    "index_free": (None, [c_void_p]),
    "index_tidy": (None, [c_void_p, c_double, c_uint64]),
    "index_open": (c_int64, [c_void_p, c_uint32]),
    "index_close": (None, [c_void_p, c_uint32]),
    "index_regroup": (None, [c_void_p, c_uint32, c_uint32]),
    "index_change": (None, [c_void_p, c_uint32, c_void_p, c_uint64, c_uint32, c_uint32]),
    "index_drop_all": (None, [c_void_p, c_uint32, c_uint32]),
    "index_expect": (None, [c_void_p, c_uint32, c_void_p, c_uint64, c_double, c_double]),
    "index_lookup": (None, [c_void_p, c_double, c_void_p, c_uint32, c_void_p]),
    "index_best": (c_uint32, [c_void_p, c_void_p, c_uint32, c_uint32, c_uint32, c_void_p]),
    "index_count": (None, [c_void_p, c_void_p, c_uint64, c_void_p]),
    "index_export": (None, [c_void_p, c_uint32, c_void_p, c_void_p, c_void_p]),
    "index_held": (c_uint64, [c_void_p, c_uint32, c_uint32]),
    "index_num_blocks": (c_uint64, [c_void_p]),
    "index_num_bytes": (c_uint64, [c_void_p]),
    "index_check": (c_char_p, [c_void_p]),
    "waiting_add": (None, [c_void_p, c_double, c_uint64, c_double]),
    "waiting_discard": (None, [c_void_p, c_uint64]),
    "waiting_run_down": (None, [c_void_p, c_double]),
    "waiting_ahead_of": (c_double, [c_void_p, c_double, c_double, c_void_p]),
    "waiting_busy_until": (c_double, [c_void_p, c_double]),
    "waiting_free": (None, [c_void_p]),
    "fleet_new": (c_void_p, []),
    "fleet_free": (None, [c_void_p]),
    "fleet_drop": (None, [c_void_p, c_void_p]),
    "fleet_update": (None, [c_void_p, c_void_p, c_double, c_double]),
    "fleet_list": (c_uint32, [c_void_p, c_void_p]),
    "fleet_has_room": (c_bool, [c_void_p, c_double, c_int64]),
    "chooser_new": (c_void_p, [c_void_p]),
    "chooser_free": (None, [c_void_p]),
    "chooser_put": (None, [c_void_p, c_uint32, c_void_p]),
    "choice_look": (None, [c_void_p, c_void_p]),
    "choice_holders": (c_uint32, [c_void_p, c_void_p, c_uint32, c_void_p]),
    "choice_expect": (
        None,
        [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_double],
    ),
    "choice_is_usable": (c_bool, [c_void_p, c_void_p, c_void_p]),
    "choose": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "choice_sizes": (None, [c_void_p]),
}


@cache
def library() -> ctypes.PyDLL:
    """Compiled when it is first asked for. Raises `NativeBuildError` where it cannot be."""
    loaded = load(SOURCE, hold_gil=True)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    assert isinstance(loaded, ctypes.PyDLL)
    return loaded
