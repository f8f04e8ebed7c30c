"""Memory for weights and KV."""

import pytest
import torch

from engine.model.huge_pages import CHUNK, LINE, HugePages


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
