"""vLLM's memory for KV, as blocks of bytes that are read and written many at a time.

A block of ours has the bytes of one of vLLM's in each layer, one layer after the other, in the
order in which vLLM keeps them. A rank of several has some heads of these layers: in each of them,
runs of bytes between which are the heads of others (`Cut`). Layers whose memory is one run of equal
strides are one `Region`: one gather or scatter is all of their layers and all blocks of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

WORDS = (8, 4, 2, 1)  # bytes of what is copied at a time, as far as sizes and places divide
AXES = "BHNC"  # as vLLM shows a layer: blocks, heads, tokens, numbers of one


class Heads(NamedTuple):
    """Which KV heads of a layer a rank has: `own` of `total`, from `first` on."""

    total: int
    own: int
    first: int
    is_copy: bool = False  # a rank before it has the same ones

    @classmethod
    def of_rank(cls, total: int, own: int, rank: int, size: int) -> Heads | None:
        """As vLLM divides `total` among `size` tensor-parallel ranks: evenly, or where there are
        fewer heads than ranks, each to as many ranks in a row. None: it has divided them in another
        way, so that nobody knows which `own` are."""
        if total % size == 0:
            return cls(total, own, rank * own) if own * size == total else None
        if size % total or own != 1:
            return None
        copies = size // total
        return cls(total, 1, rank // copies, rank % copies > 0)


ALL = Heads(1, 1, 0)  # whatever their number


class Cut(NamedTuple):
    """Bytes of a layer's block that a rank has: in each of `num_runs` runs of `whole` bytes, `own`
    from `first` on."""

    num_runs: int
    own: int
    whole: int
    first: int

    @property
    def own_bytes(self) -> int:
        return self.num_runs * self.own

    @property
    def whole_bytes(self) -> int:
        return self.num_runs * self.whole


@dataclass(frozen=True, slots=True)
class Layer:
    """vLLM's memory for one; `tensor.select(dim, block)` is what it has in a block."""

    tensor: Any
    dim: int
    order: tuple[int, ...]  # dimensions of a block, that of the largest stride first
    shape: tuple[int, ...]  # a block's, by its dimensions, with the heads of all ranks
    cut: Cut
    is_copy: bool  # another rank has the same bytes

    @property
    def is_run(self) -> bool:
        """Whether a block of it is one run of bytes."""
        size = 1
        for dim in reversed(self.order):
            length = self.tensor.shape[dim]
            if length > 1 and self.tensor.stride(dim) != size:
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

    @property
    def form(self) -> LayerForm:
        about = [str(self.tensor.dtype), self.dim, [*self.shape], [*self.order]]
        return LayerForm(about, self.cut.whole_bytes)


class LayerForm(NamedTuple):
    """What is kept of a block in a layer, by all ranks that share it: two workers mean the same by
    the bytes of a block only if this is the same of all layers."""

    about: list[Any]  # dtype, dimension of blocks, shape, and order of the other dimensions
    num_bytes: int

    @property
    def dtype(self) -> str:
        return str(self.about[0]).removeprefix("torch.")

    @property
    def num_numbers(self) -> int:
        return prod(self.about[2])


