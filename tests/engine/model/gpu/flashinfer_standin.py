"""A stand-in for the flashinfer package: the entry points that are called, in plain torch.

Each call's keywords have to be the real ones (`flashinfer_parameters`), its tensors have to be what
the real kernels take (strides, types, page numbers), and it is recorded. Results are computed in
float32 from the views and page lists that were given.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.engine.model.gpu.flashinfer_parameters import PARAMETERS, VERSION

SEMAPHORE_BYTES = 8 << 20


class StandIn(SimpleNamespace):
    """To be put into `sys.modules` as flashinfer, and its `decode` as flashinfer.decode. `calls`:
    (name, keywords) of each call, in order. `wrong` is added to every result."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.wrong = 0.0
        super().__init__(
            __version__=VERSION,
            decode=SimpleNamespace(trtllm_batch_decode_with_kv_cache=self._decode),
            BatchPrefillWithPagedKVCacheWrapper=lambda *args, **keywords: _Paged(
                self, *args, **keywords
            ),
            BatchPrefillWithRaggedKVCacheWrapper=lambda *args, **keywords: _Ragged(
                self, *args, **keywords
            ),
            cutlass_fused_moe=self._fused_moe,
        )

    def note(self, name: str, keywords: dict[str, Any], num_positional: int = 0) -> None:
        required, others = (names.split() for names in PARAMETERS[name])
        assert set(keywords) <= {*required, *others}, name
        assert set(required[num_positional:]) <= set(keywords), name
        self.calls.append((name, keywords))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [keywords for each, keywords in self.calls if each == name]

    def give(self, out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        assert out.shape == result.shape
        return out.copy_(result + self.wrong)

    def _decode(self, **given: Any) -> torch.Tensor:
        self.note("trtllm_batch_decode_with_kv_cache", given)
        query, tables, lengths = given["query"], given["block_tables"], given["seq_lens"]
        keys, values = pages_of(given["kv_cache"], given["kv_layout"])
        assert query.is_contiguous()
        assert tables.is_contiguous()  # its width is taken as the distance of rows
        assert tables.dtype == lengths.dtype == torch.int32
        assert given["out"].is_contiguous()
        assert keys.shape[2] in (16, 32, 64, 128)
        assert not given["workspace_buffer"][:SEMAPHORE_BYTES].any()
        assert int(lengths.max()) <= given["max_seq_len"]
        assert int(tables.min()) >= 0
        assert int(tables.max()) < len(keys)
        assert given["bmm2_scale"] == 1.0
        results = [
            attended(
                query[seq : seq + 1],
                gathered(keys, tables[seq], int(length)),
                gathered(values, tables[seq], int(length)),
                given["bmm1_scale"],
                window_left=given["window_left"],
            )
            for seq, length in enumerate(lengths.tolist())
        ]
        return self.give(given["out"], torch.cat(results))

    def _fused_moe(self, **given: Any) -> list[torch.Tensor]:
        self.note("cutlass_fused_moe", given)
        x, chosen, scales = (
            given[name] for name in ("input", "token_selected_experts", "token_final_scales")
        )
        first, second = given["fc1_expert_weights"], given["fc2_expert_weights"]
        assert chosen.dtype == torch.int32
        assert scales.dtype == torch.float32
        assert all(each.is_contiguous() for each in (x, chosen, scales, first, second))
        assert given["quant_scales"] == []
        out = torch.zeros(x.shape, dtype=torch.float32)
        for token, (experts, weights) in enumerate(zip(chosen.tolist(), scales, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                up, gate = (first[expert].float() @ x[token].float()).chunk(2)
                active = torch.nn.functional.silu(gate) * up
                out[token] += weight * (second[expert].float() @ active)
        return [self.give(given["output"], out)]


class _Paged:
    def __init__(self, owner: StandIn, workspace: torch.Tensor, **given: Any) -> None:
        owner.note("BatchPrefillWithPagedKVCacheWrapper", given, num_positional=1)
        assert workspace.dtype == torch.uint8
        self._owner, self._layout, self._plan = owner, given["kv_layout"], dict[str, Any]()

    def plan(self, **given: Any) -> None:
        self._owner.note("BatchPrefillWithPagedKVCacheWrapper.plan", given)
        host = ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len")
        assert all(given[name].device.type == "cpu" for name in host)  # or plan() waits
        assert all(given[name].dtype == torch.int32 for name in (*host, "paged_kv_indices"))
        assert len(given["paged_kv_indices"]) == given["paged_kv_indptr"][-1]
        self._plan = given

    def run(self, **given: Any) -> torch.Tensor:
        self._owner.note("BatchPrefillWithPagedKVCacheWrapper.run", given)
        plan, q = self._plan, given["q"]
        keys, values = pages_of(given["paged_kv_cache"], self._layout)
        assert q.stride(-1) == 1
        assert q.shape == (plan["qo_indptr"][-1], plan["num_qo_heads"], plan["head_dim_qk"])
        assert q.dtype == plan["q_data_type"]
        assert keys.dtype == plan["kv_data_type"]
        assert keys.shape[1:] == (plan["num_kv_heads"], plan["page_size"], plan["head_dim_qk"])
        assert plan["causal"]
        starts, indices = plan["paged_kv_indptr"].tolist(), plan["paged_kv_indices"]
        assert int(indices.min()) >= 0
        assert int(indices.max()) < len(keys)
        rows, results = plan["qo_indptr"].tolist(), []
        for seq, last in enumerate(plan["paged_kv_last_page_len"].tolist()):
            assert 1 <= last <= plan["page_size"]
            own = indices[starts[seq] : starts[seq + 1]]
            length = (len(own) - 1) * plan["page_size"] + last
            results.append(
                attended(
                    q[rows[seq] : rows[seq + 1]],
                    gathered(keys, own, length),
                    gathered(values, own, length),
                    plan["sm_scale"],
                    window_left=plan["window_left"],
                    softcap=plan["logits_soft_cap"],
                )
            )
        return self._owner.give(given["out"], torch.cat(results))


class _Ragged:
    def __init__(self, owner: StandIn, workspace: torch.Tensor, **given: Any) -> None:
        owner.note("BatchPrefillWithRaggedKVCacheWrapper", given, num_positional=1)
        assert given["kv_layout"] == "NHD"
        self._owner, self._plan = owner, dict[str, Any]()

    def plan(self, **given: Any) -> None:
        self._owner.note("BatchPrefillWithRaggedKVCacheWrapper.plan", given)
        assert all(given[name].device.type == "cpu" for name in ("qo_indptr", "kv_indptr"))
        self._plan = given

    def run(self, **given: Any) -> torch.Tensor:
        self._owner.note("BatchPrefillWithRaggedKVCacheWrapper.run", given)
        plan, q, k, v = self._plan, given["q"], given["k"], given["v"]
        assert all(each.stride(-1) == 1 for each in (q, k, v))
        assert q.shape == (plan["qo_indptr"][-1], plan["num_qo_heads"], plan["head_dim_qk"])
        assert k.shape == (plan["kv_indptr"][-1], plan["num_kv_heads"], plan["head_dim_qk"])
        assert v.shape == (*k.shape[:2], plan["head_dim_vo"])
        rows, keys = plan["qo_indptr"].tolist(), plan["kv_indptr"].tolist()
        results = [
            attended(
                q[rows[seq] : rows[seq + 1]],
                k[keys[seq] : keys[seq + 1]].transpose(0, 1),
                v[keys[seq] : keys[seq + 1]].transpose(0, 1),
                plan["sm_scale"],
            )
            for seq in range(len(rows) - 1)
        ]
        return self._owner.give(given["out"], torch.cat(results))


def pages_of(
    pages: tuple[torch.Tensor, torch.Tensor], layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_pages, num_kv_heads, page_size, head_dim], with equal strides."""
    keys, values = pages
    assert layout == "HND"
    assert keys.stride() == values.stride()
    assert keys.stride(-1) == 1
    return keys, values


def gathered(pages: torch.Tensor, numbers: torch.Tensor, length: int) -> torch.Tensor:
    """Returns [num_kv_heads, length, head_dim] from its pages."""
    count = -(-length // pages.shape[2])
    return pages[numbers[:count].long()].transpose(0, 1).flatten(1, 2)[:, :length]


def attended(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    window_left: int = -1,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal, aligned at the ends: q [n, num_heads, dim], keys and values [num_kv_heads, length,
    dim] -> [n, num_heads, value_dim]. What no query sees is not read."""
    count, length, group = len(q), keys.shape[1], q.shape[1] // keys.shape[0]
    position = torch.arange(length - count, length, device=q.device)[:, None]
    column = torch.arange(length, device=q.device)[None]
    visible = column <= position
    if window_left >= 0:
        visible &= column >= position - window_left
    first = int(visible.any(0).nonzero()[0])
    keys, values = (each[:, first:].float().repeat_interleave(group, 0) for each in (keys, values))
    scores = q.float().transpose(0, 1) @ keys.mT * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(~visible[:, first:], float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1)
