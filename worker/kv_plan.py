"""How much KV a worker holds: planned from the model's shape and the memory that is set, without
torch, before anything is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvrelay.engine.config import DiskCodec, EngineSection
from kvrelay.engine.kv.spec import DTYPE_BYTES, SCALE_BYTES, KVSpec
from kvrelay.engine.kv.window import Window, Windows
from kvrelay.engine.model.checkpoint.drafters import read_drafter
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.config import ModelConfig, weights_bytes, with_window
from kvrelay.engine.model.device_memory import CUDA_BYTES, DeviceMemory, step_bytes
from kvrelay.engine.model.parallel.shard import extra_weights_bytes
from kvrelay.engine.stats import WorkerInfo
from kvrelay.kvtransfer.kivi import coded_bytes, why_exact

GIB = float(1 << 30)
SPARE_BYTES = 500 << 20  # what a process has beside weights and KV: libraries, activations
AUTO_HOST_SHARE = 0.25  # a host tier whose size is not set gets so much of the free memory
CODED_SHARE = {"float32": 0.8, "bfloat16": 0.67, "float16": 0.75, "float8_e4m3": 0.8}
"""What a coded block takes on disk, at least. There are slots for as many, though room decides."""
AUTO_HOST_POOLS = 4  # times the KV pools of those that share it, at most


class BuildError(Exception):
    """A worker of this configuration cannot run here; one line for the user."""


@dataclass(frozen=True, slots=True)
class KVPlan:
    """How many blocks a worker gets, and what they cost."""

    spec: KVSpec
    num_blocks: int  # 0: on a GPU, as many as its memory has room for
    weights_bytes: int
    window: Window  # the first group's
    num_host_blocks: int = 0
    num_packed_blocks: int = 0
    num_disk_blocks: int = 0
    disk_bytes: int = 0  # that they take together
    disk_codec: DiskCodec = "none"
    num_ranks: int = 1  # processes of a worker
    num_copies: int = 1  # that these hold of each block together
    group_windows: tuple[Window, ...] = ()  # where there are several groups: of each
    is_copied: bool = False  # another engine's: it is in host memory a second time
    process_bytes: int = SPARE_BYTES  # each rank takes them beside weights and KV

    @property
    def windows(self) -> Windows:
        return Windows(self.spec.block_size, self.group_windows or (self.window,))

    @property
    def bytes_per_block(self) -> int:
        return self.spec.bytes_per_block * self.num_copies

    @property
    def kept_bytes_per_block(self) -> int:
        """What one takes in host memory and below, where copies of another engine's are whole."""
        return self.spec.bytes_per_block if self.is_copied else self.bytes_per_block

    @property
    def disk_slot_bytes(self) -> int:
        """What one costs on disk, over all ranks."""
        from kvrelay.kvtransfer.store.folder import slot_bytes  # not where vLLM computes

        if self.is_copied:
            return slot_bytes(self.kept_bytes_per_block)
        shares = self.num_ranks // self.num_copies
        return slot_bytes(self.spec.bytes_per_block // shares) * self.num_ranks

    @property
    def spare_bytes(self) -> int:
        return self.process_bytes * self.num_ranks

    @property
    def host_bytes(self) -> int:
        packed = self.num_packed_blocks * self.packed_block_bytes if self.num_packed_blocks else 0
        return self.num_host_blocks * self.kept_bytes_per_block + packed

    @property
    def packed_block_bytes(self) -> int:
        """What one takes in four bits a number, where it is not `why_exact`."""
        return coded_bytes(self.spec, self.spec.num_kv_heads) * self.num_copies

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def copied_bytes(self) -> int:
        return self.num_blocks * self.kept_bytes_per_block if self.is_copied else 0

    @property
    def needed_bytes(self) -> int:
        return self.kv_bytes + self.copied_bytes + self.weights_bytes + self.spare_bytes

    def host_needed_bytes(self, *, on_gpu: bool) -> int:
        """What the worker needs of the machine's memory, beside its host tier."""
        return self.copied_bytes if on_gpu else self.needed_bytes


def model_config(path: Path, engine: EngineSection) -> ModelConfig:
    """Reads that of the checkpoint at `path`, with the window that is set. Raises ModelError."""
    return with_window(read_config(path), engine.window, engine.sinks)


def plan_kv(
    model: ModelConfig,
    engine: EngineSection,
    dtype: str,
    quantization: str = "none",
    on_gpu: bool = False,
) -> KVPlan:
    """`dtype`, `quantization`: of the weights. Raises BuildError if the memory for KV does not hold
    a block, ModelError for a drafter that is none of this model."""
    kv_dtype = dtype if engine.kv_dtype == "auto" else engine.kv_dtype
    spec, drafter = model.kv_spec(engine.block_size, kv_dtype), None
    if engine.drafter:
        drafter = read_drafter(engine.drafter, model)
        spec = drafter.added_to(spec)
    ranks = engine.tensor_parallel_size
    copies = max(1, ranks // model.num_kv_heads)
    per_block = spec.bytes_per_block * copies
    num_blocks = engine.num_blocks or int(engine.kv_cache_gib * GIB) // per_block
    if num_blocks < 1 and engine.kv_cache_gib > 0:
        raise BuildError(
            f"engine.kv_cache_gib = {engine.kv_cache_gib:g}: too little for one KV block"
            f" of {per_block / GIB:.3f} GiB"
        )
    weights = weights_bytes(model, dtype, quantization, on_gpu)
    weights += extra_weights_bytes(model, dtype, ranks)
    weights += 0 if drafter is None else drafter.memory_bytes(dtype)
    windows = Windows.of(spec.block_size, spec.windows, model.num_sinks).groups
    groups = windows if len(windows) > 1 else ()
    return KVPlan(
        spec,
        num_blocks,
        weights,
        windows[0],
        num_ranks=ranks,
        num_copies=copies,
        group_windows=groups,
    )


def fit_gpu(
    plan: KVPlan, model: ModelConfig, engine: EngineSection, dtype: str, gpu_bytes: int
) -> KVPlan:
    """`plan` with as many blocks as ranks on GPUs of so many bytes have room for, as far as that is
    known before a step was run: a worker measures it. With none, there is no room."""
    if plan.num_blocks:
        return plan
    ranks, num_tokens = plan.num_ranks, engine.max_num_batched_tokens
    peak = -(-plan.weights_bytes // ranks)
    peak += step_bytes(model, num_tokens, engine.max_num_seqs, dtype, ranks)
    memory = DeviceMemory(gpu_bytes, gpu_bytes - CUDA_BYTES, 0, peak)
    room = memory.room(engine.gpu_memory_utilization) * ranks
    return replace(plan, num_blocks=max(0, room // plan.bytes_per_block))


def plan_tiers(
    plan: KVPlan,
    host_bytes: int,
    disk_bytes: int,
    disk_codec: DiskCodec = "none",
    packed_bytes: int = 0,
) -> KVPlan:
    """`plan` with tiers of so many bytes; 0: no such tier. KV that stays exact has none of
    `packed_bytes`, though other models of the server may. Raises BuildError where a tier would not
    hold a block, or cannot be."""
    packed_bytes = 0 if why_exact(plan.spec) else packed_bytes
    if packed_bytes and not host_bytes:
        raise BuildError(
            "tiers.packed_gib without tiers.host_gib: blocks reach it by way of host memory; set"
            " tiers.host_gib as well"
        )
    per_block = plan.kept_bytes_per_block
    counts = {}
    for name, size, slot in (
        ("host", host_bytes, per_block),
        ("packed", packed_bytes, plan.packed_block_bytes if packed_bytes else 1),
        ("disk", disk_bytes, plan.disk_slot_bytes),
    ):
        counts[name] = size // slot
        if size and not counts[name]:
            raise BuildError(
                f"tiers.{name}_gib: this worker's share of {size / GIB:g} GiB is too little for one"
                f" KV block of {per_block / GIB:.3f} GiB; raise it, or set it to 0"
            )
    if disk_codec != "none":
        counts["disk"] = int(counts["disk"] / CODED_SHARE[plan.spec.dtype])
    return replace(
        plan,
        num_host_blocks=counts["host"],
        num_packed_blocks=counts["packed"],
        num_disk_blocks=counts["disk"],
        disk_bytes=disk_bytes,
        disk_codec=disk_codec,
    )


def auto_host_bytes(plan: KVPlan, num_sharing: int, free_bytes: int, gpu_bytes: int = 0) -> int:
    """What a worker has of a host tier whose size is not set, which `num_sharing` workers of a
    machine share (0: this one has no part). `free_bytes`: beside what the workers need;
    `gpu_bytes`: of its GPUs, which is about their pools, where these are not planned. Whole blocks,
    perhaps none."""
    if not num_sharing:
        return 0
    pools = plan.kv_bytes or gpu_bytes
    most = min(int(AUTO_HOST_SHARE * free_bytes) // num_sharing, AUTO_HOST_POOLS * pools)
    return max(0, most) // plan.kept_bytes_per_block * plan.kept_bytes_per_block


def check_memory(plans: Sequence[KVPlan], available_bytes: int, host_bytes: int = 0) -> None:
    """`plans`: one of each worker that is here. Raises BuildError if they, and `host_bytes` of KV
    below them, need more than is available."""
    needed = sum(plan.needed_bytes for plan in plans) + host_bytes
    if needed <= available_bytes:
        return
    who = f"{len(plans)} worker(s) need" if plans else "the host tier needs"
    parts = []
    for plan, count in Counter(plans).items():
        whose = "each" if count == len(plans) else f"{count} of them"
        parts.append(
            f"{whose} {plan.weights_bytes / GIB:.2f} weights + {plan.kv_bytes / GIB:.2f} KV"
            f"{f' + {plan.copied_bytes / GIB:.2f} its copy' if plan.is_copied else ''}"
            f" + {plan.spare_bytes / GIB:.2f} spare"
        )
    host = f" + {host_bytes / GIB:.2f} for the host tier" if host_bytes else ""
    detail = f" ({', '.join(parts)}{host})" if plans else ""
    lower = ", tiers.host_gib" if host_bytes else ""
    raise BuildError(
        f"too little memory: {who} {needed / GIB:.1f} GiB{detail}, {available_bytes / GIB:.1f} GiB"
        f" are available; lower engine.kv_cache_gib{lower} or the number of workers"
    )


def _token_lines(model: ModelConfig, info: WorkerInfo) -> list[str]:
    """What a token costs, by kind of layer."""
    sizes = {each: model.kv_spec(info.block_size, each).bytes_per_block for each in DTYPE_BYTES}
    whole = (each for each, size in sizes.items() if not info.bytes_per_block % size)
    dtype = next(whole, "")
    if not dtype:  # a drafter has a part
        fits = [each for each, size in sizes.items() if size < info.bytes_per_block]
        dtype = max(fits, key=sizes.__getitem__)
    layers = [*filter(model.keeps_kv, range(model.num_layers))]
    kinds = Counter((model.kv_window(layer), model.kv_heads(layer)) for layer in layers)
    is_one = model.latent is not None and model.indexer is None
    planes, size = 1 if is_one else 2, DTYPE_BYTES[dtype]
    parts = "latent, index key" if model.indexer else "K, V"
    costs = {kind: kind[1].numbers(dtype) * size * planes // 2 for kind in kinds}
    scale = f" + {SCALE_BYTES[dtype]} of scale" if dtype in SCALE_BYTES else ""
    lines = []
    for (window, heads), count in kinds.items():
        dims = {heads.key_dim, heads.value_dim}
        per_head = f"{' and '.join(map(str, sorted(dims)))} head_dim x {size} bytes"
        per_head = f"({per_head}{scale})" if scale else per_head
        each = f"{f'2 ({parts})' if planes > 1 else '1 (latent)'} x {count} layers"
        line = f"{each} x {heads.num_heads} KV heads x {per_head}"
        lines.append(f"{line}, of the last {window:,} tokens" if window else line)
    total = sum(costs[kind] * count for kind, count in kinds.items())
    kept = sum(costs[kind] * count for kind, count in kinds.items() if not kind[0])
    if 0 < kept < total:
        lines.append(f"{kept:,} bytes for each token of a long sequence")
    first = f"KV cache: {total:,} bytes a token = "
    return [first + lines[0], *(" " * 10 + line for line in lines[1:])]


def kv_lines(model: ModelConfig, infos: Sequence[WorkerInfo]) -> list[str]:
    """For people: what a token of KV costs and how many tokens fit into a worker and its tiers."""
    if not infos:
        return []
    info = infos[0]
    lines = _token_lines(model, info)
    pools: dict[str, int] = {}  # the smallest of each role: workers of other sizes have other pools
    for each in infos:
        pools[each.role] = min(each.num_blocks, pools.get(each.role, each.num_blocks))
    if len(set(pools.values())) == 1:
        pools = {"worker": info.num_blocks}
    for name, num_blocks in pools.items():
        whose = name if len(pools) == 1 else f"{name} worker"
        lines.append(f"          {blocks_text(info, num_blocks)} in each {whose}")
    hosts = [info.num_host_blocks for info in infos if info.num_host_blocks]
    disks = [info.num_disk_blocks for info in infos if info.num_disk_blocks]
    for name, counts in (("host", hosts), ("disk", disks)):
        if counts:
            share = f"in {len(counts)} worker(s)"
            lines.append(f"{name + ':':10}{blocks_text(info, sum(counts))} {share}")
    return lines


def blocks_text(info: WorkerInfo, num_blocks: int) -> str:
    what = "tokens of long sequences" if info.windowed_groups else "tokens"
    return (
        f"{num_blocks:,} blocks of {info.block_size} tokens"
        f" = {num_blocks // info.row_blocks * info.block_size:,} {what}"
        f" = {num_blocks * info.bytes_per_block / GIB:.2f} GiB"
    )


def resolve_max_model_len(model: ModelConfig, engine: EngineSection, plan: KVPlan) -> int:
    """What is set, else the model's context as far as the KV blocks of a worker hold it: a request
    that does not say how much it wants must not ask for more than there is. Raises BuildError."""
    longest, widest = model.max_position_embeddings, model.max_window
    if widest + model.num_sinks > longest:
        raise BuildError(
            f"engine.window = {widest} with engine.sinks = {model.num_sinks}: the model has"
            f" {longest} positions"
        )
    # With windows, no two positions that meet are further apart than the model knows.
    if engine.max_model_len > longest and not widest:
        raise BuildError(
            f"engine.max_model_len = {engine.max_model_len}: the model has {longest} positions"
        )
    held = plan.windows.most_tokens(plan.num_blocks) if plan.num_blocks else None
    if held == 0:
        size, needed = plan.spec.block_size, plan.windows.max_blocks(plan.spec.block_size)
        raise BuildError(
            f"too little KV memory: {size} tokens need {needed} blocks, {plan.spec.num_groups}"
            f" groups of layers have one each, and there are {plan.num_blocks}; raise"
            " engine.num_blocks or engine.kv_cache_gib"
        )
    return engine.max_model_len or (longest if held is None else min(longest, held))
