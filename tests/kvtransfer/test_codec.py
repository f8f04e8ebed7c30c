"""Blocks that are coded come back byte by byte, whatever is in them; those of floating-point
numbers are smaller meanwhile. `python -m benchmarks.kv.codec blocks` tries a million."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kvtransfer.codec import MORE_BYTES, ExponentCodec, encode_block, open_codec

CODEC = ExponentCodec()
RUN = 2048  # numbers that are coded together
TURNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def comes_back(block: np.ndarray) -> int:
    """How many bytes it took."""
    coded = np.frombuffer(encode_block(CODEC, block), np.uint8)
    followed = np.concatenate([coded, np.full(100, 7, np.uint8)])  # as in the pages of a disk
    back = np.full_like(block, 0xA5)
    assert CODEC.decode(followed, back)
    assert np.array_equal(back, block)
    return len(coded)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_any_block_comes_back(data: st.DataObject, seed: int) -> None:
    """Numbers whose exponents are a few and some others, any of which may be a NaN's, infinite's,
    denormal's or zero's."""
    rng = np.random.default_rng(seed)
    width, bits = data.draw(st.sampled_from([(1, 4), (2, 8), (2, 5), (4, 8)]))
    size = data.draw(st.integers(1, 3 * RUN + 5)) * width + data.draw(st.sampled_from([0, 0, 1]))
    few = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 9, 2**bits - 1]), min_size=1))
    others = data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    kind = TURNED[width]
    numbers = rng.integers(0, 256, -(-size // width) * width, np.uint8).view(kind)
    exponents = rng.choice(np.array(few, kind), len(numbers))
    exponents = np.where(
        rng.random(len(numbers)) < others,
        rng.integers(0, 2**bits, len(numbers)).astype(kind),
        exponents,
    )
    place = 8 * width - 1 - bits  # below the sign
    numbers &= ~kind((2**bits - 1) << place)
    numbers |= exponents << kind(place)
    comes_back(numbers.view(np.uint8)[:size].copy())


def noise(*shape: int) -> torch.Tensor:
    """As keys and values are: each channel with a size of its own."""
    rng = torch.Generator().manual_seed(1)
    sizes = (torch.randn(shape[-1], generator=rng) / 4).exp()
    return torch.randn(shape, generator=rng) * sizes


@pytest.mark.parametrize(
    ("dtype", "at_least"),
    [
        (torch.bfloat16, 1.4),
        (torch.float16, 1.12),
        (torch.float8_e4m3fn, 1.12),
        (torch.float32, 1.15),
    ],
)
def test_blocks_of_numbers_become_smaller(dtype: torch.dtype, at_least: float) -> None:
    block = noise(8, 2, 3, 16, 64).to(dtype).view(torch.uint8).numpy().reshape(-1)
    assert len(block) / comes_back(block) > at_least


@pytest.mark.parametrize(
    "make",
    [
        lambda n: np.random.default_rng(0).integers(0, 256, n, np.uint8),
        lambda n: np.tile(np.arange(256, dtype=np.uint8), n // 256 + 1)[:n],
    ],
    ids=["random", "all there are"],
)
@pytest.mark.parametrize("size", [1, 7, 4096, 18_432, 12_289])
def test_what_does_not_become_smaller_is_kept(make: Callable[[int], np.ndarray], size: int) -> None:
    assert comes_back(make(size)) <= size + MORE_BYTES


def test_what_is_no_coded_block_is_refused_or_gives_other_bytes_and_writes_nothing_else() -> None:
    block = noise(2, 2, 3, 16, 64).to(torch.bfloat16).view(torch.uint8).numpy().reshape(-1)
    coded = np.frombuffer(encode_block(CODEC, block), np.uint8).copy()
    rng = np.random.default_rng(2)
    guarded = np.full(len(block) + 128, 0xA5, np.uint8)
    for _ in range(300):
        damaged = coded.copy()
        for _ in range(rng.integers(1, 40)):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        CODEC.decode(damaged[: rng.integers(len(damaged) + 1)], guarded[64:-64])
        assert (guarded[:64] == 0xA5).all()
        assert (guarded[-64:] == 0xA5).all()
    for length in (0, MORE_BYTES - 1, MORE_BYTES, len(coded) // 2, len(coded) - 1):
        assert not CODEC.decode(coded[:length], block.copy())
    coded[0] = 3  # no numbers have three bytes
    assert not CODEC.decode(coded, block.copy())


def test_settings_name_a_codec_or_none() -> None:
    codec = open_codec("lossless")
    assert codec is not None
    assert codec.name == CODEC.name
    assert open_codec("none") is None
