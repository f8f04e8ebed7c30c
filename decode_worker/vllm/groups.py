"""Groups of layers of vLLM, in the terms of ours: which have a window, and whether blocks of all
of them are alike.

vLLM gives each group a block table, as ours do (`engine.kv.window`), and blocks of all groups come
from one pool: a block is the same bytes of memory whatever group it is given to. So a block is
copied without knowing of what group it is, where layers of all groups have one shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

NULL_BLOCK = 0  # stands for those that a window has left: nobody reads or writes it
BLOCKS_OF_TOKENS = {"full_attention", "mla_attention", "sink_full_attention"}
WINDOWS = {"sliding_window", "sliding_window_mla"}
ONLY_AS_FULL = {"chunked_local_attention"}  # what it keeps depends on where its chunks begin


def windows_of(groups: Sequence[Any], block_size: int) -> tuple[int, ...] | None:
    """Tokens that layers of each of vLLM's groups read, 0: all. None: they are not understood.
    `groups`: of vLLM's KVCacheConfig."""
    from vllm.v1.kv_cache_interface import (
        get_kv_cache_spec_kind,
        get_kv_cache_spec_sliding_window,
    )

    found = []
    for group in groups:
        spec = group.kv_cache_spec
        kind = get_kv_cache_spec_kind(spec).value
        if spec.block_size != block_size:
            return None
        if kind in BLOCKS_OF_TOKENS:
            found.append(0)
        elif kind in WINDOWS and (window := get_kv_cache_spec_sliding_window(spec)):
            found.append(window)
        else:
            return None
    if len(found) > 1 and not _are_alike(groups):
        return None
    return tuple(found) or None


def _are_alike(groups: Iterable[Any]) -> bool:
    """Whether all layers keep as many numbers of one type, and nothing beyond their window."""
    specs = [
        spec
        for group in groups
        for spec in getattr(
            group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}
        ).values()
    ]
    forms = {
        (each.page_size_bytes, each.num_kv_heads, each.head_size, str(each.dtype)) for each in specs
    }
    return len(forms) == 1 and not any(getattr(e, "extra_retained_tokens", 0) for e in specs)
