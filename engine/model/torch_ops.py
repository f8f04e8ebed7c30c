"""The decoder's operations in plain torch: any device, any dtype. The reference for the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kvrelay.engine.model import fp8
from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import ALL_BUT_FIRST, ModelConfig
from kvrelay.engine.model.ops import (
    SWISH_ALPHA,
    SWISH_LIMIT,
    TensorOps,
    choose_experts,
    highest,
    kv_planes,
)
from kvrelay.engine.model.quantize import bits_of, dequantize, quantize, round_inputs
from kvrelay.engine.model.stacked import Stacked, widened

MAX_SCORES = 1 << 24  # held at once where scores are computed one by one

Matrix = tuple[torch.Tensor, torch.Tensor | None, int]
"""Values, bias, and of how many bits the weights are, as inputs are rounded by; 0: as they are."""
Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Queries:
    """Queries of sequences that have equally many, `n` each, and their positions."""

    at: torch.Tensor  # [S, n, num_heads, head_dim]
    to_sinks: torch.Tensor | None  # rotated for attention to sinks
    positions: torch.Tensor  # [S, n]
    tables: torch.Tensor  # [S, widest]
    ends: tuple[int, ...]  # each context's, on the host
    selected: torch.Tensor | None  # [S, n, topk]: positions that are attended to; None: all


class TorchOps(TensorOps):
    """Owned by one runner. The residual stream has the weights' dtype; norms compute in float32.

    Keys and values are gathered by position, so freed blocks are not read."""

    def __init__(
        self,
        config: ModelConfig,
        pool: torch.Tensor,
        dtype: torch.dtype,
        max_positions: int,
        quantization: str = "none",
    ) -> None:
        """pool: [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim], or uint8
        [num_blocks, num_layers, num_planes, num_kv_heads, bytes_per_head] in float8_e4m3."""
        super().__init__(config, dtype, max_positions, pool.device)
        self._is_fp8 = pool.dtype == torch.uint8
        self._num_groups = 1 + max(group for group, _ in self._places.values())
        self.use_pool(pool)
        self._quantization = quantization
        self._sinks: torch.Tensor | None = None  # the layer's learned ones, while it attends
        self._rounds = pool.device.type == "cpu"  # inputs of products with quantized weights

    def use_pool(self, pool: torch.Tensor) -> None:
        """In place of the one before: of as many blocks as there are, the rest alike."""
        self._planes: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # and their scales
        for layer, planes in kv_planes(pool, self._config).items():
            heads = self._config.kv_heads(layer)
            dims = zip(planes, (heads.key_dim, heads.value_dim), strict=False)
            self._planes[layer] = [
                fp8.parts(plane, dim) if self._is_fp8 else (plane, plane) for plane, dim in dims
            ]
            self._size = self._planes[layer][0][0].shape[2]

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None, role: str) -> Matrix:
        bits = bits_of(self._quantization, role)
        if bits:  # its values; memory is not saved here
            weight = dequantize(*quantize(weight, bits))
        return self.table(weight), None if bias is None else self.table(bias), bits

    def gated_matrix(self, weight: torch.Tensor, role: str) -> Matrix:
        return self.matrix(weight, None, role)

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        slots = [batch.slots_of(group) for group in range(self._num_groups)]
        self._slots = [(each // self._size, each % self._size) for each in slots]
        self._to_sinks: torch.Tensor | None = None
        self._selected: torch.Tensor | None = None

    def embed(self, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return table[tokens]

    def linear(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return F.linear(self._inputs(x, matrix[2]), matrix[0], matrix[1])

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, matrix: Matrix) -> None:
        hidden += F.linear(self._inputs(x, matrix[2]), matrix[0], matrix[1])

    def _inputs(self, x: torch.Tensor, bits: int) -> torch.Tensor:
        return round_inputs(x, bits).to(x.dtype) if bits and self._rounds else x

    def gated(
        self, x: torch.Tensor, matrix: Matrix, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate_up = self.linear(x, matrix)
        return self._gated(gate_up if added is None else gate_up + added)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return (weight * (wide * scale).to(x.dtype)).to(x.dtype)

    def norm_all_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.rms_norm(x.contiguous(), weight)

    def rope_write(
        self,
        qkv: torch.Tensor,
        layer: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> None:
        c, kv = self._config, self._config.kv_heads(layer)
        num_keys = kv.num_heads if c.keeps_kv(layer) else 0
        both, values = qkv.split_with_sizes(
            ((c.num_heads + num_keys) * kv.key_dim, num_keys * kv.value_dim), dim=1
        )
        both = both.unflatten(1, (-1, kv.key_dim))  # [N, num_heads + num_keys, key_dim]
        queries, keys = both[:, : c.num_heads], both[:, c.num_heads :]
        if q_norm is not None:
            queries.copy_(self.rms_norm(queries, q_norm))
        if k_norm is not None:
            keys.copy_(self.rms_norm(keys, k_norm))
        self._to_sinks = self._seen_from_sinks(queries, layer)
        angles = self._angles(layer, None)
        if angles is not None:
            both.copy_(_rotated(both, angles))
        if self._is_fp8:
            half = c.rotated_half(layer)
            queries.copy_(fp8.hadamard(queries, half))
            keys.copy_(fp8.hadamard_inverse(keys, half))
            if self._to_sinks is not None:
                self._to_sinks = fp8.hadamard(self._to_sinks, half).to(self._dtype)
        if num_keys:
            values = values.unflatten(1, (num_keys, kv.value_dim))
            if c.value_norm:
                values = self.rms_norm(values, torch.ones(1, device=values.device))
            self._write(layer, 0, keys)
            self._write(layer, 1, values)

    def latent_write(self, q_rope: torch.Tensor, latent: torch.Tensor, layer: int) -> None:
        rank = latent.shape[1] - q_rope.shape[2]
        self._to_sinks = self._seen_from_sinks(q_rope, layer)
        angles = self._angles(layer, None)
        if angles is not None:
            q_rope.copy_(_rotated(q_rope, angles))
            key = latent[:, rank:].unsqueeze(1)
            key.copy_(_rotated(key, angles))
        self._write(layer, 0, latent.unsqueeze(1))

    def index_write(self, queries: torch.Tensor | None, keys: torch.Tensor, layer: int) -> None:
        indexer, angles = self._config.indexer, self._angles(layer, None)
        assert indexer is not None
        if angles is not None:
            start = indexer.head_dim - 2 * angles[0].shape[-1]
            for rows in (queries, keys):
                if rows is not None:
                    part = rows.unflatten(1, (-1, indexer.head_dim))[:, :, start:]
                    part.copy_(_rotated(part, angles))
        self._write(layer, 1, keys.unsqueeze(1))

    def select(self, queries: torch.Tensor, weights: torch.Tensor, layer: int) -> torch.Tensor:
        """-> [N, topk] int64, ascending; of a context that is no longer, [0, topk)."""
        batch, indexer = self._batch, self._config.indexer
        assert batch is not None
        assert indexer is not None
        queries = queries.unflatten(1, (-1, indexer.head_dim)).float()
        selected = torch.arange(indexer.topk, device=queries.device).repeat(len(queries), 1)
        tables = batch.tables_of(self._places[layer][0])
        for seq, (start, count, end) in enumerate(batch.spans):
            if end <= indexer.topk:
                continue
            columns = torch.arange(end, device=queries.device)
            _, keys = self._read(tables[seq : seq + 1], columns.unsqueeze(0), layer)
            at_once = max(1, MAX_SCORES // (end * indexer.num_heads))
            for first in range(start, start + count, at_once):
                rows = slice(first, min(first + at_once, start + count))
                scores = torch.einsum("nhd,kd->nhk", queries[rows], keys[0, 0].float()).relu_()
                scores = torch.einsum("nhk,nh->nk", scores, weights[rows])
                hidden = columns > batch.positions[rows].unsqueeze(1)
                selected[rows] = highest(scores.masked_fill(hidden, -torch.inf), indexer.topk)
        return selected

    def _angles(self, layer: int, latest: int | None) -> Angles | None:
        """cos and sin of each token's position, or of `latest` if that is less: [N, 1, dim / 2]."""
        tables = self._rope_of(layer)
        if tables is None:
            return None
        assert self._batch is not None
        if self._batch.images is not None:
            cos, sin = self._batch.images.angles(tables)
            return cos.unsqueeze(1), sin.unsqueeze(1)
        positions = self._batch.positions
        if latest is not None:
            positions = positions.clamp(max=latest)
        cos, sin = (table[positions].unsqueeze(1) for table in tables)
        return cos, sin

    def _seen_from_sinks(self, queries: torch.Tensor, layer: int) -> torch.Tensor | None:
        """Queries [N, num_heads, dim], not rotated yet, rotated for attention to the sinks of a
        layer: the distance is at most the length of window and sinks (Xiao et al. 2023)."""
        window, sinks = self._config.window(layer), self._config.num_sinks
        if not window or not sinks:
            return None
        angles = self._angles(layer, window + sinks - 1)
        return queries.clone() if angles is None else _rotated(queries, angles)

    def _write(self, layer: int, plane: int, heads: torch.Tensor) -> None:
        """Takes heads: [N, num_kv_heads, dim]."""
        block, offset = self._slots[self._places[layer][0]]
        numbers, scales = self._planes[layer][plane]
        if numbers.dtype == torch.uint8:
            heads, scale = fp8.encode(heads)
            scales[block, :, offset] = scale
        numbers[block, :, offset] = heads.to(numbers.dtype)

    def attention(
        self, qkv: torch.Tensor, layer: int, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        c, self._sinks, kv = self._config, sinks, self._config.kv_heads(layer)
        queries = qkv[:, : c.num_heads * kv.key_dim].unflatten(1, (c.num_heads, kv.key_dim))
        return self._attended(queries, self._to_sinks, layer, kv.value_dim).flatten(1)

    def latent_attention(
        self, queries: torch.Tensor, layer: int, selected: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert self._config.latent is not None
        self._selected = selected
        rank, to_sinks = self._config.latent.rank, self._to_sinks
        if to_sinks is not None:
            to_sinks = torch.cat((queries[:, :, :rank], to_sinks), dim=-1)
        return self._attended(queries, to_sinks, layer, rank)

    def _attended(
        self, queries: torch.Tensor, to_sinks: torch.Tensor | None, layer: int, width: int
    ) -> torch.Tensor:
        """queries [N, num_heads, head_dim] -> [N, num_heads, width]: a pure decode batch at once,
        padded to the longest context; otherwise sequence by sequence."""
        batch = self._batch
        assert batch is not None
        out = queries.new_empty(*queries.shape[:2], width)
        if all(span[1] == 1 for span in batch.spans):
            parts = [(slice(0, len(batch.spans)), slice(0, len(queries)))]
        else:
            spans = enumerate(batch.spans)
            parts = [(slice(i, i + 1), slice(s[0], s[0] + s[1])) for i, s in spans]
        for seqs, rows in parts:
            count = len(batch.spans[seqs])
            group = _Queries(
                queries[rows].unflatten(0, (count, -1)),
                None if to_sinks is None else to_sinks[rows].unflatten(0, (count, -1)),
                batch.positions[rows].unflatten(0, (count, -1)),
                batch.tables_of(self._places[layer][0])[seqs],
                tuple(span[2] for span in batch.spans[seqs]),
                None if self._selected is None else self._selected[rows].unflatten(0, (count, -1)),
            )
            out[rows] = self._attend(group, layer, width).flatten(0, 1)
        return out

    def _attend(self, queries: _Queries, layer: int, width: int) -> torch.Tensor:
        """-> [S, n, num_heads, width], of the layer's values their first `width` dimensions."""
        c, window = self._config, self._config.window(layer)
        num_sinks = c.num_sinks if window else 0
        count, device = queries.at.shape[1], queries.at.device
        ends = torch.tensor(queries.ends, device=device)
        # Columns are the last positions of each context, as far back as the first query sees.
        reach = [min(end, window + count - 1) if window else end for end in queries.ends]
        chunk = c.chunk(layer)
        if chunk > ALL_BUT_FIRST:
            reach = [end - (end - count) // chunk * chunk for end in queries.ends]
        columns = ends.unsqueeze(1) - max(reach) + torch.arange(max(reach), device=device)  # [S, K]
        farthest = ends - torch.tensor(reach, device=device)
        rows = queries.positions.unsqueeze(2)  # [S, n, 1]
        visible = (columns >= num_sinks).unsqueeze(1) & (columns.unsqueeze(1) <= rows)
        if window:
            visible = visible & (columns.unsqueeze(1) > rows - window)
        if chunk == ALL_BUT_FIRST:
            visible = visible & (columns.unsqueeze(1) >= rows.clamp(max=1))
        elif chunk:
            visible = visible & (columns.unsqueeze(1) >= rows // chunk * chunk)
        columns = columns.maximum(farthest.unsqueeze(1))  # blocks before the window are freed
        if queries.selected is not None:
            reached = max(*queries.ends, queries.selected.shape[2])
            chosen = visible.new_zeros(*visible.shape[:2], reached)
            chosen.scatter_(2, queries.selected, True)
            visible = visible & chosen.gather(2, columns.unsqueeze(1).expand_as(visible))
        if num_sinks:
            first = torch.arange(num_sinks, device=device).expand(len(ends), -1)
            columns = torch.cat((first.minimum(ends.unsqueeze(1) - 1), columns), dim=1)
            visible = torch.cat((first.unsqueeze(1) <= rows, visible), dim=2)
        keys, values = self._read(queries.tables, columns, layer)
        if c.latent is not None:
            values = keys[..., :width]
        if not num_sinks and not c.attention_softcap and not c.learned_sinks:
            return F.scaled_dot_product_attention(
                queries.at.transpose(1, 2),
                keys,
                values,
                attn_mask=visible.unsqueeze(1),
                scale=c.score_scale,
                enable_gqa=True,
            ).transpose(1, 2)
        at_once = max(1, MAX_SCORES // (visible.shape[0] * visible.shape[2] * c.num_heads))
        parts = [
            self._explicit(queries, keys, values, visible, slice(i, i + at_once), num_sinks)
            for i in range(0, count, at_once)
        ]
        return torch.cat(parts, dim=1)

    def _explicit(
        self,
        queries: _Queries,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor,
        part: slice,
        num_sinks: int,
    ) -> torch.Tensor:
        """Attention of `part` of the queries, score by score in float32: [S, n, num_heads, width].
        The first `num_sinks` columns are scored with `queries.to_sinks`."""
        num_kv_heads, cap = keys.shape[1], self._config.attention_softcap

        def scores(at: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
            grouped = at[:, part].float().unflatten(2, (num_kv_heads, -1))
            return torch.einsum("snhgd,shkd->shgnk", grouped, to.float()) * self._config.score_scale

        found = scores(queries.at, keys[:, :, num_sinks:])
        if queries.to_sinks is not None:
            sinks = scores(queries.to_sinks, keys[:, :, :num_sinks])
            found = torch.cat((sinks, found), dim=-1)
        if cap:
            found = (found / cap).tanh() * cap
        found.masked_fill_(~visible[:, part][:, None, None], float("-inf"))
        weights = self._softmax(found)
        mixed = torch.einsum("shgnk,shkd->snhgd", weights, values.float())
        return mixed.flatten(2, 3).to(self._dtype)

    def _softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """scores [S, num_kv_heads, group, n, K]; a learned sink counts, and adds no value."""
        if self._sinks is None:
            return scores.softmax(-1)
        of_heads = self._sinks.view(1, *scores.shape[1:3], 1, 1)
        sinks = of_heads.expand(*scores.shape[:4], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]

    def _read(
        self, tables: torch.Tensor, columns: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at positions `columns` [S, K]: each [S, num_kv_heads, K, dim]. With
        latents both are the same."""
        blocks = tables.long().gather(1, columns // self._size)
        offsets = columns % self._size
        planes = []
        for numbers, scales in self._planes[layer]:
            found = numbers[blocks, :, offsets]  # [S, K, heads, head_dim]
            if found.dtype == torch.uint8:
                found = fp8.decode(found, scales[blocks, :, offsets], self._dtype)
            planes.append(found.to(self._dtype).transpose(1, 2))
        return planes[0], planes[-1]

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not self._config.is_gated:
            return gate_up.relu().square()
        gate, up = gate_up.chunk(2, dim=-1)
        if self._config.activation == "clamped_swish":
            gate, up = gate.clamp(max=SWISH_LIMIT), up.clamp(-SWISH_LIMIT, SWISH_LIMIT)
            return (up + 1) * gate * torch.sigmoid(SWISH_ALPHA * gate)
        if self._config.activation == "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        return F.silu(gate) * up

    def experts(self, gate_ups: Stacked, downs: Stacked) -> tuple[torch.Tensor, ...]:
        """No copy if they have the right device and dtype already."""
        gate_ups, downs = widened(gate_ups), widened(downs)
        if bits := bits_of(self._quantization, "experts"):
            gate_ups, downs = (dequantize(*quantize(each, bits)) for each in (gate_ups, downs))
        return gate_ups.to(self._device, self._dtype), downs.to(self._device, self._dtype)

    def activated(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._gated(torch.cat((gate, x), dim=-1))

    def add_experts(
        self, hidden: torch.Tensor, x: torch.Tensor, layer: Any, routed: torch.Tensor | None = None
    ) -> None:
        gate_ups, downs = layer.experts
        routed = x if routed is None else routed
        logits = F.linear(routed.float(), layer.router, layer.router_bias)
        x, chosen, weights = choose_experts(x, logits, layer, self._config)
        bits = bits_of(self._quantization, "experts")
        x = self._inputs(x, bits)
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for index in chosen.unique().tolist():
            rows, choice = torch.where(chosen == index)
            of_gate_up, of_down = (
                None if bias is None else bias[index].to(self._dtype)
                for bias in (layer.gate_up_bias, layer.down_bias)
            )
            gated = self._gated(F.linear(x[rows], gate_ups[index], of_gate_up))
            part = F.linear(self._inputs(gated, bits), downs[index], of_down).float()
            part *= weights[rows, choice, None]
            total.index_add_(0, rows, part)
        hidden += total.to(hidden.dtype)


def _rotated(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """x [N, heads, dim] with its leading dimensions rotated (NeoX style); the others unchanged."""
    cos, sin = angles
    x1, x2, rest = x.float().tensor_split((cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1).to(x.dtype)
