"""From configuration to a worker: sizes, memory, and what is said when it does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvrelay.cluster.config import Config
from kvrelay.cluster.prepare import prepare_model
from kvrelay.cluster.roles import build_worker
from kvrelay.engine.config import EngineSection, ModelSection, TiersSection
from kvrelay.engine.kv.tier import DiskRecord
from kvrelay.engine.model.config import ModelConfig, Rope
from kvrelay.engine.stats import Role, WorkerInfo
from kvrelay.worker import build
from kvrelay.worker.build import in_all
from kvrelay.worker.kv_plan import (
    SPARE_BYTES,
    BuildError,
    auto_host_bytes,
    check_memory,
    kv_lines,
    plan_kv,
    plan_tiers,
    resolve_max_model_len,
)
from kvrelay.worker.spec import WorkerSpec
from kvrelay.worker.transfers import worker_config
from tests.engine.model.tiny import make_checkpoint

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    rms_norm_eps=1e-5,
    ropes=(Rope(1e5, 64),),
    tie_word_embeddings=True,
    attention_bias=False,
    output_bias=False,
    qk_norm=False,
    max_position_embeddings=8192,
    bos_token_id=1,
    eos_token_ids=(2,),
)


def test_the_memory_for_kv_decides_the_number_of_blocks() -> None:
    plan = plan_kv(MODEL, EngineSection(kv_cache_gib=1.0), "float32")
    assert plan.spec.bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert plan.num_blocks == (1 << 30) // (46_080 * 16)
    assert plan.kv_bytes <= 1 << 30
    assert plan_kv(MODEL, EngineSection(num_blocks=7), "bfloat16").num_blocks == 7


def test_too_little_for_a_block_is_said() -> None:
    with pytest.raises(BuildError, match=r"engine.kv_cache_gib = 0.0001: too little for one KV"):
        plan_kv(MODEL, EngineSection(kv_cache_gib=0.0001), "float32")


def test_too_little_memory_is_said_with_what_is_needed() -> None:
    plan = plan_kv(MODEL, EngineSection(kv_cache_gib=1.0), "float32")
    needed = plan.kv_bytes + plan.weights_bytes + SPARE_BYTES
    check_memory([plan, plan], 2 * needed)
    check_memory([], 0)
    with pytest.raises(BuildError, match=r"2 worker\(s\) need 4\.\d GiB .* 4\.\d GiB are avail"):
        check_memory([plan, plan], 2 * needed - 1)


def test_workers_of_two_sizes_need_what_each_of_them_needs() -> None:
    engines = [EngineSection(num_blocks=8, tensor_parallel_size=size) for size in (1, 3)]
    one, three = (plan_kv(MODEL, engine, "float32") for engine in engines)
    needed = 2 * one.needed_bytes + three.needed_bytes
    assert three.needed_bytes - one.needed_bytes > 2 * SPARE_BYTES
    check_memory([one, three, one], needed)
    with pytest.raises(BuildError, match=r"3 worker\(s\) need .*2 of them .*1 of them .* spare\),"):
        check_memory([one, three, one], needed - 1)


def test_weights_in_eight_bits_leave_room_for_what_they_save() -> None:
    engine = EngineSection(num_blocks=8)
    wide, int8 = plan_kv(MODEL, engine, "float32"), plan_kv(MODEL, engine, "float32", "int8")
    table = MODEL.vocab_size * MODEL.hidden_size  # rows of it are read: it stays as it is
    assert wide.weights_bytes == 4 * (MODEL.num_parameters + table)
    matrices = MODEL.num_parameters - MODEL.num_float32
    assert int8.weights_bytes == 4 * (table + MODEL.num_float32) + matrices * (1 + 2 / 64)
    check_memory([int8], int8.needed_bytes)
    with pytest.raises(BuildError, match=r"each 0.23 weights \+"):
        check_memory([int8], int8.needed_bytes - 1)


def test_the_context_is_the_models_as_far_as_kv_holds_it() -> None:
    def resolve(**settings: int) -> int:
        engine = EngineSection(**settings)  # type: ignore[arg-type]
        return resolve_max_model_len(MODEL, engine, plan_kv(MODEL, engine, "float32"))

    assert resolve() == 8192
    assert resolve(max_model_len=100) == 100
    assert resolve(num_blocks=64) == 64 * 16
    assert resolve(num_blocks=64, max_model_len=8192) == 8192, "what is asked for is kept"
    with pytest.raises(BuildError, match="max_model_len = 8193: the model has 8192 positions"):
        resolve(max_model_len=8193)


def test_a_pool_that_does_not_hold_a_row_of_all_groups_is_an_error() -> None:
    model = dataclasses.replace(MODEL, num_layers=12, windows=(*(512,) * 5, 0) * 2)
    assert len(model.kv_groups()) > 2
    engine = EngineSection(num_blocks=2)
    with pytest.raises(
        BuildError, match=r"16 tokens need 6 blocks, 6 groups .* there are 2; raise"
    ):
        resolve_max_model_len(model, engine, plan_kv(model, engine, "float32"))


def test_what_kv_costs_is_told_from_what_a_worker_reports() -> None:
    info = WorkerInfo("decode-0", Role.DECODE, 1, 1000, 16, 46_080 * 8, 8192, 512, b"f")
    first, second = kv_lines(MODEL, [info, info])
    assert "23,040 bytes a token = 2 (K, V) x 30 layers x 3 KV heads x 64 head_dim x 2" in first
    assert "1,000 blocks of 16 tokens = 16,000 tokens = 0.34 GiB" in second


def test_pools_of_different_sizes_are_told_for_each_role() -> None:
    info = WorkerInfo("decode-0", Role.DECODE, 1, 1000, 16, 46_080 * 8, 8192, 512, b"f")
    larger = dataclasses.replace(info, worker="prefill-0", role=Role.PREFILL, num_blocks=3000)
    _, *pools = kv_lines(MODEL, [larger, info, dataclasses.replace(larger, num_blocks=2990)])
    assert [line.split("=")[0].split()[0] for line in pools] == ["2,990", "1,000"]
    assert [line.rpartition("in each ")[2] for line in pools] == ["prefill worker", "decode worker"]


def test_what_the_tiers_hold_is_told_of_all_workers_that_have_them() -> None:
    info = WorkerInfo("prefill-0", Role.PREFILL, 1, 1000, 16, 46_080 * 8, 8192, 512, b"f")
    below = dataclasses.replace(info, num_host_blocks=2000, num_disk_blocks=30_000)
    *_, host, disk = kv_lines(MODEL, [info, below, below])
    assert host == "host:     4,000 blocks of 16 tokens = 64,000 tokens = 1.37 GiB in 2 worker(s)"
    assert disk.startswith("disk:     60,000 blocks of 16 tokens = 960,000 tokens = 20.6")


def spec_of(**changes: Any) -> WorkerSpec:
    spec = WorkerSpec(
        cluster="c",
        worker="decode-0",
        role=Role.DECODE,
        epoch=1,
        model_dir="",
        model=ModelSection(name="", dtype="float32", device="cpu"),
        engine=EngineSection(num_blocks=8, threads=1),
        tiers=TiersSection(),
    )
    return dataclasses.replace(spec, **changes)


def test_tiers_hold_as_many_blocks_as_fit() -> None:
    plan = plan_kv(MODEL, EngineSection(num_blocks=8), "float32")
    size = plan.spec.bytes_per_block
    off = plan_tiers(plan, 0, 0)
    assert (off.num_host_blocks, off.num_disk_blocks, off.host_bytes) == (0, 0, 0)
    both = plan_tiers(plan, 3 * size - 1, 70 * size)
    assert (both.num_host_blocks, both.num_disk_blocks) == (2, 70)
    assert (both.host_bytes, both.needed_bytes) == (2 * size, plan.needed_bytes)
    coded = plan_tiers(plan, 0, 70 * size, "lossless")
    assert (coded.num_disk_blocks, coded.disk_bytes) == (int(70 / 0.8), 70 * size), "in float32"
    with pytest.raises(BuildError, match=r"tiers.disk_gib: this worker's share of 0.0006\d+ GiB"):
        plan_tiers(plan, 0, size - 1)


def test_memory_in_four_bits_holds_what_can_be_quantised() -> None:
    plan = plan_kv(MODEL, EngineSection(num_blocks=8), "bfloat16")
    size = plan.spec.bytes_per_block
    both = plan_tiers(plan, 2 * size, 0, packed_bytes=10 * size)
    assert (both.num_host_blocks, both.num_packed_blocks) == (2, 29)
    assert 11.9 * size < both.host_bytes <= 12 * size
    with pytest.raises(BuildError, match=r"tiers\.packed_gib without tiers\.host_gib"):
        plan_tiers(plan, 0, 0, packed_bytes=10 * size)
    with pytest.raises(BuildError, match=r"tiers\.packed_gib: this worker's share"):
        plan_tiers(plan, 2 * size, 0, packed_bytes=size // 4)
    fp8 = plan_kv(MODEL, EngineSection(num_blocks=8, kv_dtype="float8_e4m3"), "bfloat16")
    assert plan_tiers(fp8, 2 * size, 0, packed_bytes=10 * size).num_packed_blocks == 0


def test_what_a_block_takes_on_disk_is_added_up_over_ranks() -> None:
    """Listed are blocks that all ranks have."""
    of_ranks = [
        [DiskRecord(slot, bytes([slot]), 7, 9.0, 4096 * (1 + rank)) for slot in slots]
        for rank, slots in enumerate([(0, 1, 2), (1, 2, 3)])
    ]
    expected = tuple(DiskRecord(slot, bytes([slot]), 7, 9.0, 3 * 4096) for slot in (1, 2))
    assert in_all(of_ranks) == expected


def test_a_host_tier_of_auto_is_a_quarter_of_what_is_free_and_a_few_pools_at_most() -> None:
    plan = plan_kv(MODEL, EngineSection(num_blocks=8), "float32")
    size = plan.spec.bytes_per_block
    assert auto_host_bytes(plan, 1, 4 * 10 * size + 3) == 10 * size
    assert auto_host_bytes(plan, 2, 4 * 10 * size) == 5 * size
    assert auto_host_bytes(plan, 1, 4 * 1000 * size) == 4 * plan.kv_bytes
    assert auto_host_bytes(plan, 1, size) == auto_host_bytes(plan, 1, -size) == 0
    unplanned = dataclasses.replace(
        plan, num_blocks=0
    )  # as on a GPU, whose pool is made of what is left
    assert auto_host_bytes(unplanned, 1, 4 * 10 * size, gpu_bytes=100 * size) == 10 * size
    assert auto_host_bytes(unplanned, 1, 4 * 1000 * size, gpu_bytes=100 * size) == 400 * size
    assert auto_host_bytes(plan, 0, 4 * 1000 * size) == 0  # a prefill worker beside a decode one


def test_memory_of_the_host_tier_counts() -> None:
    plan = plan_kv(MODEL, EngineSection(kv_cache_gib=1.0), "float32")
    host = 1 << 30
    check_memory([plan], plan.needed_bytes + host, host)
    with pytest.raises(BuildError, match=r"spare \+ 1.00 for the host tier\).*, tiers.host_gib or"):
        check_memory([plan], plan.needed_bytes + host - 1, host)
    with pytest.raises(BuildError, match=r"the host tier needs 1.0 GiB, 1.0 GiB are available"):
        check_memory([], host - 1, host)


def test_a_worker_waits_for_what_others_may_have_left() -> None:
    """Also one that has no host memory itself, as those that compute prompts."""
    plan = plan_kv(MODEL, EngineSection(), "float32")
    for host_gib, num_peers, waits in (("auto", 1, True), (0.0, 1, False), ("auto", 0, False)):
        spec = spec_of(tiers=TiersSection(host_gib=host_gib), num_peers=num_peers)
        assert worker_config(spec, plan, 8192, bytes(32)).reads_left_kv == waits


@pytest.mark.parametrize(
    ("threads", "ranks", "num_peers", "own"),
    [
        (1, 1, 1, True),
        (1, 1, 2, False),
        (2, 1, 1, False),
        (0, 1, 0, False),
        (1, 2, 0, True),
        (1, 2, 1, False),
    ],
)
def test_workers_with_a_core_for_each_thread_do_not_share_cores(
    monkeypatch: pytest.MonkeyPatch, threads: int, ranks: int, num_peers: int, own: bool
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    engine = EngineSection(num_blocks=8, threads=threads, tensor_parallel_size=ranks)
    spec = spec_of(engine=engine, num_peers=num_peers, machine="m")
    plan = plan_kv(MODEL, engine, "float32")
    assert worker_config(spec, plan, 8192, bytes(32)).cores == ("" if own else "m")


def test_a_worker_can_say_what_its_kv_is_made_of() -> None:
    plan = plan_kv(MODEL, EngineSection(num_blocks=8), "float32")
    ours = worker_config(spec_of(tiers=TiersSection(retention_s=60.0)), plan, 8192, bytes(32))
    half = dataclasses.replace(plan, spec=MODEL.kv_spec(16, "bfloat16"))
    theirs = worker_config(spec_of(), half, 8192, bytes(32))
    assert ours.retention.keep_s == 60.0
    assert ours.fingerprint != theirs.fingerprint
    assert dict(ours.compatibility)["model"] == "0" * 12
    differing = set(ours.compatibility) ^ set(theirs.compatibility)
    assert differing == {("dtype", "float32"), ("dtype", "bfloat16")}


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    config = structs.replace(Config(), model=ModelSection(name=str(tmp_path / "none")))
    with pytest.raises(BuildError) as caught:
        prepare_model(config, 1, lambda _news: None)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "none") in str(caught.value)


@pytest.mark.parametrize("setting", ["attention_backend", "moe_backend"])
def test_a_backend_that_a_cpu_does_not_have_is_one_line(tmp_path: Path, setting: str) -> None:
    make_checkpoint("llama", tmp_path)
    engine = structs.replace(EngineSection(num_blocks=4), **{setting: "flashinfer"})
    spec = spec_of(engine=engine, model_dir=str(tmp_path))
    with pytest.raises(BuildError, match=rf"^{setting} flashinfer needs a GPU"):
        build_worker(spec)


def _replace(path: Path) -> None:
    """As a new version is put into place: same size, another file."""
    file = path / "model.safetensors"
    fresh = path / "fresh"
    fresh.write_bytes(file.read_bytes()[:-1] + b"\x01")
    fresh.rename(file)


def _edit(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")


def _add(path: Path) -> None:
    (path / "more.safetensors").write_bytes((path / "model.safetensors").read_bytes())


@pytest.mark.parametrize(
    ("change", "name"), [(_replace, "model"), (_edit, "model"), (_add, "more")]
)
def test_a_checkpoint_that_changes_while_it_is_loaded_fails_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], name: str
) -> None:
    """Else KV of the old weights would be named by the digest of the new ones."""
    make_checkpoint("llama", tmp_path)
    load = build.open_runner

    def changed(*args: Any) -> Any:
        loaded = load(*args)
        change(tmp_path)
        return loaded

    monkeypatch.setattr(build, "open_runner", changed)
    spec = spec_of(engine=EngineSection(num_blocks=4), model_dir=str(tmp_path))
    wanted = rf"{name}.safetensors was changed while the model was loaded: start again"
    with pytest.raises(BuildError, match=wanted):
        build_worker(spec)
