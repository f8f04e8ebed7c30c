"""FlashInfer's attention over the KV pool: its pages are views of our blocks, nothing is copied.

`pool[:, layer, plane]` has FlashInfer's layout HND, [num_blocks, num_kv_heads, block_size,
head_dim], with strides that are the same for keys and values. A decode reads block tables as they
are and needs no plan, so a captured step holds it. Prompts are planned once per step on the host,
from numbers that the host knows, once for every window that layers have.

Prompts of multi-head latent attention have keys and values expanded from the cached latents. In the
latents' space a query and a key have rank + rope_dim numbers, expanded only nope_dim + rope_dim,
and values value_dim instead of rank: 320 multiplications for each pair instead of 1,088 with
DeepSeek-V3's sizes. Expanding costs rank * (nope_dim + value_dim) for each cached token, so it pays
where many queries share a context: for whole prompts always, for short chunks behind a long prefix
not. Decodes, and what does not fit the buffers, stay absorbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import Latent, ModelConfig
from kvrelay.engine.model.gpu.attention_tile import multiprocessors
from kvrelay.engine.model.gpu.cache_pool import Pool
from kvrelay.engine.model.gpu.flashinfer.division import Division, capability
from kvrelay.engine.model.gpu.staging import to_device

DECODE_BYTES = 128 << 20  # what FlashInfer advises; its semaphores in it begin as zeros
PROMPT_BYTES = 128 << 20  # for prompts, where their splits do not take more
SPLIT_ROWS = 128  # query rows of a program, at most
WAVES = 2  # programs per multiprocessor up to which its planner splits contexts


@dataclass(frozen=True, slots=True)
class PageLists:
    """The pages of a ragged batch as FlashInfer's planner wants them, on the host: int32, but for
    `entries`, int64."""

    query_starts: np.ndarray  # [S + 1]: first row of each sequence, and the end
    page_starts: np.ndarray  # [S + 1]: first place of each sequence in the list of its pages
    last_page_len: np.ndarray  # [S]: tokens in the last page, 1 to block_size
    entries: np.ndarray  # [pages]: where each page's number is in the flat block tables


def starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """[S + 1] int32: where each of what lies one after the other begins, and the end."""
    return np.cumsum([0, *lengths], dtype=np.int32)


def page_lists(
    spans: Sequence[tuple[int, int, int]], block_size: int, table_width: int
) -> PageLists:
    """spans: Batch.spans, whose rows follow one another; table_width: of Batch.block_tables."""
    counts = np.array([count for _, count, _ in spans], np.int32)
    contexts = np.array([context for _, _, context in spans], np.int32)
    pages = -(-contexts // block_size)
    page_starts = starts(pages)
    seqs = np.arange(len(spans)).repeat(pages)
    entries = seqs * table_width + np.arange(len(seqs)) - page_starts[seqs]
    return PageLists(
        starts(counts),
        page_starts,
        contexts - (pages - 1) * block_size,
        entries.astype(np.int64),
    )


def split_bytes(config: ModelConfig, head_dim: int, device: torch.device) -> int:
    """Workspace for the results of contexts that are split, float32 with a sum per row. FlashInfer
    splits while there are fewer than `WAVES` programs, of one KV head each, per multiprocessor."""
    programs = WAVES * multiprocessors(device)
    group = config.num_heads // config.num_kv_heads if config.latent is None else 1
    return max(PROMPT_BYTES, programs * group * SPLIT_ROWS * (head_dim + 1) * 4 + (8 << 20))


class PagedAttention:
    """Owned by FlashInferOps. `begin` comes before the calls of a step; between them the workspace
    belongs to FlashInfer."""

    def __init__(
        self,
        library: Any,
        config: ModelConfig,
        division: Division,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._library, self._config, self._dtype, self._device = library, config, dtype, device
        self._pages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer
        self._places = config.kv_places()
        self._windows = [window for window, _ in config.kv_groups()]
        both = zip(division.decodes, division.prompts, strict=True)
        self._layers = [layer for layer, ours in enumerate(both) if any(ours)]
        self._block_size, self._longest = 0, 0
        self._tables: dict[int, torch.Tensor] = {}  # by group of layers
        self._contexts = torch.empty(0, dtype=torch.int32, device=device)
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        if any(division.decodes):
            self._scratch = torch.zeros(DECODE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[int, Any] = {}  # by group
        if any(division.prompts):
            size = split_bytes(config, config.head_dim, device)
            workspace = torch.empty(size, dtype=torch.uint8, device=device)
            layers = (layer for layer, ours in enumerate(division.prompts) if ours)
            for group in sorted({self._places[layer][0] for layer in layers}):
                self._wrappers[group] = library.BatchPrefillWithPagedKVCacheWrapper(
                    workspace, kv_layout="HND"
                )

    def use_pool(self, pool: Pool) -> None:
        self._block_size = pool.block_size
        planes = {layer: pool.data[:, self._places[layer][1]] for layer in self._layers}
        self._pages = {layer: (each[:, 0], each[:, 1]) for layer, each in planes.items()}

    def begin_decodes(self, batch: Batch) -> None:
        """All sequences have one token. Nothing here waits, and a graph may hold it."""
        groups = {self._places[layer][0] for layer in self._layers}
        self._tables = {group: self._tables_of(batch, group) for group in groups}
        self._contexts = batch.context_len
        self._longest = max(context for _, _, context in batch.spans)

    def begin_prompts(self, batch: Batch) -> None:
        """Any lengths of queries: plans the step."""
        c, width = self._config, batch.block_tables.shape[1]
        lists = page_lists(batch.spans, self._block_size, width)
        entries = to_device(lists.entries, self._device)
        host = [
            torch.from_numpy(each)
            for each in (lists.query_starts, lists.page_starts, lists.last_page_len)
        ]
        for group, wrapper in self._wrappers.items():
            pages = self._tables_of(batch, group).reshape(-1).index_select(0, entries)
            wrapper.plan(
                qo_indptr=host[0],
                paged_kv_indptr=host[1],
                paged_kv_indices=pages,
                paged_kv_last_page_len=host[2],
                num_qo_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                head_dim_qk=c.head_dim,
                page_size=self._block_size,
                causal=True,
                sm_scale=c.score_scale,
                window_left=self._windows[group] - 1,  # a query is in its own window; -1: all
                logits_soft_cap=c.attention_softcap,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )

    def decodes(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        c, queries = self._config, self._queries(qkv)
        out = torch.empty(queries.shape, dtype=qkv.dtype, device=qkv.device)
        self._library.decode.trtllm_batch_decode_with_kv_cache(
            query=queries.contiguous(),  # these kernels know no strides of queries
            kv_cache=self._pages[layer],
            workspace_buffer=self._scratch,
            block_tables=self._tables[self._places[layer][0]],
            seq_lens=self._contexts,
            max_seq_len=self._longest,
            bmm1_scale=c.score_scale,
            bmm2_scale=1.0,
            window_left=c.window(layer) - 1,
            out=out,
            kv_layout="HND",
        )
        return out.flatten(1)

    def prompts(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        queries = self._queries(qkv)
        out = torch.empty(queries.shape, dtype=qkv.dtype, device=qkv.device)
        self._wrappers[self._places[layer][0]].run(
            q=queries, paged_kv_cache=self._pages[layer], out=out
        )
        return out.flatten(1)

    def _queries(self, qkv: torch.Tensor) -> torch.Tensor:
        """A view, [N, num_heads, head_dim]."""
        c = self._config
        return qkv[:, : c.num_heads * c.head_dim].view(len(qkv), c.num_heads, c.head_dim)

    def _tables_of(self, batch: Batch, group: int) -> torch.Tensor:
        """Block tables without the -1 of blocks before the window: a tile that the window cuts is
        loaded whole, so each entry has to be a page."""
        tables = batch.tables_of(group)
        return tables.clamp(min=0) if self._windows[group] else tables


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
