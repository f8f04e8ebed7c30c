"""States of sequences: what recurrent layers keep in place of keys and values.

A state has one size however long its sequence is, and stands for the tokens up to one position: a
step loads it, passes the tokens that follow, and stores what becomes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvrelay.engine.model.state_layout import StateLayout

NO_STATE = -1  # in place of a slot; to load: a sequence begins, with zeros


@dataclass(frozen=True, slots=True)
class StateSpans:
    """Which states a step loads and stores in a group of layers: one entry for each segment of its
    token rows, in order, on the host. A sequence's rows are one segment, or several where the state
    between them is to be kept: then each loads what the one before it stored.

    A slot that one sequence stores is loaded and stored by no other in the same step; a slot that
    is loaded and not stored may be shared, and stays as it is."""

    rows: tuple[tuple[int, int], ...]  # (first, count); the count is at least 1
    load: tuple[int, ...]  # slots, or NO_STATE
    store: tuple[int, ...]  # slots, or NO_STATE: what comes out is given up

    def chains(self) -> list[range]:
        """Segments of one sequence each, which have to be passed one after the other."""
        starts = [
            index
            for index, slot in enumerate(self.load)
            if not index or slot == NO_STATE or slot != self.store[index - 1]
        ]
        return [range(a, b) for a, b in zip(starts, [*starts[1:], len(self.load)], strict=True)]


class StatePool:
    """Views of the states in memory that someone else owns: those of a slot are contiguous."""

    def __init__(
        self,
        memory: torch.Tensor,
        layout: StateLayout,
        places: Mapping[int, tuple[int, int]],
        units: tuple[int, int] | None = None,
    ) -> None:
        """memory: uint8 [num_slots, bytes], which may be parts of wider rows; layout: of a layer's
        state in the units that are computed here; places: `ModelConfig.state_places`; units: how
        many units a slot has, and which is the first of these; None: it has no others."""
        assert memory.dtype == torch.uint8
        assert memory.stride(1) == 1
        stored, first = units or (layout.num_units, 0)
        self.memory, self.layout = memory, layout
        slots = memory.view(torch.float32)
        self.stride = slots.stride(0)  # float32 from a slot to the next
        self.unit_stride = slots.shape[1] // stored  # from a unit to the next
        self._units = slots.unflatten(1, (stored, -1))[:, first : first + layout.num_units]
        self.places = places
        most = max(at for _, at in places.values()) + layout.unit_size
        assert most <= self.unit_stride, f"{most} of {self.unit_stride} float32 in a unit"
        order = [  # channels as they are stored, row by row of all units
            (unit, run.at + index, run.first + index)
            for run in layout.runs()
            for unit in range(run.unit, run.unit + run.copies)
            for index in range(run.width)
        ]
        self._channels = torch.tensor([channel for *_, channel in sorted(order)])
        stored_at = {channel: at for at, (*_, channel) in reversed([*enumerate(sorted(order))])}
        self._stored_at = torch.tensor([stored_at[channel] for channel in sorted(stored_at)])

    def group(self, layer: int) -> int:
        """Which of a batch's `states` tell the slots of a recurrent layer."""
        return self.places[layer][0]

    def conv(self, layer: int) -> torch.Tensor:
        """[num_slots, num_units, conv_rows, unit_channels] float32, of a recurrent layer."""
        at, own = self.places[layer][1], self.layout
        rows = self._units[:, :, at : at + own.memory_at]
        return rows.unflatten(2, (own.conv_rows, own.unit_channels))

    def memory_of(self, layer: int) -> torch.Tensor:
        """[num_slots, num_units, heads of a unit, key_dim, value_dim] float32, of a layer."""
        at, own = self.places[layer][1], self.layout
        heads = self._units[:, :, at + own.memory_at : at + own.unit_size]
        return heads.unflatten(2, (own.num_heads, own.key_dim, own.value_dim))

    def load_conv(self, layer: int, slot: int) -> torch.Tensor:
        """A fresh [conv_rows, channels], in the order of the convolution; NO_STATE: zeros."""
        own, order = self.layout, self._stored_at.to(self.memory.device)
        if slot == NO_STATE:
            return self._units.new_zeros(own.conv_rows, len(order))
        return self.conv(layer)[slot].transpose(0, 1).flatten(1)[:, order]

    def store_conv(self, layer: int, slot: int, rows: torch.Tensor) -> None:
        """Stores nothing where `slot` is NO_STATE."""
        if slot == NO_STATE:
            return
        stored = rows[:, self._channels.to(rows.device)]
        self.conv(layer)[slot] = stored.unflatten(1, (self.layout.num_units, -1)).transpose(0, 1)

    def load_memory(self, layer: int, slot: int) -> torch.Tensor:
        """A fresh [num_heads, key_dim, value_dim]; NO_STATE: zeros."""
        memory = self.memory_of(layer)
        found = torch.zeros_like(memory[0]) if slot == NO_STATE else memory[slot].clone()
        return found.flatten(0, 1)

    def store_memory(self, layer: int, slot: int, heads: torch.Tensor) -> None:
        if slot != NO_STATE:
            self.memory_of(layer)[slot] = heads.unflatten(0, (self.layout.num_units, -1))
