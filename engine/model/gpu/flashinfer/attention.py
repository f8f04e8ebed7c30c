"""FlashInfer's attention over the KV pool: its pages are views of our blocks, nothing is copied.

`pool[:, layer, plane]` has FlashInfer's layout HND, [num_blocks, num_kv_heads, block_size,
head_dim], with strides that are the same for keys and values. A decode reads block tables as they
are and needs no plan, so a captured step holds it. Prompts are planned once per step on the host,
from numbers that the host knows, once for every window that layers have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.gpu.attention_tile import multiprocessors
from kvrelay.engine.model.gpu.cache_pool import Pool
from kvrelay.engine.model.gpu.flashinfer.division import Division
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
        both = zip(division.decodes, division.prompts, strict=True)
        self._layers = [layer for layer, ours in enumerate(both) if any(ours)]
        self._block_size, self._longest = 0, 0
        self._tables = torch.empty((0, 0), dtype=torch.int32, device=device)
        self._contexts = torch.empty(0, dtype=torch.int32, device=device)
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        if any(division.decodes):
            self._scratch = torch.zeros(DECODE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[int, Any] = {}  # by window
        if any(division.prompts):
            size = split_bytes(config, config.head_dim, device)
            workspace = torch.empty(size, dtype=torch.uint8, device=device)
            layers = (layer for layer, ours in enumerate(division.prompts) if ours)
            for window in {config.window(layer) for layer in layers}:
                self._wrappers[window] = library.BatchPrefillWithPagedKVCacheWrapper(
                    workspace, kv_layout="HND"
                )

    def use_pool(self, pool: Pool) -> None:
        self._block_size = pool.block_size
        self._pages = {
            layer: (pool.data[:, layer, 0], pool.data[:, layer, 1]) for layer in self._layers
        }

    def begin_decodes(self, batch: Batch) -> None:
        """All sequences have one token. Nothing here waits, and a graph may hold it."""
        self._tables, self._contexts = self._tables_of(batch), batch.context_len
        self._longest = max(context for _, _, context in batch.spans)

    def begin_prompts(self, batch: Batch) -> None:
        """Any lengths of queries: plans the step."""
        c, width = self._config, batch.block_tables.shape[1]
        lists = page_lists(batch.spans, self._block_size, width)
        entries = to_device(lists.entries, self._device)
        pages = self._tables_of(batch).reshape(-1).index_select(0, entries)
        host = [
            torch.from_numpy(each)
            for each in (lists.query_starts, lists.page_starts, lists.last_page_len)
        ]
        for window, wrapper in self._wrappers.items():
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
                window_left=window - 1,  # a query is in its own window; -1: all
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
            block_tables=self._tables,
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
        self._wrappers[self._config.window(layer)].run(
            q=queries, paged_kv_cache=self._pages[layer], out=out
        )
        return out.flatten(1)

    def _queries(self, qkv: torch.Tensor) -> torch.Tensor:
        """A view, [N, num_heads, head_dim]."""
        c = self._config
        return qkv[:, : c.num_heads * c.head_dim].view(len(qkv), c.num_heads, c.head_dim)

    def _tables_of(self, batch: Batch) -> torch.Tensor:
        """Block tables without the -1 of blocks before the window: a tile that the window cuts is
        loaded whole, so each entry has to be a page."""
        if self._config.max_window:
            return batch.block_tables.clamp(min=0)
        return batch.block_tables
