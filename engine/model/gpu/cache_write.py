"""Between projection and attention, in one kernel: norms of queries and keys, rotary
embedding, and the write of keys and values to the KV pool.

Results are rounded where the reference rounds them, so that the pool holds the same numbers. FP8 is
encoded with integer arithmetic: the same bytes on every device and in the interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.engine.model.gpu.cache_pool import Pool

HEADS = 8  # a program writes


def rope_write(
    qkv: torch.Tensor,
    pool: Pool,
    layer: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    writes: bool = True,
    value_norm: bool = False,
    eps: float = 0.0,
    sink_queries: torch.Tensor | None = None,
    sink_position: int = 0,
) -> None:
    """qkv [N, (num_heads + num_kv_heads) * head_dim + num_kv_heads * value_dim], rows contiguous:
    queries are normed and rotated in place; keys, normed and rotated, and values go to the pool
    only.

    positions, slots: [N] int64; a slot below zero is not written (padding of a captured step).
    tables: cos and sin, float32 [max_positions, rope.dim / 2]; None: the layer does not rotate.
    Dimensions of a head past rope.dim are left as they are. norms: of queries and keys, each
    [head_dim]. value_norm: values are normed too, without a weight. writes: False if rows have
    queries alone. sink_queries [N, num_heads * head_dim], for layers with a window and sinks: the
    queries rotated as if at min(position, sink_position); sink_position is window + num_sinks - 1.
    For an FP8 pool queries and keys are at last multiplied by a Hadamard matrix (`fp8.hadamard`):
    the dimensions that are rotated, or all where none is.
    """
    half = pool.head_dim // 2 if tables is None else tables[0].shape[1]
    rest = pool.head_dim - 2 * half
    num_kv_heads = pool.num_kv_heads if writes else 0
    chunks = triton.cdiv(num_heads + 2 * num_kv_heads, HEADS)
    assert norms is not None or not value_norm
    assert qkv.stride(1) == 1
    assert sink_queries is None or (sink_queries.is_contiguous() and tables is not None)
    if not len(qkv):
        return
    _rope_write[(len(qkv), chunks)](
        qkv, sink_queries, pool.data, positions, slots,
        *(tables or (None, None)), *(norms or (None, None)), pool.layer_offset(layer),
        QKV_STRIDE=qkv.stride(0), NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=pool.head_dim, VALUE_DIM=pool.value_dim, HALF=half, HEADS=HEADS, EPS=eps,
        NORM=norms is not None, VALUE_NORM=value_norm,
        ROTATE=tables is not None, SINK_POSITION=-1 if sink_queries is None else sink_position,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
        HADAMARD_BLOCK=half & -half, **pool.constants, num_warps=4,
    )  # fmt: skip


def latent_write(
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    pool: Pool,
    layer: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Multi-head latent attention. q_rope [N, num_heads, rope_dim], its last dimension contiguous,
    is rotated in place; latent [N, rank + rope_dim], rows contiguous, is rotated behind `rank` and
    written to the pool (one plane, one KV head). The rest as in `rope_write`."""
    num_heads, rope_dim = q_rope.shape[1:]
    rank = pool.head_dim - rope_dim
    assert q_rope.stride(2) == latent.stride(1) == 1
    assert tables[0].shape[1] * 2 == rope_dim
    if not len(q_rope):
        return
    _latent_write[(len(q_rope), 1 + triton.cdiv(num_heads, HEADS))](
        q_rope, latent, pool.data, positions, slots, *tables, pool.layer_offset(layer),
        TOKEN_STRIDE=q_rope.stride(0), Q_HEAD_STRIDE=q_rope.stride(1),
        LATENT_STRIDE=latent.stride(0), NUM_HEADS=num_heads, HEADS=HEADS,
        RANK=rank, HALF=rope_dim // 2, BLOCK_RANK=triton.next_power_of_2(rank),
        BLOCK_HALF=triton.next_power_of_2(rope_dim // 2), **pool.constants, num_warps=4,
    )  # fmt: skip


@triton.jit
def _scale_byte(largest):
    """Returns E8M0 of the smallest power of two with largest / 2**e <= 448 (1.75 * 2**8)."""
    bits = largest.to(tl.int32, bitcast=True)
    byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    byte = tl.minimum(tl.maximum(byte, 1), 253)
    return tl.where(largest == 0.0, 127, byte)


@triton.jit
def e4m3(x, byte):
    """x / 2**(byte - 127), within 448, to the nearest e4m3, ties to even: its byte."""
    scaled = x * ((254 - byte) << 23).to(tl.float32, bitcast=True)
    bits = scaled.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448.0; the order of bits is that of numbers
    # Three bits of mantissa stay, and the exponent's bias of 127 becomes 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2**-6 steps are 2**-9. Adding 2**23 leaves no bits behind the point: it rounds.
    steps = size.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
    subnormal = steps.to(tl.int32, bitcast=True) - 0x4B000000
    number = tl.where(size < 0x3C800000, subnormal, normal)
    return (number | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _normed(x, scale, q_norm, k_norm, at, inside, is_query, is_key, is_plain):
    """A part of some heads, [heads, part], normed where they are queries or keys, or `is_plain`:
    without a weight."""
    kind: tl.constexpr = q_norm.dtype.element_ty
    weight = tl.load(q_norm + at, mask=inside & is_query, other=0.0).to(tl.float32)
    weight += tl.load(k_norm + at, mask=inside & is_key, other=0.0).to(tl.float32)
    weight += is_plain.to(tl.float32)
    normed = ((x * scale).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
    return tl.where(is_query | is_key | is_plain, normed, x)


@triton.jit
def _rotated(first, second, cos, sin, at, inside):
    """Both halves of some heads, rotated by the angles of one position."""
    c = tl.load(cos + at, mask=inside, other=1.0)[None, :]
    s = tl.load(sin + at, mask=inside, other=0.0)[None, :]
    return first * c - second * s, second * c + first * s


@triton.jit
def _hadamard(x, HEADS: tl.constexpr, WIDTH: tl.constexpr, HADAMARD_BLOCK: tl.constexpr):
    """x [HEADS, WIDTH], each HADAMARD_BLOCK numbers (a power of two) times a Hadamard matrix:
    pairs of neighbours become sums, which move to the front, and differences, once for each
    bit."""
    bits: tl.constexpr = HADAMARD_BLOCK.bit_length() - 1
    for _ in tl.static_range(bits):
        first, second = tl.split(x.reshape(HEADS, WIDTH // HADAMARD_BLOCK, HADAMARD_BLOCK // 2, 2))
        x = tl.join(first + second, first - second).permute(0, 1, 3, 2).reshape(HEADS, WIDTH)
    return x


@triton.jit
def _hadamard_pair(x, y, HEADS: tl.constexpr, WIDTH: tl.constexpr, HADAMARD_BLOCK: tl.constexpr):
    """As `fp8.hadamard`, both halves of some heads, [HEADS, WIDTH] each."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    x, y = _hadamard(x, HEADS, WIDTH, HADAMARD_BLOCK), _hadamard(y, HEADS, WIDTH, HADAMARD_BLOCK)
    return x + y, x - y


@triton.jit
def _put(
    head, offset, x, y, z, x_at, y_at, z_at, in_half, in_other, rests, dim,
    BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Write token `offset` of a block for some heads, which begin at `head` [heads, 1]: three parts
    x, y, z, [heads, part] each, to the columns x_at, y_at, z_at of `dim`."""
    to = head + offset * dim
    if FP8:
        x, y, z = x.to(tl.float32), y.to(tl.float32), z.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
        byte = _scale_byte(tl.maximum(largest, tl.max(tl.abs(z), 1)))[:, None]
        is_written = tl.max(in_half.to(tl.int32), 1)[:, None] > 0
        tl.store(head + BLOCK_SIZE * dim + offset, byte.to(tl.uint8), mask=is_written)
        tl.store(to + x_at, e4m3(x, byte), mask=in_half)
        tl.store(to + y_at, e4m3(y, byte), mask=in_other)
        tl.store(to + z_at, e4m3(z, byte), mask=rests)
    else:
        tl.store(to + x_at, x, mask=in_half)
        tl.store(to + y_at, y, mask=in_other)
        tl.store(to + z_at, z, mask=rests)


@triton.jit
def _rope_write(
    qkv, sink_queries, pool, positions, slots, cos, sin, q_norm, k_norm, layer_offset,
    QKV_STRIDE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    EPS: tl.constexpr, NORM: tl.constexpr, VALUE_NORM: tl.constexpr, ROTATE: tl.constexpr,
    SINK_POSITION: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    PLANE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr, HADAMARD_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: HEADS heads of a token. A head is three parts: both rotated halves, the rest."""
    token = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = qkv.dtype.element_ty
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    half, rest = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_REST)
    x_at, y_at, z_at = half[None, :], HALF + half[None, :], 2 * HALF + rest[None, :]
    is_query = heads < NUM_HEADS
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    dim = HEAD_DIM
    if VALUE_DIM != HEAD_DIM:  # a value may end within any of the three parts
        dim = tl.where(is_value, VALUE_DIM, HEAD_DIM)
    is_head = heads < NUM_HEADS + 2 * NUM_KV_HEADS
    in_half, rests = is_head & (x_at < HALF) & (x_at < dim), is_head & (z_at < dim)
    in_other = is_head & (x_at < HALF) & (y_at < dim)
    values = tl.where(is_value, heads - NUM_HEADS - NUM_KV_HEADS, 0)
    at = qkv + token * QKV_STRIDE + heads * HEAD_DIM - values * (HEAD_DIM - VALUE_DIM)
    x = tl.load(at + x_at, mask=in_half, other=0.0).to(tl.float32)
    y = tl.load(at + y_at, mask=in_other, other=0.0).to(tl.float32)
    z = tl.load(at + z_at, mask=rests, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(x * x, 1) + tl.sum(y * y, 1) + tl.sum(z * z, 1)
        scale = tl.rsqrt(square[:, None] / dim + EPS)
        plain = is_value & VALUE_NORM
        x = _normed(x, scale, q_norm, k_norm, x_at, in_half, is_query, is_key, plain)
        y = _normed(y, scale, q_norm, k_norm, y_at, in_other, is_query, is_key, plain)
        z = _normed(z, scale, q_norm, k_norm, z_at, rests, is_query, is_key, plain)
        tl.store(at + z_at, z.to(kind), mask=rests & is_query)
    position = tl.load(positions + token)
    if SINK_POSITION >= 0:
        seen = tl.minimum(position, SINK_POSITION)
        sx, sy = _rotated(x, y, cos, sin, seen * HALF + half, half < HALF)
        if FP8:
            sx, sy = _hadamard_pair(sx.to(kind), sy.to(kind), HEADS, BLOCK_HALF, HADAMARD_BLOCK)
        to = sink_queries + (token * NUM_HEADS + heads) * HEAD_DIM
        tl.store(to + x_at, sx.to(kind), mask=in_half & is_query)
        tl.store(to + y_at, sy.to(kind), mask=in_half & is_query)
        tl.store(to + z_at, z.to(kind), mask=rests & is_query)
    if ROTATE:
        rx, ry = _rotated(x, y, cos, sin, position * HALF + half, half < HALF)
        x, y = tl.where(is_value, x, rx), tl.where(is_value, y, ry)
    x, y, z = x.to(kind), y.to(kind), z.to(kind)
    if FP8:
        mx, my = _hadamard_pair(x, y, HEADS, BLOCK_HALF, HADAMARD_BLOCK)
        part = tl.where(is_key, 0.5 / HADAMARD_BLOCK, 1.0)
        x = tl.where(is_value, x, (mx * part).to(kind))
        y = tl.where(is_value, y, (my * part).to(kind))
    tl.store(at + x_at, x, mask=in_half & is_query)
    tl.store(at + y_at, y, mask=in_half & is_query)
    slot = tl.load(slots + token + tl.zeros((1, 1), dtype=tl.int32)).to(tl.int64)  # [1, 1]
    plane = is_value.to(tl.int32) * PLANE_STRIDE
    kv_head = heads - NUM_HEADS - is_value.to(tl.int32) * NUM_KV_HEADS
    head = pool + layer_offset + slot // BLOCK_SIZE * BLOCK_STRIDE + plane + kv_head * HEAD_STRIDE
    written = (is_key | is_value) & (slot >= 0)
    _put(head, slot % BLOCK_SIZE, x, y, z, x_at, y_at, z_at, in_half & written, in_other & written,
         rests & written, dim, BLOCK_SIZE, FP8)  # fmt: skip


@triton.jit
def _latent_write(
    q_rope, latent, pool, positions, slots, cos, sin, layer_offset,
    TOKEN_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr, LATENT_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    PLANE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """One program: a token's latent, or HEADS of its queries."""
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind: tl.constexpr = latent.dtype.element_ty
    half = tl.arange(0, BLOCK_HALF)
    x_at, y_at = half[None, :], HALF + half[None, :]
    angles = tl.load(positions + token) * HALF + half
    if chunk == 0:
        z_at = tl.arange(0, BLOCK_RANK)[None, :]
        in_half, rests = x_at < HALF, z_at < RANK
        row = latent + token * LATENT_STRIDE
        z = tl.load(row + z_at, mask=rests, other=0.0)
        x = tl.load(row + RANK + x_at, mask=in_half, other=0.0).to(tl.float32)
        y = tl.load(row + RANK + y_at, mask=in_half, other=0.0).to(tl.float32)
        x, y = _rotated(x, y, cos, sin, angles, half < HALF)
        slot = tl.load(slots + token + tl.zeros((1, 1), dtype=tl.int32)).to(tl.int64)  # [1, 1]
        head = pool + layer_offset + slot // BLOCK_SIZE * BLOCK_STRIDE
        in_half, rests = in_half & (slot >= 0), rests & (slot >= 0)
        _put(head, slot % BLOCK_SIZE, x.to(kind), y.to(kind), z, RANK + x_at, RANK + y_at, z_at,
             in_half, in_half, rests, RANK + 2 * HALF, BLOCK_SIZE, FP8)  # fmt: skip
    else:
        heads = ((chunk - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        inside = (heads < NUM_HEADS) & (x_at < HALF)
        at = q_rope + token * TOKEN_STRIDE + heads * Q_HEAD_STRIDE
        qx = tl.load(at + x_at, mask=inside, other=0.0).to(tl.float32)
        qy = tl.load(at + y_at, mask=inside, other=0.0).to(tl.float32)
        qx, qy = _rotated(qx, qy, cos, sin, angles, half < HALF)
        tl.store(at + x_at, qx.to(kind), mask=inside)
        tl.store(at + y_at, qy.to(kind), mask=inside)
