"""What becomes of each setting where vLLM runs: it has an argument there, the worker reads it, the
start refuses it, or it is said to be nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import structs

from kvrelay.cluster.config_checks import AT_VLLM, not_of_vllm
from kvrelay.decode_worker.vllm.build import arguments, environment
from kvrelay.engine.config import EngineSection, ModelSection
from tests.worker.test_vllm_worker import replace_section

OTHER_SETTINGS: dict[str, Any] = {
    "model.dtype": "bfloat16",
    "model.quantization": "fp8",
    "engine.arguments": {"swap_space": 1},
    "engine.block_size": 64,
    "engine.num_blocks": 9,
    "engine.gpu_memory_utilization": 0.5,
    "engine.cuda_graphs": False,
    "engine.tensor_parallel_size": 2,
    "engine.kv_dtype": "float8_e4m3",
    "engine.max_num_batched_tokens": 4096,
    "engine.max_num_seqs": 3,
    "engine.max_model_len": 77,
}
REFUSED_SETTINGS: dict[str, Any] = {
    "model.quantization": "int8",
    "engine.attention_backend": "triton",
    "engine.moe_backend": "triton",
    "engine.window": 64,
    "engine.sinks": 4,
    "engine.itl_target_ms": 20.0,
    "engine.itl_most_ms": 20.0,
    "engine.num_speculative_tokens": 3,
    "engine.drafter": "mtp",
    "engine.max_failed_steps": 1,
    "engine.image_bytes": 1,
    "engine.quest_budget": 0.5,
    "engine.quest_dense_layers": 5,
}
READ_BY_THE_WORKER = {
    *(
        "engine.runs",
        "engine.python",
        "engine.kv_cache_gib",
        "engine.threads",
        "engine.max_waiting",
    ),
    *("engine.step_timeout_s", "engine.core_dumps", "engine.lease_s", "engine.handoff_timeout_s"),
    *("engine.read_timeout_s", "engine.read_floor_s", "engine.adapter_bytes"),
}


def sections_with(name: str, value: Any) -> tuple[EngineSection, ModelSection]:
    section, _, setting = name.partition(".")
    changed = {setting: value}
    of_engine = changed if section == "engine" else {}
    of_model = {} if section == "engine" else changed
    return replace_section(**of_engine), structs.replace(ModelSection(), **of_model)


def given_to_vllm(engine: EngineSection, model: ModelSection) -> tuple[Any, ...]:
    given = arguments(model, engine, Path("m"), on_gpu=True)
    return given, environment(on_gpu=False)


def test_every_setting_of_an_engine_is_obeyed_by_vllm_or_refused_or_said_to_be_nothing() -> None:
    known = {f"engine.{name}" for name in EngineSection.__struct_fields__}
    assert known <= AT_VLLM.keys()
    before = given_to_vllm(*sections_with("engine.runs", "vllm"))
    for name, at in AT_VLLM.items():
        if at.taken:
            why = not_of_vllm(*sections_with(name, REFUSED_SETTINGS[name]))
            assert f"{name} = " in why
            assert at.text in why
        if name in OTHER_SETTINGS:
            changed = sections_with(name, OTHER_SETTINGS[name])
            assert given_to_vllm(*changed) != before, name
            assert not not_of_vllm(*changed)
        elif not at.taken:
            assert (name in READ_BY_THE_WORKER) != at.text.startswith("nothing"), name
