"""Terms of rows on a CPU: packed for the kernels, which add them behind a product, or in the same
call that runs all layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kvrelay.engine.model.cpu.huge_pages import HugePages
from kvrelay.engine.model.cpu.kernels import structure
from kvrelay.engine.model.terms import RowTerms, TermRows

_Term, _TermRows = structure("Term"), structure("TermRows")


@dataclass(frozen=True, slots=True)
class CpuTerm:
    """A term as the kernels' struct says."""

    data: torch.Tensor
    spans: torch.Tensor
    described: Any
    kernels: Any
    num_threads: int

    @property
    def width(self) -> int:
        width: int = self.described.rows
        return width

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.spans.nbytes

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Adds to `out` as `Term.add` says."""
        assert x.stride(1) == out.stride(1) == 1
        self.kernels.kvr_add_term(
            ctypes.addressof(self.described),
            *(x.data_ptr(), len(x), x.stride(0), out.data_ptr(), out.stride(0), self.num_threads),
        )


def pack_term(
    kernels: Any,
    num_threads: int,
    down: torch.Tensor,
    up: torch.Tensor,
    memory: HugePages,
    *,
    bf16: bool,
    in_panels: bool,
) -> CpuTerm:
    """As `Ops.term`; bf16: words are pairs; in_panels: the rows of `up` are [gate; up], and come in
    the order of a packed gated matrix."""
    vector, per_word = kernels.kvr_vector_width(), 2 if bf16 else 1
    if in_panels:
        up = _in_panels(up, vector)
    kind = torch.bfloat16 if bf16 else torch.float32
    shape = {"ranks": -(-len(down) // vector) * vector, "depth": down.shape[1], "rows": len(up)}
    down = _padded(down, vector, per_word)
    up = F.pad(up, (0, shape["ranks"] - up.shape[1], 0, -len(up) % vector))
    spans = _spans(up.unflatten(0, (-1, vector)).any(1), per_word)
    sizes = spans[:, 1] * vector * per_word
    first = down.numel() + sizes.cumsum(0) - sizes
    packed = torch.empty(down.numel() + int(sizes.sum()), dtype=kind)
    packed[: down.numel()] = _words(down, vector, per_word).flatten()
    for start, count in spans.unique(dim=0).tolist():
        if not count:  # rows of a projection to which nothing is added
            continue
        chosen = (spans == torch.tensor([start, count])).all(1)
        ranks = up.unflatten(0, (-1, vector))[chosen][:, :, start * per_word :]
        ranks = ranks[:, :, : count * per_word].flatten(0, 1)
        at = first[chosen].unsqueeze(1) + torch.arange(count * per_word * vector)
        packed[at] = _words(ranks, vector, per_word).flatten(1).to(kind)
    data = memory.take(packed.nbytes)
    data.copy_(packed.view(torch.int8))
    addresses = data.data_ptr(), spans.data_ptr()
    described = _Term(*addresses, **shape, pairs=per_word - 1)
    return CpuTerm(data, spans, described, kernels, num_threads)


def put_terms(step: Any, terms: Sequence[TermRows]) -> Any:
    """Into the kernels' step; returns what has to live as long as it is used."""
    rows = (_TermRows * len(terms))()
    for to, (first, count, each) in zip(rows, terms, strict=True):
        if each.described is None:
            each.described = _described(each)
        of = each.described
        to.of, to.count, to.first, to.rows = ctypes.addressof(of), len(of), first, count
    step.terms, step.num_terms = ctypes.addressof(rows) if terms else None, len(terms)
    return rows


def _described(terms: RowTerms) -> ctypes.Array[Any]:
    """By the numbers of matrices."""
    count = 1 + max((matrix.number for matrix, _ in terms.pairs), default=0)
    described = (_Term * count)()
    for matrix, term in terms.pairs:
        described[matrix.number] = term.described
    return described


def _in_panels(weight: torch.Tensor, width: int) -> torch.Tensor:
    halves = torch.stack(weight.chunk(2))  # [2, rows, rank]
    halves = F.pad(halves, (0, 0, 0, -halves.shape[1] % width))
    return halves.unflatten(1, (-1, width)).transpose(0, 1).flatten(0, 2)


def _padded(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """To whole vectors of rows and words of columns."""
    return F.pad(weight, (0, -weight.shape[1] % columns, 0, -len(weight) % rows))


def _words(weight: torch.Tensor, vector: int, per_word: int) -> torch.Tensor:
    """[blocks, depth in words, vector, per_word] of a weight [blocks * vector, depth]."""
    return weight.view(-1, vector, weight.shape[1] // per_word, per_word).transpose(1, 2)


def _spans(used: torch.Tensor, per_word: int) -> torch.Tensor:
    """used [blocks, ranks]: which are not zero -> [blocks, 2]: first word of them, and how many."""
    counted = torch.arange(1, used.shape[1] + 1) * used
    end = (counted.amax(1) + per_word - 1) // per_word
    first = used.int().argmax(1) // per_word
    return torch.stack((first, (end - first).where(end > 0, 0)), 1).contiguous()
