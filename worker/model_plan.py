"""What a model takes, and how much of it fits, for people who choose a machine.

The numbers are those of `kv_plan`, by which workers start: of the weights, of KV by kind of layers,
and of the sequences that the KV blocks hold at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from kvrelay.engine.config import EngineSection
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.model.checkpoint.vision import PROCESSOR
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.device_memory import CUDA_BYTES, RESERVE_BYTES, step_bytes
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.shard import MAX_RANKS, check_divides
from kvrelay.engine.support import Capability, engine_traits, model_traits, refusal_of
from kvrelay.worker.kv_plan import (
    GIB,
    BuildError,
    KVPlan,
    check_memory,
    fit_gpu,
    plan_kv,
    resolve_max_model_len,
)

MIB = 1 << 20
# What the driver reports. CUDA keeps some of it to itself.
GPU_BYTES = {
    "h100": 81_559 * MIB,
    "h200": 143_771 * MIB,
    "b200": 183_359 * MIB,
    "a100-80gb": 81_920 * MIB,
    "a100-40gb": 40_960 * MIB,
    "l40s": 46_068 * MIB,
    "a10": 23_028 * MIB,
    "l4": 23_034 * MIB,
}
CONTEXTS = (8_192, 32_768, 131_072)


class KindPlan(Struct, frozen=True):
    """KV of the layers of one kind. With windows or states it does not grow with a sequence."""

    kind: str  # one of GROUP_KINDS
    window: int  # positions; 0: all
    num_groups: int
    num_layers: int
    bytes_per_token: int  # a long sequence's
    sequence_bytes: dict[int, int]  # by length: what a sequence holds


class ImagesPlan(Struct, frozen=True):
    """What images take of the machine's memory, from the first one on; workers start without."""

    tower_bytes: int
    kept_bytes: int  # at most, of embeddings
    encoding_bytes: int  # while one of `most_pixels` is encoded, about
    most_pixels: int  # larger ones are scaled down to these

    @property
    def num_bytes(self) -> int:
        return self.tower_bytes + self.kept_bytes + self.encoding_bytes


class ModelPlan(Struct, frozen=True):
    """One worker, of `num_ranks` processes or GPUs, and how many of them there are."""

    num_workers: int
    num_ranks: int
    dtype: str
    quantization: str
    kv_dtype: str
    on_gpu: bool
    memory_bytes: int  # a GPU's, or the machine's; 0: not known
    weights_bytes: int  # those of all ranks together, as what follows
    step_bytes: int  # estimated, on GPUs
    other_bytes: int
    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    max_num_seqs: int
    kinds: tuple[KindPlan, ...]
    num_sequences: dict[int, int]  # by length: how many a worker holds at once
    images: ImagesPlan | None = None  # None: it reads none
    problems: tuple[str, ...] = ()  # what does not fit, and what would

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def _kept(model: ModelConfig, quantization: str) -> str:
    """With how experts are stored, and stay on a GPU."""
    experts = (
        ""
        if model.experts is None or not model.experts.packed
        else (f"{model.experts.packed} experts")
    )
    given = "" if quantization == "none" else quantization
    return ", ".join(filter(None, (given, experts))) or quantization


def plan_model(
    model: ModelConfig,
    engine: EngineSection,
    dtype: str,
    quantization: str,
    *,
    num_gpus: int = 0,
    memory_bytes: int = 0,
    contexts: Sequence[int] = (),
) -> ModelPlan:
    """`engine`: as it is set. `num_gpus`: of `memory_bytes` each; 0: a worker computes on a CPU,
    and `memory_bytes` is the machine's, or 0. Raises BuildError and ModelError for settings that
    are wrong on any machine."""
    on_gpu, ranks = num_gpus > 0, engine.tensor_parallel_size
    engine = engine.sized(gpu=on_gpu)
    images = _images(model, engine, on_gpu=on_gpu)
    check_divides(model, ranks)
    plan = plan_kv(model, engine, dtype, quantization, on_gpu)
    problems = []
    if on_gpu:
        plan = fit_gpu(plan, model, engine, dtype, memory_bytes)
        problems += _gpu_problems(plan, model, engine, dtype, quantization, num_gpus, memory_bytes)
    elif memory_bytes:
        try:
            check_memory([plan], memory_bytes)
            problems += _images_problems(plan, images, memory_bytes)
        except BuildError as error:
            problems.append(str(error))
    longest = 0
    if plan.num_blocks:
        longest = resolve_max_model_len(model, engine, plan)
    lengths = lengths_of(contexts, longest)
    problems += [_too_long(model, each, longest) for each in lengths if each > longest > 0]
    held = {each: _num_held(plan, engine, each) if each <= longest else 0 for each in lengths}
    step = step_bytes(model, engine.max_num_batched_tokens, engine.max_num_seqs, dtype, ranks)
    return ModelPlan(
        num_workers=num_gpus // ranks if on_gpu else 1,
        num_ranks=ranks,
        dtype=dtype,
        quantization=_kept(model, quantization) if on_gpu else quantization,
        kv_dtype=plan.spec.dtype,
        on_gpu=on_gpu,
        memory_bytes=memory_bytes,
        weights_bytes=plan.weights_bytes,
        step_bytes=step * ranks if on_gpu else 0,
        other_bytes=ranks * (CUDA_BYTES + RESERVE_BYTES) if on_gpu else plan.spare_bytes,
        num_blocks=plan.num_blocks,
        block_size=plan.spec.block_size,
        bytes_per_block=plan.bytes_per_block,
        max_model_len=longest,
        max_num_seqs=engine.max_num_seqs,
        kinds=_kinds(model, plan, lengths),
        num_sequences=held,
        images=images,
        problems=tuple(problems),
    )


