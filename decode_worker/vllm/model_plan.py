"""What a model takes at vLLM, and how much of it fits: as `worker.model_plan`, from vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvrelay.decode_worker.vllm.arguments import num_processes
from kvrelay.decode_worker.vllm.form import Form
from kvrelay.decode_worker.vllm.plan import fit_gpu, longest, num_needed, plan_form
from kvrelay.engine.config import EngineSection
from kvrelay.engine.model.device_memory import CUDA_BYTES, RESERVE_BYTES
from kvrelay.worker.kv_plan import GIB, BuildError, KVPlan, check_memory
from kvrelay.worker.model_plan import KindPlan, ModelPlan, lengths_of, missing_gpus


def plan_model(
    form: Form,
    engine: EngineSection,
    path: Path,
    *,
    num_gpus: int = 0,
    memory_bytes: int = 0,
    contexts: Sequence[int] = (),
) -> ModelPlan:
    """`engine`: as it is set. `num_gpus`, `memory_bytes`: as of `worker.model_plan.plan_model`.
    Raises BuildError for settings that are wrong on any machine."""
    on_gpu, ranks = num_gpus > 0, num_processes(engine)
    engine = engine.sized(gpu=on_gpu)
    plan = plan_form(form, engine, path)
    if on_gpu:
        plan = fit_gpu(plan, form, engine, memory_bytes)
    problems = _problems(plan, engine, num_gpus, memory_bytes)
    most = longest(form, engine, plan) if plan.num_blocks else 0
    lengths = lengths_of(contexts, most)
    problems += [
        f"{each:,} tokens do not fit: a sequence has at most {most:,}"
        for each in lengths
        if each > most > 0
    ]
    return ModelPlan(
        num_workers=num_gpus // ranks if on_gpu else 1,
        num_ranks=ranks,
        dtype=form.dtype,
        quantization="none",  # weights are counted as vLLM keeps them
        kv_dtype=next((each.dtype for each in form.groups), "not known"),
        on_gpu=on_gpu,
        memory_bytes=memory_bytes,
        weights_bytes=plan.weights_bytes,
        step_bytes=RESERVE_BYTES * ranks if on_gpu else 0,
        other_bytes=ranks * (CUDA_BYTES + RESERVE_BYTES) if on_gpu else plan.spare_bytes,
        num_blocks=plan.num_blocks,
        block_size=plan.spec.block_size,
        bytes_per_block=plan.bytes_per_block,
        max_model_len=most,
        max_num_seqs=engine.max_num_seqs,
        kinds=_kinds(form, engine, plan, lengths),
        num_sequences={
            each: _num_held(form, engine, plan, each) if each <= most else 0 for each in lengths
        },
        problems=tuple(problems),
    )


def _num_held(form: Form, engine: EngineSection, plan: KVPlan, num_tokens: int) -> int:
    needed = num_needed(form.groups, engine, num_tokens)
    return min(engine.max_num_seqs, plan.num_blocks // needed) if needed else 0


def _kinds(
    form: Form, engine: EngineSection, plan: KVPlan, lengths: Sequence[int]
) -> tuple[KindPlan, ...]:
    return tuple(
        KindPlan(
            kind=each.kind,
            window=each.window,
            num_groups=1,
            num_layers=each.num_layers,
            bytes_per_token=plan.bytes_per_block // each.block_size if each.kind == "full" else 0,
            sequence_bytes={
                n: num_needed([each], engine, n) * plan.bytes_per_block for n in lengths
            },
        )
        for each in form.groups
    )


def _problems(plan: KVPlan, engine: EngineSection, num_gpus: int, memory_bytes: int) -> list[str]:
    ranks, found = num_processes(engine), list[str]()
    if not num_gpus:
        try:
            check_memory([plan], memory_bytes or 1 << 60)
        except BuildError as error:
            found.append(str(error))
        return found
    found += missing_gpus(ranks, num_gpus, engine.num_stages)
    needed = plan.kv_bytes + plan.weights_bytes
    if not plan.num_blocks or needed > ranks * memory_bytes:
        found.append(
            f"no room for KV: {plan.weights_bytes / ranks / GIB:.1f} GiB of weights on each GPU of"
            f" {memory_bytes / GIB:.1f} GiB; raise engine.tensor_parallel_size"
        )
    return found
