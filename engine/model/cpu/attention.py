"""Attention on a CPU: what the kernels know of the model, the pool and each batch.

Life: made with the pool; `begin` plans a batch's work once for each window that layers have; then
every layer writes its keys and values and attends. Layers that differ in window, rope or the group
of their KV have their own description of the call, everything else is shared.
"""

from __future__ import annotations

import ctypes
from copy import copy
from typing import Any

import numpy as np
import torch

from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu.kernels import KernelsUnavailable, structure
from kvrelay.engine.model.ops import rope_tables

_Attention, _Rope = structure("Attention"), structure("Rope")
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}  # as in attention/attention.h
_MAX_GROUP = 32  # heads that one item of work takes, if their KV head has more
_MAX_LATENT_GROUP = 16  # their vectors are longer
_MAX_TILES = 4  # an item has at most: what keys are made into is paid once for all of them
_ITEMS = 8  # for each thread at least, if there are several tiles for each


class CpuAttention:
    """The attention part of `CpuOps`, owned by it. The descriptions point into the batch, the plan
    and the tables, which are kept alive here."""

    def __init__(
        self,
        config: ModelConfig,
        pool: torch.Tensor,
        max_positions: int,
        library: Any,
        num_threads: int,
        low_precision: int = 0,
    ) -> None:
        """low_precision: as of `CpuOps`; for keys and values in bfloat16, where heads are of whole
        vectors of pairs.
        pool: [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim], float32
        or bfloat16, or bytes [.., num_kv_heads, bytes_per_head] of float8_e4m3. Raises
        KernelsUnavailable for shapes that the kernels do not know."""
        _check(config, pool, library)
        self._pool, self._lib, c = pool, library, config
        self._at, self._threads = pool.data_ptr(), num_threads
        self._layer_bytes = pool.stride(1) * pool.element_size()
        latent, together = c.latent, c.num_heads // c.num_kv_heads
        most = _MAX_GROUP if latent is None else _MAX_LATENT_GROUP
        group = max(n for n in range(1, min(together, most) + 1) if together % n == 0)
        self._group, self._items_per_seq = group, c.num_heads // group
        self.tile: int = library.kvr_attention_tile(group, c.head_dim)
        self.split_keys: int = library.kvr_attention_split_keys()  # positions that are summed first
        self._value_dim = c.head_dim if latent is None else latent.rank
        odd = (c.head_dim | self._value_dim) % (2 * library.kvr_vector_width())
        is_low_precision = pool.dtype == torch.bfloat16 and not odd
        self._most_tiles = _MAX_TILES if is_low_precision and low_precision else 1
        kv_heads = c.num_heads + 2 * c.num_kv_heads if latent is None else c.num_heads
        block_size = pool.shape[4] if pool.dim() == 6 else pool.shape[4] // (c.head_dim + 1)
        shared = {
            "qkv_stride": kv_heads * c.head_dim,
            "block_stride": pool.stride(0),
            "head_stride": pool.stride(3),
            "value_offset": pool.stride(2) if latent is None else 0,
            "num_heads": c.num_heads,
            "head_dim": c.head_dim,
            "block_size": block_size,
            "rope_at": 0 if latent is None else latent.rank,
            "kv_kind": _KINDS[pool.dtype],
        }
        attention = {
            "group": group,
            "shares": together // group,
            "value_dim": self._value_dim,
            "scale": c.score_scale,
            "softcap": c.attention_softcap,
            "low_precision": low_precision if is_low_precision else 0,
            "threads": num_threads,
        }
        self._tables = [rope_tables(r, max_positions, torch.device("cpu")) for r in c.ropes]
        self._ropes: dict[tuple[int, int], Any] = {}  # by group and rope
        self._attentions: dict[tuple[int, int, int], Any] = {}  # by group, window and rope
        # Which of them each layer has, and where it is in a block.
        self._layers: dict[int, tuple[tuple[int, int], tuple[int, int, int], int]] = {}
        for layer, (group_of_layer, place) in c.kv_places().items():
            index, window = c.layer_ropes[layer] if c.layer_ropes else 0, c.window_or_chunk(layer)
            turn = self._rotation(c, index)
            if pool.dtype == torch.uint8 and latent is None:
                turn["mixed_half"] = c.rotated_half(layer)
            key = (group_of_layer, window, index)
            rope = _Rope(num_kv_heads=c.num_kv_heads, eps=c.rms_norm_eps, **turn, **shared)
            attend = _Attention(window=window, num_sinks=c.num_sinks, **turn, **attention, **shared)
            self._ropes.setdefault(key[::2], rope)
            self._attentions.setdefault(key, attend)
            self._layers[layer] = key[::2], key, place
        self._plans: dict[object, tuple[torch.Tensor, ...]] = {}
        self._alive: Batch | None = None

    def _rotation(self, config: ModelConfig, index: int) -> dict[str, Any]:
        if index < 0:
            return {}
        cos, sin = self._tables[index]
        at = {"cos": cos.data_ptr(), "sin": sin.data_ptr()}
        return {**at, "rope_dim": config.ropes[index].dim}

    def begin(self, batch: Batch) -> None:
        """Plan the work on `batch`, which the following calls belong to."""
        pointers = {
            "query_start": batch.query_start.data_ptr(),
            "query_len": batch.query_len.data_ptr(),
            "context_len": batch.context_len.data_ptr(),
            "table_stride": batch.block_tables.shape[1],
        }
        plans: dict[int, dict[str, int]] = {}
        for (group, window, _), each in self._attentions.items():
            if window not in plans:
                plans[window] = self._plan(batch, window, each.num_sinks)
            each.tables = batch.tables_of(group).data_ptr()
            for name, value in (pointers | plans[window]).items():
                setattr(each, name, value)
        for (group, _), rope in self._ropes.items():
            rope.positions = batch.positions.data_ptr()
            rope.slots = batch.slots_of(group).data_ptr()
        self._alive = batch

    def _plan(self, batch: Batch, window: int, sinks: int) -> dict[str, int]:
        """The fields of a description that say who does what in layers of `window`."""
        width, num_seqs = self._items_per_seq, len(batch.spans)
        tiles = len(batch.tokens) * width // (self._threads * _ITEMS * self.tile)
        short = self._lib.kvr_attention_short_query()  # queries, whose splits are shared out
        most = most_tiles = 0
        for _, length, end in batch.spans:
            count, is_short = length // self.tile + 1, length <= short
            most += count * (end // self.split_keys + 3 if is_short else 1)
            most_tiles += count * is_short
        items = torch.empty(most * width * 6, dtype=torch.int32)
        merges = torch.empty(most_tiles * width * 6, dtype=torch.int32)
        counts = (ctypes.c_int64 * 3)()
        self._lib.kvr_attention_plan(
            num_seqs,
            batch.query_len.data_ptr(),
            batch.context_len.data_ptr(),
            width,
            self.tile * max(1, min(self._most_tiles, tiles)),
            window,
            sinks,
            items.data_ptr(),
            merges.data_ptr(),
            ctypes.addressof(counts),
        )
        partial = torch.empty(counts[2] * self._group * (self._value_dim + 2))
        self._plans[window] = (items, merges, partial)
        return {
            "items": items.data_ptr(),
            "num_items": counts[0],
            "merges": merges.data_ptr(),
            "num_merges": counts[1],
            "partial": partial.data_ptr(),
        }

    def for_decodes(self) -> CpuAttention:
        """Another over the same pool and tables, with descriptions of its own: `begin` does not
        change them."""
        other = copy(self)
        other._ropes = {key: _Rope.from_buffer_copy(each) for key, each in self._ropes.items()}
        other._attentions = {
            key: _Attention.from_buffer_copy(each) for key, each in self._attentions.items()
        }
        other._plans, other._alive = {}, None
        return other

    def hold(self, rows: dict[str, np.ndarray], capacity: int, splits: int) -> list[int]:
        """Prepares decodes of at most `capacity` rows: `rows` are arrays that stay, named as in
        `Batch`, those of groups one after the other, and what they meet has no more than `splits`
        altogether. The kernels plan each pass. Returns addresses of the descriptions that they do
        so in."""
        at = {name: array.ctypes.data for name, array in rows.items()}
        width, per_row = self._items_per_seq, self._group * (self._value_dim + 2)
        partial = torch.empty(splits * width * per_row)
        for key, each in self._attentions.items():
            items = torch.empty(splits * width * 6, dtype=torch.int32)
            merges = torch.empty(capacity * width * 6, dtype=torch.int32)
            self._plans[key] = (items, merges, partial)
            each.items, each.merges = items.data_ptr(), merges.data_ptr()
            each.partial = partial.data_ptr()
            each.tables = rows["block_tables"][key[0]].ctypes.data
            each.table_stride = rows["block_tables"].shape[2]
            for name in ("query_start", "query_len", "context_len"):
                setattr(each, name, at[name])
        for (group, _), rope in self._ropes.items():
            rope.positions, rope.slots = at["positions"], rows["slots"][group].ctypes.data
        return [ctypes.addressof(each) for each in self._attentions.values()]

    def described(self, layer: int) -> tuple[int, int, int]:
        """Addresses of a layer's `Rope`, `Attention` and first element in block 0: good for as long
        as this lives, and true of a batch once it has begun."""
        rope, attention, _ = self._layers[layer]
        at = ctypes.addressof(self._ropes[rope]), ctypes.addressof(self._attentions[attention])
        return (*at, self._pool_at(layer))

    def _pool_at(self, layer: int) -> int:
        return self._at + self._layers[layer][2] * self._layer_bytes

    def write(
        self,
        qkv: torch.Tensor,
        layer: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> None:
        assert qkv.is_contiguous()
        self._lib.kvr_rope_write(
            self.described(layer)[0],
            qkv.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            self._pool_at(layer),
            0,
            len(qkv),
            self._threads,
        )

    def write_latent(self, q_rope: torch.Tensor, latent: torch.Tensor, layer: int) -> None:
        """As `Ops.latent_write`; both may be views of wider rows."""
        assert q_rope.stride(2) == latent.stride(1) == 1
        self._lib.kvr_latent_write(
            self.described(layer)[0],
            q_rope.data_ptr(),
            q_rope.stride(0),
            q_rope.stride(1),
            latent.data_ptr(),
            latent.stride(0),
            self._pool_at(layer),
            len(latent),
            self._threads,
        )

    def attend(self, rows: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        """Rotated queries lead `rows`; out: [num_tokens, num_heads * value_dim], float32."""
        assert rows.is_contiguous()
        self._lib.kvr_attention(
            self.described(layer)[1], rows.data_ptr(), out.data_ptr(), self._pool_at(layer)
        )


def _check(config: ModelConfig, pool: torch.Tensor, library: Any) -> None:
    """Raises KernelsUnavailable for what the kernels do not handle."""
    assert pool[0, 0, 0, 0].is_contiguous()
    width, latent = library.kvr_vector_width(), config.latent
    if config.head_dim % width:
        raise KernelsUnavailable(f"head_dim {config.head_dim} is not a multiple of {width}")
    if latent is not None and latent.rank % width:
        raise KernelsUnavailable(f"kv_lora_rank {latent.rank} is not a multiple of {width}")
    if pool.dtype not in _KINDS:
        raise KernelsUnavailable(f"a KV cache of {pool.dtype} is not handled")
