"""From a `WorkerSpec` to a worker that computes with vLLM, in the process that becomes it.

The process runs in the environment of `engine.python`, which has vLLM and its torch; of ours it
needs the source alone, and xxhash and NIXL, by which KV is checked and moved.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from msgspec import structs

from kvrelay.decode_worker.vllm.arguments import arguments, environment
from kvrelay.decode_worker.vllm.engine import VllmEngine
from kvrelay.decode_worker.vllm.form import Form, form_of
from kvrelay.decode_worker.vllm.node import VllmWorker
from kvrelay.decode_worker.vllm.plan import (
    fit_gpu,
    longest,
    opaque_spec,
    plan_form,
    whole_lines,
)
from kvrelay.engine.config import EngineSection, WorkerConfig
from kvrelay.engine.host import Deliver, Executor, first_line
from kvrelay.engine.identity import VLLM, files_of, identity_of, telling_arguments
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.model.checkpoint.version import read_version
from kvrelay.engine.model.config import check_unchanged, versions_of
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.engine.support import Trait, drafts_of, notices_of, tiers_of
from kvrelay.kvtransfer.agent import AgentError
from kvrelay.worker.kv_plan import (
    BuildError,
    KVPlan,
    check_memory,
)
from kvrelay.worker.node import RoleHandler
from kvrelay.worker.process import BuiltWorker
from kvrelay.worker.spec import BuildOptions, MakeAgent, WorkerSpec

Roles = Sequence[type[RoleHandler]]
WRITTEN_FOR = "0.32"
STEPS_AHEAD = 2  # one that is scheduled, and one whose copies are under way
ORIGINAL_LEN = r'"original_max_position_embeddings":\s*(\d+)'  # beyond it longrope is another one


def build(spec: WorkerSpec, roles: Roles, make_agent: MakeAgent | None = None) -> BuiltWorker:
    """Load the model; takes a minute, most of it vLLM's own imports. `roles`: what it does with a
    request; `make_agent`: as in BuildOptions. Raises BuildError."""
    engine = spec.engine.sized(gpu=spec.on_gpu)
    try:
        path = spec.find_model()
    except ModelError as error:
        raise BuildError(str(error)) from error
    before = versions_of(files_of(path, VLLM))
    form = form_of(path, spec.model, engine, on_gpu=spec.on_gpu)
    plan = plan_form(form, engine, path)
    if spec.on_gpu and plan.is_copied:
        from kvrelay.engine.model.device import gpu_bytes  # not where clusters are planned

        _check_copy(fit_gpu(plan, form, engine, gpu_bytes()))
    most = longest(form, engine, plan)
    known = plan.num_blocks if form.bytes_per_block else 0
    engine = structs.replace(engine, num_blocks=engine.num_blocks or known, max_model_len=most)
    os.environ.update(environment(on_gpu=spec.on_gpu))
    if plan.num_ranks > 1:  # which divide the worker's threads
        os.environ["OMP_NUM_THREADS"] = str(max(1, engine.threads // plan.num_ranks))
    given = arguments(spec.model, engine, path, on_gpu=spec.on_gpu)
    if not plan.is_copied and not spec.engine.max_model_len:
        given["max_model_len"] = -1  # what fits, which groups of layers make hard to say
    if plan.is_copied:
        given = with_windows(form, engine, known) | given
    try:
        cache_dir = Path(spec.model.cache_dir) if spec.model.cache_dir else None
        vllm = VllmEngine(spec.worker, given, copies=plan.is_copied, cache_dir=cache_dir)
    except (ImportError, AttributeError) as error:
        lacks = f"vLLM {form.version} lacks what a worker needs: {first_line(error)}"
        raise BuildError(f"{lacks}; this was written for {WRITTEN_FOR}") from error
    except (TypeError, ValueError, NotImplementedError) as error:
        raise BuildError(f"vLLM refuses its settings: {first_line(error)}") from error
    try:
        if spec.weights is not None:
            vllm.weights.begin_with(spec.weights)
    except ModelError as error:
        raise BuildError(str(error)) from error
    built = _built(replace(spec, engine=engine), path, form, plan, vllm, roles, make_agent)
    try:
        check_unchanged(before, files_of(path, VLLM))
    except ModelError as error:
        raise BuildError(str(error)) from error
    return built


def _check_copy(plan: KVPlan) -> None:
    """Whether the machine has memory for the copy of KV that a GPU will hold, before the model is
    loaded. Raises BuildError."""
    check_memory([], psutil.virtual_memory().available, plan.copied_bytes)


def _built(
    spec: WorkerSpec,
    path: Path,
    form: Form,
    plan: KVPlan,
    vllm: VllmEngine,
    roles: Roles,
    make_agent: MakeAgent | None,
) -> BuiltWorker:
    from kvrelay.worker.build import with_tiers
    from kvrelay.worker.threads import TransferLoops
    from kvrelay.worker.transfers import transfers_of, worker_config

    cache, model = vllm.config.cache_config, vllm.config.model_config
    num_blocks = (cache.num_gpu_blocks or 1) - 1  # one of them is its null block
    num_heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    copied = vllm.copies.spec(num_heads) if plan.is_copied else None
    traits = form.traits(spec.engine)
    engine = structs.replace(spec.engine, block_size=cache.block_size)
    if copied is None:
        traits |= {Trait.OTHER_KV}  # whatever was said before the model was loaded
    elif copied.windows != (0,):  # as many tokens as vLLM's steps have
        engine = structs.replace(engine, max_num_batched_tokens=vllm.step_tokens)
    spec = replace(spec, engine=engine)
    shown = copied or opaque_spec(plan.spec.bytes_per_block, cache.block_size)
    windows = Windows.of(cache.block_size, shown.windows).groups
    groups = windows if len(windows) > 1 else ()
    plan = replace(plan, spec=shown, num_blocks=num_blocks, window=windows[0], group_windows=groups)
    facts = engine_facts(spec.engine.arguments, vllm, on_gpu=spec.on_gpu)
    digest = kv_identity(path, model.max_model_len, facts)
    if copied is not None:  # its weights are there; memory for its KV comes into use as it fills
        plan = with_tiers(replace(plan, weights_bytes=0), spec)
    held = plan.windows.most_tokens(num_blocks)
    most = model.max_model_len if held is None else min(model.max_model_len, held)
    config = worker_config(spec, plan, most, digest)
    config = structs.replace(config, num_packed_blocks=0, no_images="", chunk_steps=STEPS_AHEAD)
    _check_steps(config, vllm.step_tokens)
    with contextlib.suppress(ModelError):  # where there are no *.safetensors, weights stay
        base = read_version(path)
        config = structs.replace(config, weights=spec.weights or base, base_weights=base.digest)
    can: dict[str, Any] = {"edits": vllm.edits, "drafts": vllm.drafts, "pools": vllm.pools}
    asked = [*drafts_of(spec.engine), *tiers_of(spec.tiers)]
    notices = (*notices_of(asked, traits), *whole_lines(form))
    if copied is None:
        node = VllmWorker(config, roles, copies=False, **can)
        info = replace(config.info(), hands_over=False)
        return BuiltWorker(node, info, vllm.start, notices)
    try:
        pool = vllm.make_pool(num_blocks, config.bytes_per_block, pinned=spec.on_gpu)
        options = BuildOptions(make_agent)
        own = transfers_of(spec, config, plan, pool, Shard(0, 1), options)
    except AgentError as error:
        raise BuildError(str(error)) from error
    vllm.use(pool, own.share)

    def make_executor(deliver: Deliver) -> Executor:
        return vllm.start(deliver, TransferLoops(own.copies, deliver, spec.worker))

    # Its blocks are in the order of vLLM, which is not that of four bits.
    config = structs.replace(own.config, quantizes=False)
    node = VllmWorker(config, roles, own.facts.records, **can)
    return BuiltWorker(
        node, config.info(), make_executor, (*notices, *own.notices), leave_kv=own.leave_kv
    )


def with_windows(form: Form, engine: EngineSection, num_blocks: int) -> dict[str, Any]:
    """Returns EngineArgs of vLLM by which layers with windows keep what a worker copies.
    `num_blocks`: of KV; 0: as many as a GPU has room for."""
    if not any(form.windows):
        return {"disable_hybrid_kv_cache_manager": True}
    if not num_blocks:
        return {}
    size, most = form.block_size, engine.max_model_len
    step = engine.max_num_batched_tokens
    windows = Windows.within(num_blocks, size, form.windows, max_model_len=most, ahead=step)
    few = windows.chunk_tokens
    return {"long_prefill_token_threshold": min(few, most)} if few < step else {}


def _check_steps(config: WorkerConfig, step_tokens: int) -> None:
    """Whether there are blocks for all that a step of vLLM computes of a prompt: it keeps none that
    windows have left. Raises BuildError."""
    few = config.kv_windows.chunk_tokens
    if 0 < few < min(step_tokens, config.max_model_len):
        raise BuildError(
            f"engine.max_num_batched_tokens = {step_tokens}: with windows, {config.num_blocks} KV"
            f" blocks have room for steps of {few} tokens; set that, or raise engine.kv_cache_gib"
        )


def kv_identity(path: Path, max_model_len: int, facts: Mapping[str, Any]) -> bytes:
    """32 bytes, the same for workers whose blocks mean the same: by every byte of the checkpoint,
    whether positions are scaled for longer contexts, and `engine_facts`."""
    config = (path / "config.json").read_text(encoding="utf-8")
    scaled = {int(found) for found in re.findall(ORIGINAL_LEN, config)}
    about = {"runs": VLLM, "long": [max_model_len > each for each in sorted(scaled)], **facts}
    return identity_of(files_of(path, VLLM), about)


def engine_facts(arguments: Mapping[str, Any], vllm: VllmEngine, *, on_gpu: bool) -> dict[str, Any]:
    """All that decides what its blocks hold, beside the model: who reads them has the same."""
    from kvrelay.engine.model.device import cpu_tiles

    # On CPUs what vLLM compiles computes other numbers.
    compiled = not on_gpu and arguments.get("enforce_eager") is False
    return {
        **({"compiled": True} if compiled else {}),
        "version": vllm.version,
        "dtype": str(vllm.config.model_config.dtype),
        "arguments": telling_arguments(arguments),
        "attention": vllm.attention_backends,
        "layers": [each.about for each in vllm.copies.layers],
        "order": "of vLLM's memory",  # bytes in each layer of a block
        # vLLM's attention on CPUs keeps keys in the order of the instructions that read them.
        "device": "cuda" if on_gpu else cpu_tiles(),
    }
