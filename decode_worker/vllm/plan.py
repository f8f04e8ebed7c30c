"""What a worker that runs vLLM takes of a machine, from the form that vLLM says KV has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kvrelay.decode_worker.vllm.arguments import num_processes
from kvrelay.decode_worker.vllm.form import Form, GroupForm
from kvrelay.engine.config import EngineSection
from kvrelay.engine.identity import VLLM, weight_files
from kvrelay.engine.kv.spec import DTYPE_BYTES, KVSpec
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.model.device_memory import CUDA_BYTES, RESERVE_BYTES, DeviceMemory
from kvrelay.engine.stats import WorkerInfo
from kvrelay.engine.support import Capability, refusal_of
from kvrelay.worker.kv_plan import GIB, BuildError, KVPlan, blocks_text

SPARE_BYTES = 1536 << 20  # what a process of vLLM has beside weights and KV
FLOATS = {"float32", "bfloat16", "float16"}
OPAQUE = "bfloat16"  # any numbers of two bytes


def opaque_spec(bytes_per_block: int, block_size: int, dtype: str = OPAQUE) -> KVSpec:
    """A block of so many bytes, whatever is in it: one head of one layer. Where they do not divide
    evenly it is a little larger."""
    dtype = dtype if dtype in FLOATS else OPAQUE
    head_dim = -(-bytes_per_block // (block_size * DTYPE_BYTES[dtype]))
    return KVSpec(1, 1, head_dim, block_size, dtype, num_planes=1)


def plan_form(form: Form, engine: EngineSection, path: Path) -> KVPlan:
    """`engine`: as it is set for this machine. Raises BuildError where the memory that is set for
    KV does not hold a block."""
    kv_bytes = int(engine.kv_cache_gib * GIB)
    copies = max(1, engine.tensor_parallel_size // form.num_kv_heads)
    per_block, num_blocks = form.bytes_per_block * copies, engine.num_blocks
    if not per_block:  # vLLM divides what it is given when it has loaded the model
        per_block, num_blocks = max(kv_bytes, 1), min(1, kv_bytes)
    elif not num_blocks:
        num_blocks = kv_bytes // per_block - (kv_bytes > 0)  # one of them is its null block
        if num_blocks < 1 and kv_bytes:
            raise BuildError(
                f"engine.kv_cache_gib = {engine.kv_cache_gib:g}: too little for KV blocks of"
                f" {per_block / GIB:.3f} GiB, of which vLLM keeps one empty"
            )
    block_size = form.block_size or engine.block_size
    dtypes = {each.dtype for each in form.groups}
    spec = opaque_spec(per_block // copies, block_size, dtypes.pop() if len(dtypes) == 1 else "")
    windows = Windows.of(block_size, form.windows).groups
    return KVPlan(
        replace(spec, windows=form.windows),
        num_blocks,
        form.weights_bytes or files_bytes(path),
        windows[0],
        group_windows=windows if len(windows) > 1 else (),
        num_ranks=num_processes(engine),
        num_copies=copies,
        is_copied=copies_kv(form, engine),
        process_bytes=SPARE_BYTES,
    )


def copies_kv(form: Form, engine: EngineSection) -> bool:
    """Whether KV of vLLM is copied to the worker's memory."""
    return not refusal_of(Capability.HAND_OVER, form.traits(engine))


def files_bytes(path: Path) -> int:
    """What weights take on disk."""
    return sum(file.stat().st_size for each in weight_files(VLLM) for file in path.glob(each))


def fit_gpu(plan: KVPlan, form: Form, engine: EngineSection, gpu_bytes: int) -> KVPlan:
    """`plan` with as many blocks as GPUs of so many bytes have room for, as far as that is known
    before vLLM has run a step."""
    if plan.num_blocks or not form.bytes_per_block:
        return plan
    peak = -(-plan.weights_bytes // plan.num_ranks)
    memory = DeviceMemory(gpu_bytes, gpu_bytes - CUDA_BYTES, 0, peak)
    room = (memory.room(engine.gpu_memory_utilization) - RESERVE_BYTES) * plan.num_ranks
    return replace(plan, num_blocks=max(0, room // plan.bytes_per_block))


def num_needed(groups: Iterable[GroupForm], engine: EngineSection, num_tokens: int) -> int:
    """Blocks that a sequence of so many tokens holds at vLLM."""
    return sum(_of_group(each, engine, num_tokens) for each in groups)


def _of_group(group: GroupForm, engine: EngineSection, num_tokens: int) -> int:
    if group.kind == "state":
        return 1
    if group.window:  # what a step computes is beside what it reads
        most = group.window - 1 + engine.max_num_batched_tokens
        return -(-min(num_tokens, most) // group.block_size) + 1
    return -(-num_tokens // group.block_size)


def longest(form: Form, engine: EngineSection, plan: KVPlan) -> int:
    """What is set, else the model's context as far as the KV blocks of a worker hold it; 0: vLLM
    says it when it has loaded the model. Raises BuildError."""
    most = form.max_model_len
    if engine.max_model_len > most > 0:
        raise BuildError(f"engine.max_model_len = {engine.max_model_len}: the model has {most}")
    if engine.max_model_len or not plan.num_blocks or not form.groups:
        return engine.max_model_len or most
    if num_needed(form.groups, engine, 1) > plan.num_blocks:
        needed = num_needed(form.groups, engine, 1)
        raise BuildError(
            f"too little KV memory: one token needs {needed} blocks, and there are"
            f" {plan.num_blocks}; raise engine.num_blocks or engine.kv_cache_gib"
        )
    low, high = 1, most + 1
    while high - low > 1:  # low tokens fit
        middle = (low + high) // 2
        if num_needed(form.groups, engine, middle) <= plan.num_blocks:
            low = middle
        else:
            high = middle
    return low


def form_lines(form: Form, infos: Sequence[WorkerInfo]) -> list[str]:
    """For people: what a token of KV costs, and how many tokens fit into a worker and its tiers."""
    if not infos:
        return []
    parts = ", ".join(map(_group_text, form.groups)) or "not known before it was loaded"
    per_token = form.bytes_per_block // max(1, form.block_size)
    lines = [f"KV cache: {per_token:,} bytes a token, as vLLM {form.version} has it: {parts}"]
    if form.why_not:
        why = "layers are recurrent" if form.why_not == "states" else form.why_not
        lines.append(f"          it stays in vLLM's memory: {why}")
    lines += [f"          {each}" for each in whole_lines(form)]
    for name, numbers in _by_place(infos):
        lines.append(f"{name + ':':10}{blocks_text(infos[0], sum(numbers))}")
    return lines


def whole_lines(form: Form) -> list[str]:
    """For people: layers keep more tokens than they read."""
    return [f"layers with windows keep all tokens: {form.why_all}"] if form.why_all else []


def _group_text(group: GroupForm) -> str:
    what = {"full": "of all tokens", "state": "of states"}
    kept = what.get(group.kind, f"of the last {group.window:,} tokens")
    return f"{group.num_layers} layers {kept}"


def _by_place(infos: Sequence[WorkerInfo]) -> Iterable[tuple[str, list[int]]]:
    yield "worker", [min(each.num_blocks for each in infos)]
    places = (
        ("host", [each.num_host_blocks for each in infos]),
        ("disk", [each.num_disk_blocks for each in infos]),
    )
    yield from ((name, numbers) for name, numbers in places if any(numbers))
