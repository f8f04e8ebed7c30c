"""Prompts of multi-head latent attention with keys and values expanded from the cached latents.

In the latents' space a query and a key have rank + rope_dim numbers, expanded only nope_dim +
rope_dim, and values value_dim instead of rank: 320 multiplications for each pair instead of 1,088
with DeepSeek-V3's sizes. Expanding costs rank * (nope_dim + value_dim) for each cached token, so it
pays where many queries share a context: for whole prompts always, for short chunks behind a long
prefix not. Decodes, and what does not fit the buffers, stay absorbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import Latent, ModelConfig
from kvrelay.engine.model.gpu.cache_pool import Pool
from kvrelay.engine.model.gpu.flashinfer.attention import split_bytes, starts
from kvrelay.engine.model.gpu.flashinfer.library import capability
from kvrelay.engine.model.gpu.staging import to_device

EXPANDED_BYTES = 512 << 20  # keys and values of one layer, at most; of a step's expanded contexts
HOPPER = 9


def is_worth_it(latent: Latent, count: int, context: int) -> bool:
    """Whether expanding `context` tokens for `count` queries, the last ones, takes fewer
    multiplications than attending in the latents' space. There, too, each query passes matrices as
    large as those that expand a token."""
    pairs = count * context - count * (count - 1) // 2
    saved = 2 * latent.rank - latent.nope_dim - latent.value_dim
    matrices = latent.rank * (latent.nope_dim + latent.value_dim)
    return count > 1 and pairs * saved > (context - count) * matrices


class ExpandedAttention:
    """Owned by FlashInferOps. The buffers are allocated once, so that they are there when the
    memory for KV is measured; a layer's keys and values are gone with the next layer's."""

    def __init__(
        self,
        library: Any,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
    ) -> None:
        latent = config.latent
        assert latent is not None
        self._config, self._latent, self._dtype, self._device = config, latent, dtype, device
        key_dim = latent.nope_dim + latent.rope_dim
        per_token = config.num_heads * (key_dim + latent.value_dim) * dtype.itemsize
        self.max_tokens = min(max_positions, EXPANDED_BYTES // per_token)
        shape = (config.num_heads, self.max_tokens)
        self._keys = torch.empty((*shape, key_dim), dtype=dtype, device=device)
        self._values = torch.empty((*shape, latent.value_dim), dtype=dtype, device=device)
        workspace = torch.empty(
            split_bytes(config, latent.value_dim, device), dtype=torch.uint8, device=device
        )
        # Named, since others that it might choose by itself have not been read for strides.
        self._wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(
            workspace, kv_layout="NHD", backend="fa3" if capability(device)[0] == HOPPER else "fa2"
        )
        self._num_tokens = 0  # in the contexts that this step expands
        self._slots = self._rows = torch.empty(0, dtype=torch.int64, device=device)
        self._are_all = False  # all rows of the step are expanded

    @property
    def is_used(self) -> bool:
        """Whether this step expands any context."""
        return self._num_tokens > 0

    def begin(self, batch: Batch, pool: Pool) -> frozenset[int]:
        """Plans the step; the sequences that are expanded."""
        spans, chosen, room = batch.spans, [], self.max_tokens
        for seq, (_, count, context) in enumerate(spans):
            if context <= room and is_worth_it(self._latent, count, context):
                chosen.append(seq)
                room -= context
        self._num_tokens = self.max_tokens - room
        if not chosen:
            return frozenset()
        own = [spans[seq] for seq in chosen]
        self._are_all = len(chosen) == len(spans)
        rows = np.concatenate([np.arange(first, first + count) for first, count, _ in own])
        positions = np.concatenate([np.arange(context) for _, _, context in own])
        seqs = np.array(chosen).repeat([context for _, _, context in own])
        entries = seqs * batch.block_tables.shape[1] + positions // pool.block_size
        there = to_device(
            np.concatenate((entries, positions % pool.block_size, rows)).astype(np.int64),
            self._device,
        )
        entries_there, offsets, self._rows = there.split([len(seqs), len(seqs), len(rows)])
        blocks = batch.block_tables.reshape(-1).index_select(0, entries_there).long()
        self._slots = blocks * pool.block_size + offsets
        self._plan([count for _, count, _ in own], [context for _, _, context in own])
        return frozenset(chosen)

    def attention(
        self,
        queries: torch.Tensor,
        q_rope: torch.Tensor,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        pool: Pool,
        layer: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the step's expanded rows [n, num_heads, value_dim], and which rows of the step
        they are, None: all. queries [N, num_heads, nope_dim + rope_dim], whose last part is
        overwritten with q_rope [N, num_heads, rope_dim], rotated; key_up [num_heads, nope_dim,
        rank], value_up [num_heads, rank, value_dim]."""
        latent, rows = self._latent, None if self._are_all else self._rows
        self._expand(pool, layer, key_up, value_up)
        queries[:, :, latent.nope_dim :] = q_rope
        own = queries if rows is None else queries.index_select(0, rows)
        out = torch.empty(
            (len(own), self._config.num_heads, latent.value_dim),
            dtype=queries.dtype,
            device=queries.device,
        )
        keys, values = (
            each[:, : self._num_tokens].transpose(0, 1) for each in (self._keys, self._values)
        )
        self._wrapper.run(q=own, k=keys, v=values, out=out)
        return out, rows

    def _expand(self, pool: Pool, layer: int, key_up: torch.Tensor, value_up: torch.Tensor) -> None:
        """The cached latents of the step's contexts, as keys and values of heads."""
        latent, count = self._latent, self._num_tokens
        size = pool.block_size
        plane = pool.data[:, layer, 0, 0]  # [num_blocks, block_size, rank + rope_dim]
        cached = plane[self._slots // size, self._slots % size]  # [count, rank + rope_dim]
        shared = cached[:, : latent.rank].expand(self._config.num_heads, -1, -1)
        keys = self._keys[:, :count]
        torch.bmm(shared, key_up.transpose(1, 2), out=keys[:, :, : latent.nope_dim])
        keys[:, :, latent.nope_dim :] = cached[:, latent.rank :]
        torch.bmm(shared, value_up, out=self._values[:, :count])

    def _plan(self, counts: Sequence[int], contexts: Sequence[int]) -> None:
        latent, heads = self._latent, self._config.num_heads
        self._wrapper.plan(
            qo_indptr=torch.from_numpy(starts(counts)),
            kv_indptr=torch.from_numpy(starts(contexts)),
            num_qo_heads=heads,
            num_kv_heads=heads,
            head_dim_qk=latent.nope_dim + latent.rope_dim,
            head_dim_vo=latent.value_dim,
            causal=True,
            sm_scale=self._config.score_scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
