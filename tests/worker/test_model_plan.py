"""What is planned before there is a machine is what workers have, and what does not fit is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.config import EngineSection
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.model.checkpoint.families import parse
from kvrelay.engine.model.config import ModelConfig, weights_bytes
from kvrelay.engine.model.device_memory import DeviceMemory, step_bytes
from kvrelay.worker.kv_plan import GIB, model_config
from kvrelay.worker.model_plan import GPU_BYTES, ModelPlan, plan_model
from tests.engine.model.checkpoint.published import MODELS
from tests.engine.model.tiny import HYBRID, make_checkpoint
from tests.engine.sequences import sequence
from tests.support import tiny_qwen_vl
from tests.support.local import LocalCluster
from tests.worker.test_build import MODEL

H100 = GPU_BYTES["h100"]


def published(name: str) -> ModelConfig:
    (found,) = (each for each in MODELS if each.name == name)
    return parse(found.config, {})


def on_gpus(model: ModelConfig, num_gpus: int = 1, *contexts: int, **settings: Any) -> ModelPlan:
    quantization, size = settings.pop("quantization", "none"), settings.pop("gpu", H100)
    return plan_model(
        model,
        EngineSection(**settings),
        "bfloat16",
        quantization,
        num_gpus=num_gpus,
        memory_bytes=size,
        contexts=contexts,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_cache_gib": 0.25, "kv_dtype": "float8_e4m3"}, {"num_blocks": 600, "window": 128}],
    ids=["default", "fp8", "window"],
)
def test_a_worker_on_a_cpu_has_what_was_planned(
    real_model_dir: Path, settings: dict[str, Any]
) -> None:
    engine = EngineSection(**settings)
    model = model_config(real_model_dir, engine)
    plan = plan_model(model, engine, "bfloat16", "none")
    with LocalCluster(
        real_model_dir, prefill=0, decode=1, dtype="bfloat16", engine=engine
    ) as cluster:
        info = cluster.workers["decode-0"].info
        assert (plan.num_blocks, plan.block_size) == (info.num_blocks, info.block_size)
        assert plan.bytes_per_block == info.bytes_per_block
        assert plan.max_model_len == info.max_model_len
        assert plan.max_num_seqs == info.max_num_seqs
        windows = [kind.window for kind in plan.kinds for _ in range(kind.num_groups)]
        assert tuple(windows) == (info.group_windows or (0,))


@pytest.mark.parametrize("hybrid", [False, True])
def test_images_take_what_their_tower_has_and_settings_say(tmp_path: Path, hybrid: bool) -> None:
    made = tiny_qwen_vl.make(tmp_path, hybrid=hybrid)
    model, engine = model_config(tmp_path, EngineSection()), EngineSection(image_bytes=1 << 20)
    images = plan_model(model, engine, "float32", "none").images
    assert images is not None
    assert images.tower_bytes == sum(each.nbytes for each in made.model.visual.parameters())
    assert (images.kept_bytes, images.most_pixels) == (1 << 20, 40 * tiny_qwen_vl.UNIT**2)
    assert model.vision is not None
    half = replace(model.vision, most_pixels=images.most_pixels // 2)
    assert images.encoding_bytes == 2 * half.most_encoding_bytes
    on_gpu = plan_model(model, engine, "bfloat16", "none", num_gpus=1, memory_bytes=H100)
    assert on_gpu.images is None, "images are read on CPUs"
    sizes = EngineSection(image_bytes=1 << 30, num_blocks=64)
    enough, short = (
        plan_model(model, sizes, "float32", "none", memory_bytes=size).problems
        for size in (2 << 30, 1 << 30)
    )
    assert not enough
    (told,) = short
    assert told.startswith("too little memory for images: a tower of 0.00 GiB, 1.00 of embeddings")
    assert "one of 40,960 pixels" in told
    assert "lower engine.image_bytes" in told


def held(model: ModelConfig, plan: ModelPlan, engine: EngineSection, length: int) -> int:
    """How many sequences of so many tokens a cache manager takes, each computed before the next."""
    from kvrelay.worker.kv_plan import plan_kv

    windows = plan_kv(model, engine, plan.dtype).windows
    kv, count = KVCacheManager(plan.num_blocks, plan.block_size, windows=windows), 0
    while True:
        first = 1 + count * length
        seq = sequence(list(range(first, first + length)))
        if not kv.admit(seq, headroom=0):
            return count
        while seq.num_computed < length:
            seq.num_computed = min(length, seq.num_computed + plan.block_size)
            kv.seal_computed(seq)
            kv.slide(seq)
            if not kv.grow(seq):
                return count
        count += 1


@pytest.mark.parametrize("family", ["llama", "gemma3", *HYBRID])
def test_as_many_sequences_are_held_as_were_planned(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    engine = EngineSection(num_blocks=400, max_num_seqs=400)
    model, length = model_config(tmp_path, engine), 150
    plan = plan_model(model, engine, "float32", "none", contexts=[length])
    found = held(model, plan, engine, length)
    # A prompt's next block is planned for each window, and decodes need it one after the other.
    spare = sum(kind.num_groups for kind in plan.kinds if kind.window or kind.kind == "state")
    per_sequence = plan.num_blocks // plan.num_sequences[length]
    assert plan.num_sequences[length] <= found
    assert found <= plan.num_blocks // (per_sequence - spare)
    assert not plan.problems


def test_kinds_of_layers_are_told_apart() -> None:
    found = on_gpus(published("gpt-oss-20b"), 1, 32_768)
    full, window = found.kinds
    assert (full.kind, full.num_layers, full.bytes_per_token) == ("full", 12, 24_576)
    assert (window.kind, window.window, window.bytes_per_token) == ("window", 128, 0)
    assert full.sequence_bytes[32_768] == 24_576 * 32_768
    assert window.sequence_bytes[32_768] < 5 << 20
    full, state = on_gpus(published("Qwen3-Next"), 4, 32_768, tensor_parallel_size=4).kinds
    assert (state.kind, state.num_layers, full.num_layers) == ("state", 36, 12)


def test_a_gpu_has_for_kv_what_a_worker_would_leave() -> None:
    """By the arithmetic with which the worker makes its pool, when it has measured its step."""
    engine = EngineSection().sized(gpu=True)
    found = on_gpus(MODEL)
    assert found.weights_bytes == weights_bytes(MODEL, "bfloat16", on_gpu=True)
    step = step_bytes(MODEL, 8192, 256, "bfloat16", 1)
    assert found.step_bytes == step
    memory = DeviceMemory(H100, H100 - (512 << 20), 0, found.weights_bytes + step)
    assert found.num_blocks == memory.room(0.9) // found.bytes_per_block
    assert found.kv_bytes + found.weights_bytes + step + found.other_bytes <= 0.9 * H100
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (8192, 256)
    two = on_gpus(replace(MODEL, num_kv_heads=9), 4, tensor_parallel_size=3)
    assert (two.num_ranks, two.num_workers) == (3, 1)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_quantized_weights_leave_room_on_a_gpu_but_for_the_head(quantization: str) -> None:
    table = MODEL.vocab_size * MODEL.hidden_size
    wide, small = (weights_bytes(MODEL, "bfloat16", q, on_gpu=True) for q in ("none", quantization))
    matrices = MODEL.num_parameters - table - MODEL.num_float32
    assert wide == 2 * (2 * table + matrices) + 4 * MODEL.num_float32
    each = {"fp8": 1 + 4 / 576, "int8": 1 + 2 / 64}[quantization]
    assert small == pytest.approx(4 * table + 4 * MODEL.num_float32 + each * matrices, abs=1)
    mixture = published("MiniMax M2")
    routed = mixture.num_routed
    assert 0.9 < routed / mixture.num_parameters < 1
    least = weights_bytes(mixture, "bfloat16", quantization, on_gpu=True)
    assert (least > 2 * routed) == (quantization == "fp8"), "experts stay as they are in fp8"
    learned = published("gpt-oss-20b")  # which torch alone computes
    assert weights_bytes(learned, "bfloat16", quantization) == weights_bytes(learned, "bfloat16")


def test_what_does_not_fit_is_told_with_what_would() -> None:
    (told,) = on_gpus(published("Qwen3"), 1, gpu=24 << 30).problems
    assert told.startswith("no room for KV: 61.0 GiB of weights on each GPU, and 90% of 24.0 GiB")
    assert told.endswith("it fits with --tensor-parallel-size 4")
    (told,) = on_gpus(published("Qwen3"), 1, gpu=48 << 30).problems
    assert told.endswith("--tensor-parallel-size 2 or --quantization fp8")
    assert not on_gpus(published("Qwen3"), 1, gpu=48 << 30, quantization="fp8").problems
    told, *_ = on_gpus(published("Qwen3"), 2, tensor_parallel_size=4).problems
    assert told.startswith("engine.tensor_parallel_size = 4: a worker has so many GPUs, and there")
    (told,) = on_gpus(MODEL, 1, kv_cache_gib=100.0).problems
    assert told.startswith("100.0 GiB of KV and 0.3 of weights are more than 1 GPU(s) of 79.6 GiB")
    (told,) = on_gpus(MODEL, 1, 9_000).problems
    assert told == "9,000 tokens: the model has 8,192 positions"
    (told,) = on_gpus(MODEL, 1, 8_192, num_blocks=100).problems
    assert told == "8,192 tokens do not fit: the KV blocks hold a sequence of 1,600"
    assert on_gpus(MODEL, 1, 8_192, num_blocks=100).num_sequences == {8_192: 0}
    told = plan_model(MODEL, EngineSection(), "bfloat16", "none", memory_bytes=1 << 30).problems[0]
    assert told.startswith("too little memory: 1 worker(s) need 1.8 GiB (each 0.30 weights + 1.00")


def test_without_lengths_some_up_to_the_models_are_shown() -> None:
    assert [*on_gpus(MODEL).num_sequences] == [8_192]
    assert [*on_gpus(published("gpt-oss-20b")).num_sequences] == [8_192, 32_768, 131_072]
    assert on_gpus(MODEL).num_sequences == {8_192: 256}, "no more than run at once"
    assert int(GIB) * 79 < H100 < int(GIB) * 80
    assert json.dumps([*on_gpus(MODEL).num_sequences])
