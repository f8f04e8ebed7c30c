"""Memory of what a step reads most of: weights and KV, in huge pages where the system has them.

With small ones the hardware looks no further ahead than 4 KiB, and looks up where each of them is.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from threading import Thread

import torch

HUGE = 2 << 20
CHUNK = 64 << 20  # virtual memory: a page of it becomes real when it is first written
LINE = 64  # bytes of a cache line
AHEAD = 512 << 20  # bytes of a pool that become real before anything is written there
PIECE = 4 << 20  # made real at a time
_POPULATE_WRITE = 23  # an advice of madvise, since Linux 5.14


class HugePages:
    """Hands out pieces of chunks, which live as long as any piece of them. Owned by whoever fills
    the pieces."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.int8)

    def take(self, size: int) -> torch.Tensor:
        """int8 [size], zeroed, at the start of a cache line. Raises OSError, OverflowError for more
        than there can be."""
        whole = -(-size // LINE) * LINE
        if whole > len(self._left):
            self._left = _chunk(max(whole, CHUNK))
        piece, self._left = self._left[:size], self._left[whole:]
        return piece


def _chunk(size: int) -> torch.Tensor:
    whole = -(-size // HUGE) * HUGE
    memory = mmap.mmap(-1, whole + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(advice)
    chunk = torch.frombuffer(memory, dtype=torch.int8)
    skipped = -chunk.data_ptr() % HUGE
    return chunk[skipped : skipped + whole]


def make_real(memory: torch.Tensor) -> Thread:
    """Have the first AHEAD bytes of `memory` become real in the background, which the first steps
    that write there would have to wait for: a prompt took a fifth longer. What is written
    meanwhile stays. Where the system does not know of this, nothing happens."""
    thread = Thread(target=_touch, args=(memory,), name="kv-memory", daemon=True)
    thread.start()
    return thread


def _touch(memory: torch.Tensor) -> None:
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # not mmap's: that one keeps the GIL
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = memory.data_ptr() + min(memory.nbytes, AHEAD)
    for at in range(first, end, PIECE):
        size = min(PIECE, end - at) // mmap.PAGESIZE * mmap.PAGESIZE
        if madvise(at, size, _POPULATE_WRITE):
            return
