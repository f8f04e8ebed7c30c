"""The decoder's operations in plain torch: any device, any dtype. The reference for the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.ops import rope_tables


class TorchOps:
    """Owned by one runner. The residual stream has the weights' dtype; norms compute in float32."""

    def __init__(
        self, config: ModelConfig, pool: torch.Tensor, dtype: torch.dtype, max_positions: int
    ) -> None:
        """pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
        self._config = config
        self._pool = pool
        self._dtype = dtype
        self._cos, self._sin = rope_tables(config, max_positions, pool.device)
        self._batch: Batch | None = None

    def table(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self._pool.device, self._dtype, copy=True)  # not a view of the file

    def matrix(
        self, weight: torch.Tensor, bias: torch.Tensor | None, role: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.table(weight), None if bias is None else self.table(bias)

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        return self.table(weight)

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        size = self._pool.shape[4]
        self._block, self._offset = batch.slots // size, batch.slots % size
        # [N, 1, head_dim / 2]
        self._angles = (
            self._cos[batch.positions].unsqueeze(1),
            self._sin[batch.positions].unsqueeze(1),
        )

    def embed(self, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return table[tokens]

    def linear(
        self, x: torch.Tensor, matrix: tuple[torch.Tensor, torch.Tensor | None]
    ) -> torch.Tensor:
        return F.linear(x, matrix[0], matrix[1])

    def add_linear(
        self,
        hidden: torch.Tensor,
        x: torch.Tensor,
        matrix: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        hidden += F.linear(x, matrix[0], matrix[1])

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return weight * (wide * scale).to(x.dtype)

    def rope_write(
        self,
        qkv: torch.Tensor,
        layer: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> None:
        c = self._config
        heads = qkv.view(len(qkv), -1, c.head_dim)  # [N, num_heads + 2 * num_kv_heads, head_dim]
        queries, keys, values = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            queries.copy_(self.rms_norm(queries, q_norm))
            keys.copy_(self.rms_norm(keys, k_norm))
        both = heads[:, : c.num_heads + c.num_kv_heads].float()
        x1, x2 = both.chunk(2, dim=-1)
        cos, sin = self._angles
        heads[:, : c.num_heads + c.num_kv_heads] = torch.cat(
            (x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1
        ).to(heads.dtype)
        kv = self._pool[:, layer]  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        kv[self._block, 0, :, self._offset] = keys.to(kv.dtype)
        kv[self._block, 1, :, self._offset] = values.to(kv.dtype)

    def attention(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        c, batch = self._config, self._batch
        assert batch is not None
        queries = qkv[:, : c.num_heads * c.head_dim].view(len(qkv), c.num_heads, c.head_dim)
        kv = self._pool[:, layer]
        if all(span[1] == 1 for span in batch.spans):
            return self._one_token_each(queries, kv).flatten(1)
        out = torch.empty_like(queries)
        for index, (first, count, context) in enumerate(batch.spans):
            keys, values = self._gather(kv, batch.block_tables[index : index + 1], context)
            rows = torch.arange(context - count, context, device=kv.device)
            visible = torch.arange(context, device=kv.device) <= rows.unsqueeze(1)
            q = queries[first : first + count].transpose(0, 1).unsqueeze(0)
            attended = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=visible, enable_gqa=True
            )
            out[first : first + count] = attended[0].transpose(0, 1)
        return out.flatten(1)

    def _one_token_each(self, queries: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """A pure decode batch at once, padded to the longest context: [S, num_heads, head_dim]."""
        batch = self._batch
        assert batch is not None
        longest = max(span[2] for span in batch.spans)
        keys, values = self._gather(kv, batch.block_tables, longest)
        visible = torch.arange(longest, device=kv.device) < batch.context_len.unsqueeze(1)
        return F.scaled_dot_product_attention(
            queries.unsqueeze(2), keys, values, attn_mask=visible[:, None, None], enable_gqa=True
        ).squeeze(2)

    def _gather(
        self, kv: torch.Tensor, tables: torch.Tensor, context: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions [0, context): each [S, num_kv_heads, context, head_dim]."""
        blocks = kv[tables.long()]  # [S, blocks, 2, num_kv_heads, block_size, head_dim]
        flat = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :context].to(self._dtype)
        return flat[0], flat[1]

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
