"""States of sequences: what recurrent layers keep in place of keys and values.

A state has one size however long its sequence is, and stands for the tokens up to one position: a
step loads it, passes the tokens that follow, and stores what becomes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

NO_STATE = -1  # in place of a slot to load: a sequence begins, with zeros


@dataclass(frozen=True, slots=True)
class StateSpans:
    """Which states a step loads and stores in a group of layers: one entry for each segment of its
    token rows, in order, on the host. A sequence's rows are one segment, or several where the state
    between them is to be kept: then each loads what the one before it stored.

    A slot that one sequence stores is loaded and stored by no other in the same step; a slot that
    is loaded and not stored may be shared, and stays as it is."""

    rows: tuple[tuple[int, int], ...]  # (first, count); the count is at least 1
    load: tuple[int, ...]  # slots, or NO_STATE
    store: tuple[int, ...]  # slots

    def chains(self) -> list[range]:
        """Segments of one sequence each, which have to be passed one after the other."""
        starts = [
            index
            for index, slot in enumerate(self.load)
            if not index or slot == NO_STATE or slot != self.store[index - 1]
        ]
        return [range(a, b) for a, b in zip(starts, [*starts[1:], len(self.load)], strict=True)]


class StatePool:
    """Views of the states in memory that someone else owns: all bytes of a slot are contiguous."""

    def __init__(
        self,
        memory: torch.Tensor,
        shapes: Sequence[Mapping[str, tuple[int, ...]]],
        places: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        """memory: uint8 [num_slots, bytes], contiguous; shapes: `ModelConfig`'s `state_shapes`.
        places: `ModelConfig`'s `state_places`; None: a slot has all layers one after the other."""
        assert memory.dtype == torch.uint8
        assert memory.is_contiguous()
        self.memory = memory
        self._views: dict[tuple[int, str], torch.Tensor] = {}
        self._groups: dict[int, int] = {}
        slots, end = memory.view(torch.float32), 0
        self.stride = slots.shape[1]  # float32 from a slot to the next
        for layer, named in enumerate(shapes):
            if named:
                self._groups[layer], end = (0, end) if places is None else places[layer]
            for name, shape in named.items():
                first, end = end, end + torch.Size(shape).numel()
                assert end <= self.stride, (
                    f"{4 * end} bytes of states in a slot of {4 * self.stride}"
                )
                self._views[layer, name] = slots[:, first:end].unflatten(1, shape)

    def group(self, layer: int) -> int:
        """Which of a batch's `states` tell the slots of a recurrent layer."""
        return self._groups[layer]

    def view(self, layer: int, name: str) -> torch.Tensor:
        """[num_slots, *shape] float32, of a recurrent layer."""
        return self._views[layer, name]
