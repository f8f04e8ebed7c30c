"""Attention on a CPU: what the kernels know of the model, the pool and each batch.

Life: made with the pool; `begin` plans a batch's work once for each window that layers have; then
every layer writes its keys and values and attends. Layers that differ in window, rope or the group
of their KV have their own description of the call, everything else is shared.
"""

from __future__ import annotations

import ctypes
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch

from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu.kernels import KernelsUnavailable, structure
from kvrelay.engine.model.ops import kv_planes, rope_tables
from kvrelay.engine.model.quest import NEVER, Quest
from kvrelay.engine.model.vision.rows import ImageRows

_Attention, _Rope = structure("Attention"), structure("Rope")
_Selection, _Quest = structure("Selection"), structure("Quest")
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}  # as in attention/attention.h
_MAX_GROUP = 32  # heads that one item of work takes, if their KV head has more
_MAX_LATENT_GROUP = 16  # their vectors are longer
_MAX_TILES = 4  # an item has at most: what keys are made into is paid once for all of them
_ITEMS = 8  # for each thread at least, if there are several tiles for each


class Key(NamedTuple):
    """What layers that share their descriptions have in common."""

    group: int
    window: int  # a chunk is negative
    rope: int  # -1: none
    keeps_kv: bool
    chooses: bool  # its queries may read some pages alone


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
        quest: Quest | None = None,
    ) -> None:
        """low_precision: as of `CpuOps`; for keys and values in bfloat16, where heads are of whole
        vectors of pairs.
        pool: [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim], float32
        or bfloat16, or bytes [.., num_kv_heads, bytes_per_head] of float8_e4m3. quest: of
        a pool of one shape, in float32 or bfloat16. Raises KernelsUnavailable for shapes that the
        kernels do not know."""
        _check(config, pool, library)
        self._pool, self._lib, self._config, c = pool, library, config, config
        self._threads, self._low_precision = num_threads, low_precision
        self.split_keys: int = library.kvr_attention_split_keys()  # positions that are summed first
        self._tables = [rope_tables(r, max_positions, torch.device("cpu")) for r in c.ropes]
        self._ones = torch.ones(c.head_dim)  # the weight of a norm that has none
        planes = kv_planes(pool, c)
        self._ropes: dict[Key, Any] = {}
        self._attentions: dict[Key, Any] = {}
        self._selection = _selection_of(c)
        self._selected = torch.empty(0, dtype=torch.int32)
        self._quest, self._bounds = _quest_of(quest, pool)
        self._never = torch.empty(0, dtype=torch.int32)
        self._index_ropes: dict[Key, Any] = {}
        self._index_keys: dict[int, int] = {}  # where each layer's are in block 0
        # Which of them each layer has, and where its keys are in block 0.
        self._layers: dict[int, tuple[Key, int]] = {}
        for layer, (group, _) in c.kv_places().items():
            index, window = c.layer_ropes[layer] if c.layer_ropes else 0, c.window_or_chunk(layer)
            chooses = quest is not None and quest.has(layer, window)
            key = Key(group, window, index, c.keeps_kv(layer), chooses)
            self._layers[layer] = key, planes[layer][0].data_ptr()
            if self._selection is not None:
                self._index_keys[layer] = planes[layer][1].data_ptr()
            if key not in self._attentions:
                self._describe(key, layer, planes[layer])
        self._plans: dict[object, tuple[torch.Tensor, ...]] = {}
        self._angles: list[tuple[torch.Tensor, ...]] = []  # where rows have their own
        self._alive: Batch | None = None

    def _describe(self, key: Key, layer: int, planes: list[torch.Tensor]) -> None:
        """Makes the descriptions of layers like `layer`. planes: as `kv_planes` gives them."""
        c, kv, keys = self._config, self._config.kv_heads(layer), planes[0]
        latent, together, dim = c.latent, c.num_heads // kv.num_heads, kv.key_dim
        most = _MAX_GROUP if latent is None else _MAX_LATENT_GROUP
        group = max(n for n in range(1, min(together, most) + 1) if together % n == 0)
        value_dim = dim if latent is None else latent.rank
        own = 2 * kv.num_heads if latent is None and key.keeps_kv else 0
        size = keys.element_size()
        shared: dict[str, Any] = {
            "qkv_stride": (c.num_heads + own) * dim,
            "block_stride": keys.stride(0),
            "head_stride": keys.stride(1),
            "value_offset": 0 if latent else (planes[-1].data_ptr() - keys.data_ptr()) // size,
            "num_heads": c.num_heads,
            "head_dim": dim,
            "block_size": keys.shape[2] if keys.dim() == 4 else keys.shape[2] // (dim + 1),
            "rope_at": 0 if latent is None else latent.rank,
            "kv_kind": _KINDS[keys.dtype],
        }
        if key.rope >= 0:
            cos, sin = self._tables[key.rope]
            shared |= {"cos": cos.data_ptr(), "sin": sin.data_ptr()}
            shared["rope_dim"] = c.ropes[key.rope].dim
        if keys.dtype == torch.uint8 and latent is None:
            shared["mixed_half"] = c.rotated_half(layer)
        self._ropes[key] = _Rope(
            num_kv_heads=kv.num_heads if key.keeps_kv else 0,
            v_norm=self._ones.data_ptr() if c.value_norm else None,
            eps=c.rms_norm_eps,
            **shared,
        )
        if latent is not None and (indexer := latent.indexer) is not None:
            own_rope = self._index_ropes[key] = _Rope.from_buffer_copy(self._ropes[key])
            own_rope.num_heads, own_rope.head_dim = indexer.num_heads, indexer.head_dim
            own_rope.rope_at = indexer.head_dim - latent.rope_dim
        odd = (dim | value_dim) % (2 * self._lib.kvr_vector_width())
        is_low_precision = keys.dtype == torch.bfloat16 and not odd
        self._attentions[key] = _Attention(
            window=key.window,
            num_sinks=c.num_sinks,
            group=group,
            shares=together // group,
            value_dim=value_dim,
            scale=c.score_scale,
            softcap=c.attention_softcap,
            low_precision=self._low_precision if is_low_precision else 0,
            threads=self._threads,
            selection=self._selection_at,
            quest=self._quest_at if key.chooses else None,
            **shared,
        )

    @property
    def _selection_at(self) -> int | None:
        return None if self._selection is None else ctypes.addressof(self._selection)

    @property
    def _quest_at(self) -> int | None:
        return None if self._quest is None else ctypes.addressof(self._quest)

    def _read_pages(self, batch: Batch) -> None:
        """Says which rows of the batch do."""
        if self._quest is None:
            return
        self._quest.num_seqs, pages = len(batch.spans), batch.pages
        if pages is None:
            if len(self._never) < len(batch.spans):
                self._never = torch.full((2 * len(batch.spans),), NEVER, dtype=torch.int32)
            starts = bounded = self._never
        else:
            starts, bounded = pages.starts, pages.bounded
        self._quest.starts, self._quest.bounded = starts.data_ptr(), bounded.data_ptr()

    def _select_for(self, num_tokens: int) -> None:
        """Has room for what so many tokens attend to."""
        if self._selection is None:
            return
        needed = num_tokens * self._selection.topk
        if len(self._selected) < needed:
            self._selected = torch.empty(needed, dtype=torch.int32)
            self._selection.selected = self._selected.data_ptr()

    def begin(self, batch: Batch) -> None:
        """Plan the work on `batch`, which the following calls belong to."""
        pointers = {
            "query_start": batch.query_start.data_ptr(),
            "query_len": batch.query_len.data_ptr(),
            "context_len": batch.context_len.data_ptr(),
            "table_stride": batch.block_tables.shape[1],
        }
        plans: dict[tuple[int, ...], dict[str, int]] = {}
        self._read_pages(batch)
        for key, each in self._attentions.items():
            heads = each.num_heads // each.group, each.group, each.head_dim
            kind = key.window, *heads, key.chooses
            if kind not in plans:
                plans[kind] = self._plan(batch, each, kind)
            each.tables = batch.tables_of(key.group).data_ptr()
            for name, value in (pointers | plans[kind]).items():
                setattr(each, name, value)
        for key, rope in (*self._ropes.items(), *self._index_ropes.items()):
            rope.positions = batch.positions.data_ptr()
            rope.slots = batch.slots_of(key.group).data_ptr()
        if self._selection is not None:
            self._selection.num_seqs = len(batch.spans)
            self._select_for(len(batch.tokens))
        if batch.images is not None or self._angles:
            self._turn_by(batch.images)
        self._alive = batch

    def _turn_by(self, images: ImageRows | None) -> None:
        """Rows have angles of their own, or those of their positions."""
        self._angles = []
        for key, rope in self._ropes.items():
            if key.rope < 0:
                continue
            cos, sin = self._tables[key.rope]
            if images is not None:
                cos, sin = images.angles((cos, sin))
                numbers = torch.arange(len(cos))
                self._angles.append((cos, sin, numbers))
                rope.positions = numbers.data_ptr()
            rope.cos, rope.sin = cos.data_ptr(), sin.data_ptr()

    def _plan(self, batch: Batch, each: Any, kind: object) -> dict[str, int]:
        """The fields of a description like `each` that say who does what."""
        width, num_seqs = each.num_heads // each.group, len(batch.spans)
        tile = self._lib.kvr_attention_tile(each.group, each.head_dim)
        tiles = len(batch.tokens) * width // (self._threads * _ITEMS * tile)
        short = self._lib.kvr_attention_short_query()  # queries, whose splits are shared out
        most = most_tiles = 0
        for _, length, end in batch.spans:
            count, is_short = length // tile + 1, length <= short
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
            tile * max(1, min(_MAX_TILES if each.low_precision else 1, tiles)),
            each.window,
            each.num_sinks,
            0 if self._selection is None else self._selection.topk,
            self._quest.starts if each.quest else None,
            items.data_ptr(),
            merges.data_ptr(),
            ctypes.addressof(counts),
        )
        partial = torch.empty(counts[2] * each.group * (each.value_dim + 2))
        self._plans[kind] = (items, merges, partial)
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
        other._index_ropes = {
            key: _Rope.from_buffer_copy(each) for key, each in self._index_ropes.items()
        }
        other._selection = _selection_of(self._config)
        if self._quest is not None:
            other._quest = _Quest.from_buffer_copy(self._quest)
        for key, each in other._attentions.items():
            each.selection = other._selection_at
            each.quest = other._quest_at if key.chooses else None
        other._selected = torch.empty(0, dtype=torch.int32)
        other._plans, other._alive = {}, None
        return other

    def hold(self, rows: dict[str, np.ndarray], capacity: int, splits: int) -> list[int]:
        """Prepares decodes of at most `capacity` rows: `rows` are arrays that stay, named as in
        `Batch`, those of groups one after the other, and what they meet has no more than `splits`
        altogether. The kernels plan each pass. Returns addresses of the descriptions that they do
        so in."""
        at = {name: array.ctypes.data for name, array in rows.items()}
        for key, each in self._attentions.items():
            width = each.num_heads // each.group
            items = torch.empty(splits * width * 6, dtype=torch.int32)
            merges = torch.empty(capacity * width * 6, dtype=torch.int32)
            partial = torch.empty(splits * width * each.group * (each.value_dim + 2))
            self._plans[key] = (items, merges, partial)
            each.items, each.merges = items.data_ptr(), merges.data_ptr()
            each.partial = partial.data_ptr()
            each.tables = rows["block_tables"][key.group].ctypes.data
            each.table_stride = rows["block_tables"].shape[2]
            for name in ("query_start", "query_len", "context_len"):
                setattr(each, name, at[name])
        self._select_for(capacity)
        if self._quest is not None:
            self._quest.starts, self._quest.bounded = at["starts"], at["bounded"]
        for key, rope in (*self._ropes.items(), *self._index_ropes.items()):
            rope.positions, rope.slots = at["rope_positions"], rows["slots"][key.group].ctypes.data
        return [ctypes.addressof(each) for each in self._attentions.values()]

    @property
    def chooses(self) -> bool:
        """Whether layers do, for rows that ask for it."""
        return self._quest is not None

    def described(self, layer: int) -> tuple[int, int, int]:
        """Addresses of a layer's `Rope`, `Attention` and first element in block 0: good for as long
        as this lives, and true of a batch once it has begun."""
        key, at = self._layers[layer]
        return ctypes.addressof(self._ropes[key]), ctypes.addressof(self._attentions[key]), at

    def described_index(self, layer: int) -> tuple[int, int]:
        """Addresses of the `Rope` of a layer's index queries and keys, and of its first index key
        in block 0, as `described`."""
        return ctypes.addressof(self._index_ropes[self._layers[layer][0]]), self._index_keys[layer]

    def write(
        self,
        qkv: torch.Tensor,
        layer: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> None:
        assert qkv.is_contiguous()
        rope, _, pool = self.described(layer)
        self._lib.kvr_rope_write(
            rope,
            qkv.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            pool,
            0,
            len(qkv),
            self._threads,
        )

    def write_latent(self, q_rope: torch.Tensor, latent: torch.Tensor, layer: int) -> None:
        """As `Ops.latent_write`; both may be views of wider rows."""
        assert q_rope.stride(2) == latent.stride(1) == 1
        rope, _, pool = self.described(layer)
        self._lib.kvr_latent_write(
            rope,
            q_rope.data_ptr(),
            q_rope.stride(0),
            q_rope.stride(1),
            latent.data_ptr(),
            latent.stride(0),
            pool,
            len(latent),
            self._threads,
        )

    def write_index(self, queries: torch.Tensor | None, keys: torch.Tensor, layer: int) -> None:
        """Rotates queries and keys as `Ops.index_write` says, and writes the keys."""
        assert keys.is_contiguous()
        at, pool = self.described_index(layer)
        rope, dim = _Rope.from_buffer_copy(_Rope.from_address(at)), keys.shape[1]
        rotated, stride = keys.data_ptr(), 0
        if queries is None:
            rope.num_heads = 0
        else:
            assert queries.is_contiguous()
            rotated, stride = queries[:, rope.rope_at :].data_ptr(), queries.shape[1]
        self._lib.kvr_latent_write(
            ctypes.addressof(rope),
            *(rotated, stride, dim, keys.data_ptr(), dim, pool, len(keys), self._threads),
        )

    def select(self, queries: torch.Tensor, weights: torch.Tensor, layer: int) -> None:
        """As `Ops.select`; what is chosen is kept here."""
        assert queries.is_contiguous()
        assert weights.is_contiguous()
        attention, pool = self.described(layer)[1], self.described_index(layer)[1]
        self._lib.kvr_select(attention, queries.data_ptr(), weights.data_ptr(), pool)

    def keep_selected(self, rows: torch.Tensor) -> None:
        """What these rows of the batch attend to, for a batch of them alone. `rows`: ascending."""
        if self._selection is not None:
            selected = self.selected(len(self._selected) // self._selection.topk)
            selected[: len(rows)] = selected[rows]

    def selected(self, num_tokens: int) -> torch.Tensor:
        """Returns what the last `select` chose, as `CpuOps.selected` says."""
        assert self._selection is not None
        topk: int = self._selection.topk
        return self._selected[: num_tokens * topk].view(num_tokens, topk)

    def attend(self, rows: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        """Rotated queries lead `rows`; out: [num_tokens, num_heads * value_dim], float32."""
        assert rows.is_contiguous()
        _, attention, pool = self.described(layer)
        self._lib.kvr_attention(attention, rows.data_ptr(), out.data_ptr(), pool)


def _selection_of(config: ModelConfig) -> Any:
    indexer = config.indexer
    if indexer is None:
        return None
    return _Selection(heads=indexer.num_heads, dim=indexer.head_dim, topk=indexer.topk)


def _quest_of(quest: Quest | None, pool: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
    """With the room for bounds, which takes memory as it is written."""
    if quest is None:
        return None, None
    num_blocks, num_layers, planes, heads, _, dim = pool.shape
    assert planes == 2
    bounds = torch.empty(num_layers, num_blocks, heads, 2, dim, dtype=pool.dtype)
    made = _Quest(
        pool=pool.data_ptr(),
        bounds=bounds.data_ptr(),
        num_blocks=num_blocks,
        least=quest.least_tokens,
        share=quest.share,
    )
    return made, bounds


def _check(config: ModelConfig, pool: torch.Tensor, library: Any) -> None:
    """Raises KernelsUnavailable for what the kernels do not handle."""
    assert pool[0, 0, 0, 0].is_contiguous()
    width, latent = library.kvr_vector_width(), config.latent
    for layer in config.kv_places():
        dim, value_dim = config.kv_heads(layer).key_dim, config.kv_heads(layer).value_dim
        if dim % width:
            raise KernelsUnavailable(f"head_dim {dim} is not a multiple of {width}")
        if latent is not None and value_dim % width:
            raise KernelsUnavailable(f"index_head_dim {value_dim} is not a multiple of {width}")
        if dim != value_dim and latent is None:
            raise KernelsUnavailable(f"values of {value_dim} and keys of {dim} are not handled")
    if latent is not None and latent.rank % width:
        raise KernelsUnavailable(f"kv_lora_rank {latent.rank} is not a multiple of {width}")
    if pool.dtype not in _KINDS:
        raise KernelsUnavailable(f"a KV cache of {pool.dtype} is not handled")
