"""Memory for weights and KV."""

import ctypes
import mmap

import pytest
import torch

from kvrelay.engine.model.cpu import huge_pages
from kvrelay.engine.model.cpu.huge_pages import CHUNK, LINE, PIECE, HugePages, make_real


def test_pieces_are_zeroed_aligned_and_apart():
    memory = HugePages()
    sizes = (1, LINE + 1, 3000, CHUNK + 5, 7)
    pieces = [memory.take(size) for size in sizes]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % LINE == 0
        assert not piece[:3000].any()
        piece[:3000].fill_(number + 1)
        piece[-1] = number + 1
    for number, piece in enumerate(pieces):
        assert len(piece) == sizes[number]
        assert (piece[:3000] == number + 1).all()
        assert piece[-1] == number + 1


def test_a_piece_outlives_who_gave_it():
    piece = HugePages().take(1 << 20)
    piece.fill_(3)
    others = HugePages().take(1 << 20)
    others.fill_(4)
    assert torch.equal(piece, torch.full((1 << 20,), 3, dtype=torch.int8))


@pytest.mark.parametrize("size", [1 << 60, 1 << 70])
def test_more_than_there_can_be_is_refused(size):
    with pytest.raises((OSError, OverflowError)):
        HugePages().take(size)


def resident(memory: torch.Tensor) -> int:
    """How many of its pages are there."""
    pages = -(-memory.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None)
    assert (
        libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), found) == 0
    )
    return sum(byte & 1 for byte in found)


def test_the_first_of_a_pool_becomes_real_before_it_is_written_and_keeps_what_is(monkeypatch):
    monkeypatch.setattr(huge_pages, "AHEAD", 3 * PIECE)
    memory = HugePages().take(CHUNK)
    memory[PIECE + 5] = 7
    make_real(memory).join(30)
    assert resident(memory[: 3 * PIECE]) == 3 * PIECE // mmap.PAGESIZE
    assert resident(memory[4 * PIECE :]) == 0
    assert memory[PIECE + 5] == 7
    assert memory[: 3 * PIECE].count_nonzero() == 1


def test_a_pool_smaller_than_a_page_is_left_alone():
    memory = torch.ones(100, dtype=torch.int8)
    make_real(memory).join(30)
    assert memory.sum() == 100
