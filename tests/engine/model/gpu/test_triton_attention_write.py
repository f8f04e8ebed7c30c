"""The kernel between projection and attention: norms, rotation, and what the pool then holds."""

import pytest
import torch

from kvrelay.engine.model import fp8
from tests.engine.model.paged import DEVICE

pytest.importorskip("triton")

from kvrelay.engine.model.gpu import cache_write
from kvrelay.engine.model.gpu.cache_pool import Pool
from kvrelay.engine.model.gpu.cache_write import latent_write, rope_write

POSITIONS = torch.tensor([0, 3, 90, 17, 64])
SLOTS = torch.tensor([5, 33, 0, -1, 47])


def rotated(x, cos, sin, positions):
    """x [N, heads, head_dim]: the first 2 * cos.shape[1] dimensions turned, in halves."""
    half = cos.shape[1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[positions][:, None], sin[positions][:, None]
    return torch.cat((a * c - b * s, b * c + a * s, rest), -1)


def tables(half):
    angles = torch.outer(torch.arange(100.0), 1.0 / 50.0 ** (torch.arange(half) / half))
    return angles.cos(), angles.sin()


def normed(x, weight):
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


def empty_pool(shape, head_dim, block_size, kv_fp8):
    if kv_fp8:
        data = torch.full((*shape, block_size * (head_dim + 1)), 0x7F, dtype=torch.uint8)
    else:
        data = torch.full((*shape, block_size, head_dim), float("nan"))
    return Pool(data.to(DEVICE), head_dim)


def check_pool(pool, layer, written, block_size, kv_fp8):
    """written [N, planes, kv_heads, head_dim]: what slots hold; everything else is untouched."""
    kept, slots = SLOTS >= 0, SLOTS[SLOTS >= 0]
    block, offset = slots // block_size, slots % block_size
    data = pool.data.cpu()
    if kv_fp8:
        numbers, scales = fp8.parts(data, pool.head_dim)
        expected_numbers, expected_scales = fp8.encode(written[kept])
        # Rotations differ in their last bit, so now and then a number is the next one.
        differs = numbers[block, layer, :, :, offset] != expected_numbers
        assert differs.float().mean() < 0.01
        assert (scales[block, layer, :, :, offset] == expected_scales).all()
        touched = (data[:, layer] != 0x7F).sum()
        assert touched <= written[kept].numel() + expected_scales.numel()
        assert (data[:, 1 - layer] == 0x7F).all()
        return
    found = data[block, layer, :, :, offset]
    torch.testing.assert_close(found, written[kept], rtol=1e-5, atol=1e-5)
    assert data.isnan().sum() == data.numel() - written[kept].numel()


@pytest.mark.parametrize(
    ("heads", "head_dim", "half", "with_norm", "sinks", "kv_fp8"),
    [
        (2, 32, 16, True, False, False),
        (2, 24, 8, True, True, True),
        (2, 32, 0, False, False, False),
        (9, 48, 24, False, True, True),
        (4, 64, 32, False, False, True),
        (2, 32, 0, False, False, True),
        (2, 40, 15, True, False, True),
    ],
)
def test_queries_are_turned_and_keys_and_values_written(
    heads, head_dim, half, with_norm, sinks, kv_fp8
):
    torch.manual_seed(0)
    kv_heads, block_size = 3, 16
    qkv = torch.randn(5, heads + 2 * kv_heads, head_dim) * 3
    norms = (torch.rand(head_dim), torch.rand(head_dim)) if with_norm else None
    angles = tables(half) if half else None
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    if norms:
        q, k = normed(q, norms[0]), normed(k, norms[1])
    late = None
    if angles:
        late = rotated(q, *angles, POSITIONS.clamp(max=20))
        q, k = rotated(q, *angles, POSITIONS), rotated(k, *angles, POSITIONS)
    if kv_fp8:
        mixed = half or head_dim // 2
        q, k = fp8.hadamard(q, mixed), fp8.hadamard_inverse(k, mixed)
        late = None if late is None else fp8.hadamard(late, mixed)
    pool = empty_pool((3, 2, 2, kv_heads), head_dim, block_size, kv_fp8)
    given = qkv.flatten(1).to(DEVICE)
    sink_queries = torch.empty(5, heads * head_dim, device=DEVICE) if sinks else None
    rope_write(
        given, pool, 1, POSITIONS.to(DEVICE), SLOTS.to(DEVICE),
        angles and tuple(t.to(DEVICE) for t in angles), num_heads=heads,
        norms=norms and tuple(t.to(DEVICE) for t in norms), eps=1e-5,
        sink_queries=sink_queries, sink_position=20,
    )  # fmt: skip
    found = given.cpu().view_as(qkv)
    torch.testing.assert_close(found[:, :heads], q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[:, heads:], qkv[:, heads:], rtol=0, atol=0)
    if sinks:
        torch.testing.assert_close(sink_queries.cpu().view_as(late), late, rtol=1e-5, atol=1e-5)
    check_pool(pool, 1, torch.stack((k, v), 1), block_size, kv_fp8)


@pytest.mark.parametrize("kv_fp8", [False, True])
def test_latents_are_turned_behind_their_rank(kv_fp8):
    torch.manual_seed(0)
    rank, rope_dim, heads = 48, 16, 9
    angles = tables(rope_dim // 2)
    latent = torch.randn(5, rank + rope_dim)
    absorbed = torch.randn(5, heads, 24 + rope_dim)  # whose last part is turned
    turned = rotated(latent[:, None, rank:], *angles, POSITIONS)
    expected_q = rotated(absorbed[..., 24:], *angles, POSITIONS)
    pool = empty_pool((3, 2, 1, 1), rank + rope_dim, 16, kv_fp8)
    given = absorbed.to(DEVICE)
    latent_write(
        given[..., 24:], latent.to(DEVICE), pool, 1, POSITIONS.to(DEVICE), SLOTS.to(DEVICE),
        tuple(t.to(DEVICE) for t in angles),
    )  # fmt: skip
    torch.testing.assert_close(given[..., 24:].cpu(), expected_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(given[..., :24].cpu(), absorbed[..., :24], rtol=0, atol=0)
    written = torch.cat((latent[:, None, :rank], turned), -1)[:, None]
    check_pool(pool, 1, written, 16, kv_fp8)


def test_fp8_bytes_are_the_reference_s_bit_for_bit(monkeypatch):
    """Every kind of number: ties, subnormals, both bounds, zeros, all magnitudes."""
    monkeypatch.setattr(cache_write, "HEADS", 128)
    torch.manual_seed(0)
    kv_heads, head_dim = 32, 64
    sizes = torch.logspace(-44, 36, 96)  # dimensions of a key are summed
    rows = torch.randn(96, head_dim) * sizes[:, None]
    rows[0] = 0.0
    rows[1] = torch.arange(-32.0, 32.0) / 512 * 0.5  # steps and ties of subnormals
    rows[1, 0] = 448.0
    rows[2] = torch.arange(64) * 0.0625 + 16.0  # ties of normals
    rows[2, 1] = -448.0
    rows[3] = 448.0000305
    rows[4] = -0.0
    heads = rows.view(3, kv_heads, head_dim)
    pool = empty_pool((1, 1, 2, kv_heads), head_dim, 16, True)
    qkv = torch.cat((heads[:, :1], heads, heads.flip(2)), 1).flatten(1).to(DEVICE)
    every = torch.arange(3, device=DEVICE)
    rope_write(qkv, pool, 0, every, every, None, num_heads=1)
    found, found_scales = fp8.parts(pool.data.cpu()[0, 0], head_dim)
    for plane, kept in ((0, fp8.hadamard_inverse(heads, head_dim // 2)), (1, heads.flip(2))):
        expected, expected_scales = fp8.encode(kept)
        assert (found[plane, :, :3].transpose(0, 1) == expected).all()
        assert (expected_scales == found_scales[plane, :, :3].T).all()
