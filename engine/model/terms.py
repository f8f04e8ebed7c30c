"""What some rows of a batch add to the products with a model's matrices, beside the others: terms
up @ (down @ x), as a set of operations has prepared them. Batches, decoder and kernels take them
from here, whoever has loaded them (`engine.model.loads`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from kvrelay.engine.step import ScheduledSeq


class Term(Protocol):
    """Prepared by `Ops.term` for one matrix."""

    @property
    def nbytes(self) -> int: ...

    @property
    def width(self) -> int:
        """Columns of what it is added to."""
        ...

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [n, width] += (x [n, in] @ down) @ up."""
        ...


@dataclass(frozen=True, slots=True)
class TensorTerm:
    """A term as plain tensors."""

    down: torch.Tensor  # [rank, in]
    up: torch.Tensor  # [out, rank]

    @property
    def width(self) -> int:
        return len(self.up)

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Adds to `out` as `Term.add` says."""
        out += F.linear(F.linear(x, self.down), self.up)


@dataclass(slots=True)
class RowTerms:
    """Terms of one need: pairs of a matrix, as a set of operations has prepared it, and what that
    set made of the term."""

    pairs: tuple[tuple[Any, Any], ...]
    by_matrix: dict[int, Term] = field(init=False)  # by the matrix' id
    described: Any = None  # as kernels want it, made when it is first used

    def __post_init__(self) -> None:
        self.by_matrix = {id(matrix): term for matrix, term in self.pairs}

    @property
    def nbytes(self) -> int:
        return sum(term.nbytes for _, term in self.pairs)


class TermRows(NamedTuple):
    """Rows [first, first + num_rows) of a batch have these terms."""

    first: int
    num_rows: int
    terms: RowTerms

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.num_rows)


NOTHING_LOADED: Mapping[bytes, RowTerms] = MappingProxyType({})


def by_need(seqs: Sequence[ScheduledSeq], indices: Iterable[int]) -> list[int]:
    """`indices` of `seqs`, those that need something behind the others, grouped."""
    return sorted(indices, key=lambda index: _digest(seqs[index]))


def term_rows(
    seqs: Sequence[ScheduledSeq], counts: Sequence[int], loaded: Mapping[bytes, RowTerms]
) -> tuple[TermRows, ...]:
    """counts: rows of each sequence, which are ordered by what they need."""
    found: list[TermRows] = []
    first = 0
    for digest, group in groupby(zip(seqs, counts, strict=True), lambda pair: _digest(pair[0])):
        count = sum(each for _, each in group)
        if digest:
            found.append(TermRows(first, count, loaded[digest]))
        first += count
    return tuple(found)


def add_terms(rows: Sequence[TermRows], out: torch.Tensor, x: torch.Tensor, matrix: object) -> None:
    """Adds to the rows of `out`, the product of x with `matrix`, what they have for it."""
    for each in rows:
        term = each.terms.by_matrix.get(id(matrix))
        if term is not None:
            term.add(out[each.rows], x[each.rows])


def added_to_gated(
    rows: Sequence[TermRows], x: torch.Tensor, matrix: object
) -> torch.Tensor | None:
    """[n, width] for `Ops.gated`: what is added to products before the activation; None: nothing
    is."""
    found = (each.terms.by_matrix.get(id(matrix)) for each in rows)
    width = next((term.width for term in found if term is not None), 0)
    if not width:
        return None
    added = x.new_zeros(len(x), width)
    add_terms(rows, added, x, matrix)
    return added


def _digest(seq: ScheduledSeq) -> bytes:
    return b"" if seq.need is None else seq.need.digest
