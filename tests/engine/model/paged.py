"""Ragged batches over a paged pool for the Triton kernels, with the answer in float64.

Kernels are interpreted where there is no GPU: import this module before any of engine.model.gpu.
What no kernel may read is NaN: other sequences' blocks, slots past a context, blocks given back.
"""

import os
from dataclasses import dataclass

import torch

from kvrelay.engine.model import fp8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kvrelay.engine.model import device_memory  # noqa: E402
from kvrelay.engine.model.gpu import attention_decode, latent  # noqa: E402
from kvrelay.engine.model.gpu.attention_decode import list_splits  # noqa: E402
from kvrelay.engine.model.gpu.cache_pool import Pool  # noqa: E402


def split_early(monkeypatch, keys=32, most=3):
    """Contexts that an interpreter can read are split."""
    for module in (device_memory, attention_decode, latent):
        monkeypatch.setattr(module, "MIN_KEYS", keys)
    monkeypatch.setattr(device_memory, "MAX_SPLITS", most)


@dataclass
class Paged:
    """S sequences, N query tokens. `kv` [S][planes, kv_heads, context, head_dim]: what the pool
    holds of each, float64."""

    pool: Pool
    kv: list
    spans: list
    query_start: torch.Tensor
    query_len: torch.Tensor
    context_len: torch.Tensor
    block_tables: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return sum(span[1] for span in self.spans)

    @property
    def tensors(self) -> tuple:
        return self.query_start, self.query_len, self.context_len, self.block_tables

    @property
    def of_decodes(self) -> tuple:
        return self.query_start, self.context_len, self.block_tables

    def splits(self, num_heads, width, block_n, window=0):
        contexts = [context if count == 1 else 0 for _, count, context in self.spans]
        sizes = num_heads, width, block_n
        return list_splits(self.query_len, self.context_len, contexts, *sizes, window)


def paged(
    lengths, kv_heads, head_dim, *, dtype, kv_fp8=False, block_size=16, planes=2, layers=2, layer=1,
    given_back=0, sinks=0,
) -> Paged:  # fmt: skip
    """lengths: (query_len, context_len) of each sequence. given_back: a window; blocks that no
    query reads any more are -1."""
    counts = [-(-context // block_size) for _, context in lengths]
    order = iter((torch.randperm(sum(counts)) + 1).tolist())
    shape = (sum(counts) + 1, layers, planes, kv_heads)
    if kv_fp8:
        data = torch.full((*shape, block_size * (head_dim + 1)), 0x7F, dtype=torch.uint8)
        numbers, scales = fp8.parts(data, head_dim)
    else:
        data = torch.full((*shape, block_size, head_dim), float("nan"), dtype=dtype)
    tables = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)
    kv, spans, first = [], [], 0
    for seq, (count, context) in enumerate(lengths):
        values = (
            torch.randn(planes, kv_heads, context, head_dim)
            * torch.logspace(-1, 0.5, context)[:, None]
        )
        blocks = [next(order) for _ in range(counts[seq])]
        at = torch.arange(context)
        block, offset = torch.tensor(blocks)[at // block_size], at % block_size
        # Advanced indices around a slice come first: [context, planes, kv_heads, ...].
        if kv_fp8:
            number, scale = fp8.encode(values)
            numbers[block, layer, :, :, offset] = number.permute(2, 0, 1, 3)
            scales[block, layer, :, :, offset] = scale.permute(2, 0, 1)
            kv.append(fp8.decode(number, scale, torch.float32).double())
        else:
            data[block, layer, :, :, offset] = values.permute(2, 0, 1, 3).to(dtype)
            kv.append(values.to(dtype).double())
        tables[seq, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        if given_back:
            oldest = (context - count - given_back + 1) // block_size
            tables[seq, -(-sinks // block_size) : max(oldest, 0)] = -1
        spans.append((first, count, context))
        first += count
    starts = torch.tensor(spans, dtype=torch.int32).T.contiguous().to(DEVICE)
    return Paged(Pool(data.to(DEVICE), head_dim), kv, spans, *starts, tables.to(DEVICE))


def expected(
    case: Paged, queries, num_heads, scale, *, window=0, sinks=0, sink_queries=None, softcap=0.0,
    value_dim=None, head_sinks=None,
):  # fmt: skip
    """queries [N, num_heads, head_dim] -> [N, num_heads, value_dim], float64."""
    q, late = queries.double().cpu(), sink_queries
    out = []
    for (first, count, context), kv in zip(case.spans, case.kv, strict=True):
        group = num_heads // kv.shape[1]
        keys = kv[0].repeat_interleave(group, 0)  # [num_heads, context, head_dim]
        values = kv[-1].repeat_interleave(group, 0)[..., :value_dim]
        rows = q[first : first + count].transpose(0, 1)
        scores = rows @ keys.mT * scale
        p, n = torch.arange(context - count, context)[:, None], torch.arange(context)[None]
        visible = n <= p
        if window < 0:
            visible = visible & (n >= p // -window * -window)
        if window > 0:
            visible = visible & (n > p - window)
            before = (n <= p - window) & (n < sinks)
            if late is not None:
                rows = late.double().cpu()[first : first + count].transpose(0, 1)
                scores = torch.where(before, rows @ keys.mT * scale, scores)
            visible = visible | before
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if head_sinks is not None:
            more = head_sinks.double().cpu().view(-1, 1, 1).expand(-1, count, 1)
            scores = torch.cat((scores, more), dim=-1)
        weights = scores.softmax(-1)[..., :context]
        out.append((weights @ values).transpose(0, 1))
    return torch.cat(out)


def attention_case(
    lengths, heads, kv_heads, head_dim, block_size, dtype, kv_fp8, *, scale, fill, window=0,
    num_sinks=0, softcap=0.0, learned=False,
):  # fmt: skip
    """(case, queries as they lie in qkv, between rows of other numbers, `fill` as output, the
    kernels' options, the answer [N, num_heads, head_dim])."""
    case = paged(
        lengths, kv_heads, head_dim, dtype=dtype, kv_fp8=kv_fp8, block_size=block_size,
        given_back=max(window, 0), sinks=num_sinks,
    )  # fmt: skip
    width = heads * head_dim
    qkv = torch.randn(case.num_tokens, width + 2 * kv_heads * head_dim, device=DEVICE).to(dtype)
    late = torch.randn(case.num_tokens, width, device=DEVICE).to(dtype)
    queries, late_queries = (x.unflatten(1, (heads, head_dim)) for x in (qkv[:, :width], late))
    head_sinks = torch.linspace(-3, 5, heads, device=DEVICE) if learned else None
    answer = expected(
        case, queries, heads, scale, window=window, sinks=num_sinks, sink_queries=late_queries,
        softcap=softcap, head_sinks=head_sinks,
    )  # fmt: skip
    options = {"num_heads": heads, "scale": scale, "window": window, "num_sinks": num_sinks}
    options |= {"softcap": softcap, "sink_queries": late if num_sinks else None}
    options["head_sinks"] = head_sinks
    return case, qkv, torch.full_like(late, fill), options, answer
