"""FlashInfer beside Triton at the start: on a few blocks of random numbers, before any token.

FlashInfer compiles or loads a kernel when it is first called, and whether it has one for a model's
shape and this GPU shows only then. A kind of call that fails here, or whose results are not those
of Triton's kernels, stays with Triton, and a notice says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.gpu import experts as mixture
from kvrelay.engine.model.gpu.flashinfer.experts import fuse
from kvrelay.engine.model.gpu.ops import TritonOps

TOLERANCE = 0.05  # relative to normally distributed numbers, in 16 bits
LENGTHS = {  # (query_len, context_len) of each sequence, by kind of call
    "decodes": ((1, 1), (1, 19), (1, 70)),
    "prompts": ((37, 37), (5, 70), (1, 20)),
    "latent_prompts": ((40, 40), (1, 20), (30, 31)),
}


def fault(
    ops: TritonOps,
    kind: str,
    layers: Sequence[int],
    config: ModelConfig,
    pool: torch.Tensor,
    dtype: torch.dtype,
) -> str:
    """Why FlashInfer must not be used for `kind`, which it computes in `layers` of `ops`; "": it
    may. `ops` is left with another pool than `pool`, which gives the shape of blocks. Whatever the
    library raises is a reason."""
    batch, num_blocks = trial_batch(LENGTHS[kind], pool.shape[4], pool.device)
    small = torch.randn((num_blocks, *pool.shape[1:]), device=pool.device).to(dtype)
    ops.use_pool(small)
    triton = TritonOps(config, small, dtype, 1)
    triton.begin(batch)

    def results() -> list[tuple[torch.Tensor, torch.Tensor]]:
        ops.begin(batch)
        return _results(ops, triton, layers, config, small, len(batch.tokens))

    return _fault_of(results)


def experts_fault(
    library: Any, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> str:
    """As `fault`, of two experts of the model's sizes."""
    assert config.experts is not None
    hidden, width, num_tokens = config.hidden_size, config.experts.intermediate_size, 9
    like = torch.empty(0, dtype=dtype, device=device)
    gate_ups = _randn(like, 2, 2 * width, hidden) * hidden**-0.5
    downs = _randn(like, 2, hidden, width) * width**-0.5
    x = _randn(like, num_tokens, hidden)
    num_chosen = min(2, config.experts.num_per_token)
    chosen = torch.arange(num_tokens * num_chosen, device=device).view(num_tokens, -1) % 2
    weights = torch.full(chosen.shape, 1 / num_chosen, device=device)
    ours, theirs = torch.zeros_like(x), torch.zeros_like(x)

    def results() -> list[tuple[torch.Tensor, torch.Tensor]]:
        fuse(gate_ups, downs).add(library, ours, x, chosen, weights)
        stacked = mixture.ExpertWeights(gate_ups, downs)
        mixture.add_experts(theirs, x, stacked, chosen, weights, config.activation)
        return [(ours, theirs)]

    return _fault_of(results)


def _fault_of(results: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]) -> str:
    try:
        differences = [
            (ours.float() - theirs.float()).abs().max().item() for ours, theirs in results()
        ]
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"
    if all(each <= TOLERANCE for each in differences):  # not so for NaN
        return ""
    return f"results differ from those of Triton's kernels by {max(differences):.3g}"


def _results(
    ops: TritonOps,
    triton: TritonOps,
    layers: Sequence[int],
    config: ModelConfig,
    like: torch.Tensor,
    num_tokens: int,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(FlashInfer's, Triton's) of one layer of each window, of numbers like those of `like`."""
    heads, latent = config.num_heads, config.latent
    if latent is not None:
        scale = latent.rank**-0.5
        queries = _randn(like, num_tokens, heads, latent.nope_dim + latent.rope_dim)
        q_rope = queries[:, :, latent.nope_dim :].contiguous()
        key_up = _randn(like, heads, latent.nope_dim, latent.rank) * scale
        value_up = _randn(like, heads, latent.rank, latent.value_dim) * scale
        absorbed = triton.per_head(queries[:, :, : latent.nope_dim], key_up)
        mixed = triton.latent_attention(torch.cat((absorbed, q_rope), dim=-1), 0)
        expanded = ops.expanded_attention(queries, q_rope, key_up, value_up, 0)
        assert expanded is not None
        return [(expanded, triton.per_head(mixed, value_up))]
    qkv = _randn(like, num_tokens, (heads + 2 * config.num_kv_heads) * config.head_dim)
    each = {config.window(layer): layer for layer in layers}.values()
    return [(ops.attention(qkv, layer), triton.attention(qkv, layer)) for layer in each]


def _randn(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Draws numbers with the dtype and on the device of `like`."""
    return torch.randn(shape, device=like.device).to(like.dtype)


def trial_batch(
    lengths: Sequence[tuple[int, int]], block_size: int, device: torch.device
) -> tuple[Batch, int]:
    """Sequences of these (query_len, context_len) in scattered blocks, and how many blocks there
    are. There are no slots, and no token is sampled."""
    pages = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)) + 1
    tables = torch.zeros((len(lengths), max(pages)), dtype=torch.int32)
    for row, blocks in zip(tables, order.split(pages), strict=True):
        row[: len(blocks)] = blocks
    counts = [count for count, _ in lengths]
    spans = [(sum(counts[:seq]), *each) for seq, each in enumerate(lengths)]
    columns = torch.tensor(spans, dtype=torch.int32).T.contiguous().to(device)
    none = torch.zeros(sum(counts), dtype=torch.int64, device=device)
    batch = Batch(
        tokens=none,
        positions=none,
        slots=none,
        query_start=columns[0],
        query_len=columns[1],
        context_len=columns[2],
        block_tables=tables.to(device),
        sample_rows=none[:0],
        spans=tuple(spans),
    )
    return batch, sum(pages) + 1
