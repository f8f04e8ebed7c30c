"""KV in four bits: as the definition says, never further off than half a level, and not changed by
being quantised again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.kv.spec import KVHeads, KVSpec
from kvrelay.kvtransfer.kivi import Quantizer, why_exact

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
DTYPES = ("bfloat16", "float32")


def spec_of(dtype: str, **changes: int) -> KVSpec:
    fields = {name: getattr(SPEC, name) for name in ("num_layers", "num_kv_heads", "head_dim")}
    return KVSpec(**(fields | {"block_size": 16, "dtype": dtype} | changes))


def block_of(spec: KVSpec, seed: int, size: float = 1.0, centre: float = 0.0) -> torch.Tensor:
    """`[num_layers, 2, num_kv_heads, block_size, head_dim]`, each channel of a size of its own."""
    rng = torch.Generator().manual_seed(seed)
    shape = spec.num_layers, 2, spec.num_kv_heads, spec.block_size, spec.head_dim
    sizes = torch.randn(spec.head_dim, generator=rng).exp() * size
    noise = torch.randn(shape, generator=rng) * sizes + centre
    return noise.to(getattr(torch, spec.dtype))


def as_bytes(block: torch.Tensor) -> np.ndarray:
    return block.contiguous().view(torch.uint8).reshape(-1).numpy()


def to_and_fro(quantizer: Quantizer, block: torch.Tensor) -> torch.Tensor:
    coded = np.full(quantizer.num_bytes, 0xA5, np.uint8)
    assert quantizer.encode(as_bytes(block), coded)
    back = torch.zeros_like(block)
    quantizer.decode(coded, as_bytes(back))
    return back


def by_definition(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes back, and the step between two levels of each number's group."""
    wide, out, steps = block.double(), torch.empty_like(block), []
    for plane, (axis, size) in enumerate(((-2, 16), (-1, 32))):  # tokens; channels
        back, step = [], []
        for group in torch.split(wide[:, plane], size, axis):
            least, largest = group.amin(axis, keepdim=True), group.amax(axis, keepdim=True)
            span = (largest - least).clamp_min(1e-300)
            level = ((group - least) * 15 / span + 0.5).floor().clamp(0, 15)
            back.append((least * (15 - level) + largest * level) / 15)
            step.append((span / 15).expand_as(group))
        out[:, plane] = torch.cat(back, axis).to(block.dtype)
        steps.append(torch.cat(step, axis))
    return out, torch.stack(steps, 1)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_tokens=st.sampled_from([1, 8, 16, 24, 40]),
    head_dim=st.sampled_from([8, 32, 64, 80, 256]),
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    centre=st.sampled_from([0.0, 1.0, -300.0]),
)
def test_a_block_comes_back_as_the_definition_says(
    dtype: str, num_tokens: int, head_dim: int, seed: int, size: float, centre: float
) -> None:
    spec = spec_of(dtype, block_size=num_tokens, head_dim=head_dim)
    quantizer, block = Quantizer(spec, spec.num_kv_heads), block_of(spec, seed, size, centre)
    back = to_and_fro(quantizer, block)
    expected, step = by_definition(block)
    # A number halfway between two levels may go to either: arithmetic is not in double there.
    off = (expected.double() - block.double()).abs()
    largest = torch.maximum(block.double().abs(), back.double().abs())
    rounding = largest * (2.0**-8 if dtype == "bfloat16" else 1e-6)
    error = (back.double() - block.double()).abs()
    assert (error <= step * 0.501 + rounding + 1e-37).all()
    assert (
        (error - off).abs()[back != expected] <= (step * 0.002 + rounding)[back != expected]
    ).all()
    assert torch.equal(to_and_fro(quantizer, back), back)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ten_times_quantised_is_once_quantised(dtype: str) -> None:
    """Numbers of which a group has few that are different, too: their levels lie closer than the
    numbers that bfloat16 has."""
    quantizer = Quantizer(spec_of(dtype), SPEC.num_kv_heads)
    for seed, size in enumerate((1.0, 1e-2, 3e-3, 1e-3, 1e-4)):
        once = to_and_fro(quantizer, block_of(spec_of(dtype), seed, size, centre=1.0))
        again = once
        for _ in range(9):
            again = to_and_fro(quantizer, again)
        assert torch.equal(again, once), size


def test_equal_numbers_come_back_as_they_were() -> None:
    quantizer = Quantizer(SPEC, SPEC.num_kv_heads)
    for value in (0.0, 1.0, -3.25, 1e30, -1e-38):
        block = torch.full_like(block_of(SPEC, 0), value)
        assert torch.equal(to_and_fro(quantizer, block), block), value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
@pytest.mark.parametrize("place", [(0, 0, 0, 0, 0), (1, 1, 1, 7, 40), (2, 1, 1, 15, 63)])
def test_what_cannot_be_computed_with_is_refused(value: float, place: tuple[int, ...]) -> None:
    block = block_of(SPEC, 0)
    block[place] = value
    quantizer = Quantizer(SPEC, SPEC.num_kv_heads)
    assert not quantizer.encode(as_bytes(block), np.zeros(quantizer.num_bytes, np.uint8))


def test_any_bytes_are_decoded_to_a_whole_block() -> None:
    quantizer = Quantizer(SPEC, SPEC.num_kv_heads)
    rng = np.random.default_rng(0)
    for _ in range(20):
        block = np.full(SPEC.bytes_per_block + 8, 0xA5, np.uint8)
        quantizer.decode(rng.integers(0, 256, quantizer.num_bytes, np.uint8), block[:-8])
        assert (block[-8:] == 0xA5).all()


def test_a_ranks_heads_are_quantised_as_in_the_whole_block() -> None:
    block = block_of(SPEC, 3)
    whole = to_and_fro(Quantizer(SPEC, 2), block)
    for head in range(2):
        own = block[:, :, head : head + 1].contiguous()
        assert torch.equal(to_and_fro(Quantizer(SPEC, 1), own), whole[:, :, head : head + 1])


@pytest.mark.parametrize(("dtype", "ratio"), [("bfloat16", 2.9), ("float32", 4.5)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_it_takes_five_and_a_half_bits(dtype: str, ratio: float, head_dim: int) -> None:
    spec = spec_of(dtype, head_dim=head_dim)
    assert spec.bytes_per_block / Quantizer(spec, spec.num_kv_heads).num_bytes > ratio


def test_some_shapes_stay_exact() -> None:
    assert why_exact(SPEC) is None
    for exact in (
        spec_of("float8_e4m3"),
        spec_of("float16"),
        spec_of("bfloat16", num_planes=1),
        spec_of("bfloat16", num_state_groups=1),
        spec_of("bfloat16", block_size=1, head_dim=20),
        KVSpec(1, 2, 64, 16, "bfloat16", num_planes=1, heads=(KVHeads(2, 32, 32),)),
    ):
        assert why_exact(exact) is not None, exact