def _images(model: ModelConfig, engine: EngineSection, *, on_gpu: bool) -> ImagesPlan | None:
    vision, traits = model.vision, engine_traits(engine, on_gpu=on_gpu) | model_traits(model)
    if vision is None or refusal_of(Capability.IMAGES, traits):
        return None
    sizes = vision.tower_bytes, engine.image_bytes, vision.most_encoding_bytes
    return ImagesPlan(*sizes, vision.most_pixels)


def _images_problems(plan: KVPlan, images: ImagesPlan | None, memory_bytes: int) -> list[str]:
    if images is None or plan.needed_bytes + images.num_bytes <= memory_bytes:
        return []
    return [
        f"too little memory for images: a tower of {images.tower_bytes / GIB:.2f} GiB,"
        f" {images.kept_bytes / GIB:.2f} of embeddings and {images.encoding_bytes / GIB:.2f} for"
        f" one of {images.most_pixels:,} pixels, beside {plan.needed_bytes / GIB:.2f}, are more"
        f" than {memory_bytes / GIB:.2f} GiB; lower engine.image_bytes, engine.kv_cache_gib or the"
        f" most pixels in {PROCESSOR} (size.longest_edge)"
    ]


def _num_held(plan: KVPlan, engine: EngineSection, num_tokens: int) -> int:
    return min(engine.max_num_seqs, plan.num_blocks // plan.windows.max_blocks(num_tokens))


def _kinds(model: ModelConfig, plan: KVPlan, lengths: Sequence[int]) -> tuple[KindPlan, ...]:
    spec, found = plan.spec, []
    layers = Counter(
        model.kv_window(layer) for layer in filter(model.keeps_kv, range(model.num_layers))
    )
    groups = Counter(plan.windows.groups)
    for window, count in groups.items():
        own = Windows(spec.block_size, (window,) * count)
        is_state = window.kind == "state"
        each = plan.bytes_per_block * count // spec.block_size
        found.append(
            KindPlan(
                kind=window.kind,
                window=0 if is_state else window.size,
                num_groups=count,
                num_layers=len(model.recurrent_layers) if is_state else layers[window.size],
                bytes_per_token=0 if window.size else each,
                sequence_bytes={n: own.max_blocks(n) * plan.bytes_per_block for n in lengths},
            )
        )
    return tuple(found)


def lengths_of(contexts: Sequence[int], longest: int) -> list[int]:
    """Those of `contexts`, or where none are given, usual ones and the longest that fits."""
    return [*contexts] or [each for each in CONTEXTS if each < longest] + [longest or 1]


def missing_gpus(num_ranks: int, num_gpus: int, num_stages: int = 1) -> list[str]:
    """Says that a worker needs more GPUs than there are, if it does. `num_stages`: ranks for each
    tensor-parallel one."""
    if num_ranks <= num_gpus:
        return []
    what = "a worker has so many GPUs, and there are"
    size = f"engine.tensor_parallel_size = {num_ranks // num_stages}"
    stages = f", {num_stages} times as many ranks by engine.arguments" if num_stages > 1 else ""
    return [f"{size}{stages}: {what} {num_gpus}"]


def _too_long(model: ModelConfig, num_tokens: int, longest: int) -> str:
    if num_tokens > model.max_position_embeddings and not model.max_window:
        return f"{num_tokens:,} tokens: the model has {model.max_position_embeddings:,} positions"
    return f"{num_tokens:,} tokens do not fit: the KV blocks hold a sequence of {longest:,}"


def _gpu_problems(
    plan: KVPlan,
    model: ModelConfig,
    engine: EngineSection,
    dtype: str,
    quantization: str,
    num_gpus: int,
    gpu_bytes: int,
) -> list[str]:
    """What keeps workers from these GPUs, in words, and what would not."""
    ranks = engine.tensor_parallel_size
    found = missing_gpus(ranks, num_gpus)
    if plan.num_blocks and plan.kv_bytes + plan.weights_bytes <= ranks * gpu_bytes:
        return found

    def fits(size: int, weights: str) -> bool:
        try:
            check_divides(model, size)
        except ModelError:
            return False
        own = replace(engine, tensor_parallel_size=size, num_blocks=0, kv_cache_gib=0.0)
        planned = plan_kv(model, own, dtype, weights, on_gpu=True)
        return fit_gpu(planned, model, own, dtype, gpu_bytes).num_blocks > 0

    sizes = [1 << power for power in range(MAX_RANKS.bit_length())]
    ways = [
        f"--tensor-parallel-size {size}"
        for size in [next((each for each in sizes if fits(each, quantization)), 0)]
        if size and size != ranks
    ]
    if quantization == "none":
        ways += [f"--quantization {each}" for each in ("fp8", "int8") if fits(ranks, each)][:1]
    each = plan.weights_bytes / ranks / GIB
    if plan.num_blocks:
        found.append(
            f"{plan.kv_bytes / GIB:.1f} GiB of KV and {plan.weights_bytes / GIB:.1f} of weights are"
            f" more than {ranks} GPU(s) of {gpu_bytes / GIB:.1f} GiB have: lower"
            " engine.kv_cache_gib or engine.num_blocks"
        )
        return found
    remedy = f"it fits with {' or '.join(ways)}" if ways else "it fits on no number of them"
    share = f"{engine.gpu_memory_utilization:.0%} of {gpu_bytes / GIB:.1f} GiB"
    found.append(
        f"no room for KV: {each:.1f} GiB of weights on each GPU, and {share} is for them, steps"
        f" and KV; {remedy}"
    )
    return found