class Region(NamedTuple):
    """Layers one after the other: `view` is `[num_layers, num_blocks, words]`, `at` the byte of a
    block of ours where its first layer is."""

    view: Any
    at: int
    cut: Cut  # each layer's
    is_copy: bool

    @property
    def num_bytes(self) -> int:
        """That it has of a block."""
        return int(self.view.shape[0]) * self.cut.own_bytes

    def of(self, pool: Any) -> Any:
        """Its bytes in blocks of ours, a view: `pool` is `[num_blocks, bytes_per_block]` bytes, and
        this `[num_blocks, num_layers, num_runs, words of a run]`."""
        size, (num, own, whole, first) = self.view.element_size(), self.cut
        end = self.at + self.view.shape[0] * self.cut.whole_bytes
        runs = pool[:, self.at : end].view(self.view.dtype)
        runs = runs.unflatten(1, (self.view.shape[0], num, whole // size))
        return runs[..., first // size : (first + own) // size]


def layer_of(tensor: Any, num_blocks: int, heads: Heads = ALL, layout: str = "") -> Layer | None:
    """None where it has no part for each block that is one run of bytes, or not these heads.
    `layout`: AXES as vLLM orders them in memory, which strides do not tell where there is one head.
    Attention may divide a block into smaller ones, which follow each other."""
    shape, dim = list(tensor.shape), 0
    if num_blocks in shape:
        dim = shape.index(num_blocks)
    elif shape[0] % num_blocks == 0:
        tensor = tensor.unflatten(0, (num_blocks, -1))
    else:
        return None
    kept = [each for each in range(tensor.dim()) if each != dim]
    places: dict[int, int] = {}
    if heads.own != heads.total:
        places = {tensor.dim() - len(AXES) + AXES.index(axis): n for n, axis in enumerate(layout)}
    order = sorted(kept, key=lambda each: (-tensor.stride(each), places.get(each, 0)))
    lengths = {each: tensor.shape[each] for each in kept}
    num_bytes = prod(lengths.values()) * tensor.element_size()
    cut = Cut(1, num_bytes, num_bytes, 0)
    if heads.own != heads.total:
        of_heads = tensor.dim() - len(AXES) + AXES.index("H")
        if lengths.get(of_heads) != heads.own:
            return None
        num_runs = prod(lengths[each] for each in order[: order.index(of_heads)])
        per_head = num_bytes // num_runs // heads.own
        cut = Cut(num_runs, *(per_head * each for each in (heads.own, heads.total, heads.first)))
        lengths[of_heads] = heads.total
    layer = Layer(tensor, dim, tuple(order), tuple(lengths.values()), cut, heads.is_copy)
    return layer if layer.is_run else None


def regions_of(layers: Sequence[Layer], at: int = 0) -> list[Region]:
    """As few as there can be without changing the order of layers. `at`: byte of a block of ours
    where the first is."""
    found: list[Region] = []
    for run in _runs(layers):
        found.append(Region(_view(run, at), at, run[0].cut, run[0].is_copy))
        at += len(run) * run[0].cut.whole_bytes
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
        and (layer.cut, layer.is_copy) == (first.cut, first.is_copy)
        and layer.stride == first.stride
    )
    step = layer.at - last.at
    return alike and step > 0 and (len(run) == 1 or step == run[1].at - first.at)


def _view(run: Sequence[Layer], at: int) -> Any:
    import torch

    first = run[0]
    step = run[1].at - first.at if len(run) > 1 else 0
    places = first.at, first.stride, step, at, *first.cut[1:]
    size = next(each for each in WORDS if not any(place % each for place in places))
    words = torch.empty(0, dtype=getattr(torch, f"int{8 * size}"), device=first.tensor.device)
    words.set_(first.tensor.untyped_storage())
    shape = len(run), first.tensor.shape[first.dim], first.cut.own_bytes // size
    return words.as_strided(shape, (step // size, first.stride // size, 1), first.at // size)


def gather(regions: Sequence[Region], blocks: Sequence[int]) -> list[Any]:
    """The bytes of these blocks of vLLM's as they are now: for each region `[num_layers, blocks,
    words]`. On a GPU it is done in the order of the current stream."""
    import torch

    index = torch.tensor(blocks, device=regions[0].view.device)
    return [each.view.index_select(1, index) for each in regions]


def unpack(
    regions: Sequence[Region],
    found: Sequence[Any],
    blocks: Iterable[int],
    rows: Iterable[int],
    pool: Any,
) -> None:
    """Writes blocks to `rows` of `pool`, `[num_blocks, bytes_per_block]` bytes. `found`: for each
    region `[num_layers, blocks, words]`, gathered or vLLM's own. All in host memory."""
    for ours, theirs in _pairs(regions, found, blocks, rows, pool):
        ours[...] = theirs


def scatter(
    regions: Sequence[Region], blocks: Sequence[int], rows: Sequence[int], pool: Any
) -> list[Any]:
    """Writes `rows` of `pool` to these blocks of vLLM's. Returns what is to be kept until they are
    written, on a GPU."""
    if not is_in_host_memory(regions):
        return scatter_at_once(regions, blocks, rows, pool)
    for ours, theirs in _pairs(regions, [each.view for each in regions], blocks, rows, pool):
        theirs[...] = ours
    return []


def scatter_at_once(
    regions: Sequence[Region], blocks: Sequence[int], rows: Sequence[int], pool: Any
) -> list[Any]:
    """Does what `scatter` does by one operation for each region, in the current stream."""
    import torch

    device, kept, wanted = regions[0].view.device, [], torch.tensor(rows)
    index = torch.tensor(blocks, device=device)
    for each in regions:
        staged = each.of(pool).index_select(0, wanted)
        if device.type != "cpu":
            kept.append(staged)
            staged = staged.pin_memory().to(device, non_blocking=True)
        source = staged.reshape(len(rows), each.view.shape[0], -1).transpose(0, 1)
        each.view.index_copy_(1, index, source)
    return kept


def is_in_host_memory(regions: Sequence[Region]) -> bool:
    return bool(regions[0].view.device.type == "cpu")


def _pairs(
    regions: Sequence[Region],
    found: Sequence[Any],
    blocks: Iterable[int],
    rows: Iterable[int],
    pool: Any,
) -> Iterator[tuple[Any, Any]]:
    """Views of the same bytes in ours and in vLLM's form. NumPy copies between them in one pass on
    this thread, without the GIL. Torch's gather would take new memory for all of them, whose pages
    cost more than the copy, and its copies would wake the threads that compute the model."""
    for region, source in zip(regions, found, strict=True):
        ours, theirs = region.of(pool).numpy(), source.numpy()
        for row, block in zip(rows, blocks, strict=True):
            yield ours[row], theirs[:, block].reshape(ours.shape[1:])


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
