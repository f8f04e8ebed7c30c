"""vLLM's memory for KV, as blocks of bytes that are read and written many at a time.

A block of ours has the bytes of one of vLLM's in each layer, one layer after the other, in the
order in which vLLM keeps them. Layers whose memory is one run of equal strides are one `Region`:
one gather or scatter is all of their layers and all blocks of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

WORDS = (8, 4, 2, 1)  # bytes of what is copied at a time, as far as sizes and places divide


class Layer(NamedTuple):
    """vLLM's memory for one; `tensor.select(dim, block)` is what it has in a block."""

    tensor: Any
    dim: int

    @property
    def block(self) -> Any:
        return self.tensor.select(self.dim, 0)

    @property
    def num_bytes(self) -> int:
        """That it has in a block."""
        return int(self.block.numel() * self.block.element_size())

    @property
    def is_run(self) -> bool:
        """Whether a block of it is one run of bytes."""
        size = 1
        for stride, length in sorted(zip(self.block.stride(), self.block.shape, strict=True)):
            if length > 1 and stride != size:
                return False
            size *= length
        return True

    @property
    def at(self) -> int:
        """Byte of its storage at which its first block begins."""
        return int(self.tensor.storage_offset() * self.tensor.element_size())

    @property
    def stride(self) -> int:
        """Bytes from one block to the next."""
        return int(self.tensor.stride(self.dim) * self.tensor.element_size())


class Region(NamedTuple):
    """Layers one after the other: `view` is `[num_layers, num_blocks, words]`, `at` the byte of a
    block of ours where its first layer is."""

    view: Any
    at: int

    @property
    def num_bytes(self) -> int:
        return int(self.view.shape[0] * self.view.shape[2] * self.view.element_size())


def layer_of(tensor: Any, num_blocks: int) -> Layer | None:
    """None where it has no part for each block that is one run of bytes. Attention may divide a
    block into smaller ones, which follow each other."""
    shape = list(tensor.shape)
    if num_blocks in shape:
        layer = Layer(tensor, shape.index(num_blocks))
    elif shape[0] % num_blocks == 0:
        layer = Layer(tensor.unflatten(0, (num_blocks, -1)), 0)
    else:
        return None
    return layer if layer.is_run else None


def regions_of(layers: Sequence[Layer]) -> list[Region]:
    """As few as there can be without changing the order of layers."""
    found: list[Region] = []
    at = 0
    for run in _runs(layers):
        found.append(Region(_view(run, at), at))
        at += sum(each.num_bytes for each in run)
    return found


def _runs(layers: Sequence[Layer]) -> Iterable[list[Layer]]:
    run: list[Layer] = []
    for layer in layers:
        if run and not _continues(run, layer):
            yield run
            run = []
        run.append(layer)
    if run:
        yield run


def _continues(run: Sequence[Layer], layer: Layer) -> bool:
    first, last = run[0], run[-1]
    alike = (
        layer.tensor.untyped_storage().data_ptr() == first.tensor.untyped_storage().data_ptr()
        and layer.num_bytes == first.num_bytes
        and layer.stride == first.stride
    )
    step = layer.at - last.at
    return alike and step > 0 and (len(run) == 1 or step == run[1].at - first.at)


def _view(run: Sequence[Layer], at: int) -> Any:
    import torch

    first = run[0]
    step = run[1].at - first.at if len(run) > 1 else 0
    places = first.at, first.stride, step, first.num_bytes, at
    size = next(each for each in WORDS if not any(place % each for place in places))
    words = torch.empty(0, dtype=getattr(torch, f"int{8 * size}"), device=first.tensor.device)
    words.set_(first.tensor.untyped_storage())
    shape = len(run), first.tensor.shape[first.dim], first.num_bytes // size
    return words.as_strided(shape, (step // size, first.stride // size, 1), first.at // size)


def gather(regions: Sequence[Region], blocks: Sequence[int]) -> list[Any]:
    """The bytes of these blocks of vLLM's as they are now: for each region `[num_layers, blocks,
    words]`. On a GPU it is done in the order of the current stream."""
    import torch

    index = torch.tensor(blocks, device=regions[0].view.device)
    return [each.view.index_select(1, index) for each in regions]


def unpack(regions: Sequence[Region], gathered: Sequence[Any], rows: Any, pool: Any) -> None:
    """Writes what was gathered to `rows` of `pool`, `[num_blocks, bytes_per_block]` bytes."""
    for region, found in zip(regions, gathered, strict=True):
        for row, block in zip(rows, found.unbind(1), strict=True):
            target = pool[row, region.at : region.at + region.num_bytes]
            target.view(found.dtype).view(block.shape).copy_(block)


def scatter(
    regions: Sequence[Region], blocks: Sequence[int], rows: Sequence[int], pool: Any
) -> Any:
    """Writes `rows` of `pool` to these blocks of vLLM's. Returns what is to be kept until they are
    written, on a GPU."""
    import torch

    device, kept = regions[0].view.device, []
    index, staged = torch.tensor(blocks, device=device), pool.index_select(0, torch.tensor(rows))
    if device.type != "cpu":
        kept.append(staged)
        staged = staged.pin_memory().to(device, non_blocking=True)
    for each in regions:
        part = staged[:, each.at : each.at + each.num_bytes].view(each.view.dtype)
        source = part.reshape(len(rows), each.view.shape[0], -1).transpose(0, 1)
        each.view.index_copy_(1, index, source)
    return kept


def begun() -> Any:
    """What was begun on this thread's stream of a GPU is done when this is."""
    import torch

    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


_streams: dict[Any, Any] = {}  # by device: the copying thread's


def to_host(found: Sequence[Any], event: Any) -> list[Any]:
    """What was gathered on a GPU before `event`, by a stream of its own, beside the steps."""
    import torch

    device = found[0].device
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream = _streams[device]
    with torch.cuda.stream(stream):
        stream.wait_event(event)
        here = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in found]
        for each, target in zip(found, here, strict=True):
            each.record_stream(stream)
            target.copy_(each, non_blocking=True)
    stream.synchronize()
    return here
