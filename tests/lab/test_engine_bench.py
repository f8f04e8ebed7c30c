"""One worker alone, what is measured of it, and the floors beside it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from kvrelay.cluster.prepare import prepare_model
from kvrelay.engine.model import roofline as floor
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.config import Experts
from kvrelay.engine.model.roofline import (
    Rates,
    Weights,
    count_weights,
    decode_roofline_s,
    prefill_roofline_s,
)
from kvrelay.engine.request import FinishReason
from kvrelay.lab.bench import engine as engine_bench
from kvrelay.lab.bench import engine_start
from kvrelay.lab.bench.engine import (
    EngineSpec,
    Generated,
    LoneWorker,
    Prompts,
    WorkerFailed,
    decode_step_s,
    greedy,
)
from kvrelay.lab.cli.bench import bench
from tests.engine.model.tiny import VOCAB, make_checkpoint

START_S = {"python": 0.1, "imports": 1.0, "weights": 2.0, "first token": 2.5}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint("llama", path)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture
def spec(model_dir: Path) -> EngineSpec:
    return EngineSpec(
        model=str(model_dir),
        batches=(1, 3),
        input_len=5,
        output_len=6,
        prefills=(40,),
        dtype="float32",
        device="cpu",
        threads=2,
        rounds=2,
    )


@pytest.fixture
def worker(spec: EngineSpec) -> Any:
    config = spec.config()
    model = prepare_model(config, 1, lambda _: None)
    with LoneWorker(config, model) as worker:
        yield worker
        assert worker.node.check_idle() == []


def test_prompts_together_and_alone_get_the_same_tokens(worker: LoneWorker) -> None:
    prompts = Prompts(VOCAB, 3).take(3, 20)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    steps: list[int] = []
    params = replace(greedy(9), logprobs=0)
    together = worker.generate(
        prompts, params, on_step=lambda found: steps.append(sum(len(a.tokens) for a in found))
    )
    for answer in together:
        assert len(answer.tokens) == len(answer.arrived_at) == len(answer.logprobs) == 9
        assert answer.arrived_at == sorted(answer.arrived_at)
        assert answer.finish is FinishReason.LENGTH
    assert steps == sorted(steps)
    assert steps[-1] == 27
    alone = [worker.generate([prompt], params)[0].tokens for prompt in prompts]
    assert [answer.tokens for answer in together] == alone


def test_what_does_not_fit_is_told(worker: LoneWorker) -> None:
    with pytest.raises(WorkerFailed, match="context_length_exceeded: 600 tokens leave no room"):
        worker.generate([[1] * 600], greedy(1))


def test_a_step_is_timed_from_when_all_decode() -> None:
    first = Generated(tokens=[1, 2, 3, 4], arrived_at=[1.0, 2.0, 3.0, 4.0])
    second = Generated(tokens=[1, 2, 3], arrived_at=[2.0, 3.0, 4.0])
    assert decode_step_s([first, second]) == pytest.approx(1.0)
    with pytest.raises(WorkerFailed, match="1 tokens of output are too few for 1 sequences"):
        decode_step_s([Generated(tokens=[1], arrived_at=[1.0])])


def test_a_fresh_process_tells_when_it_reached_each_stage(
    spec: EngineSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    engine_start.main(json.dumps(asdict(spec)))
    stages = json.loads(capsys.readouterr().out)
    assert list(stages) == list(START_S)
    assert list(stages.values()) == sorted(stages.values())


def test_the_command_measures_and_tells(
    spec: EngineSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(floor.PROBE_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(floor.PROBE_SIZE, "cpu", 64)
    monkeypatch.setattr(engine_bench, "measure_start", lambda _: START_S)
    told = tmp_path / "out.json"
    args = ["engine", "--model", str(spec.model), "--batch", "3,1", "--input", "5", "--output", "6"]
    args += ["--prefill", "40", "--dtype", "float32", "--device", "cpu", "--rounds", "1"]
    done = CliRunner().invoke(bench, [*args, "--json", str(told)])
    assert done.exit_code == 0, done.output
    result = json.loads(told.read_text())
    assert [row["batch"] for row in result["decode"]] == [1, 3]
    for row in (*result["decode"], *result["prefill"]):
        assert row["tokens_per_s"] > 0
        assert row["share_of_roofline"] > 0
    assert result["start_s"] == START_S
    assert "first token 2.50 s" in done.output


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--batch", "1,x"], "'x': expected a whole number"),
        (["--batch", "0"], "'0': expected a whole number"),
        (["--output", "1"], "--output"),
        (["--dtype", "int3"], "model.dtype = 'int3': expected one of auto"),
        (["--model", "nothing-here"], "no model nothing-here"),
    ],
)
def test_options_that_make_no_sense_are_named(args: list[str], told: str) -> None:
    done = CliRunner().invoke(bench, ["engine", *args])
    assert done.exit_code != 0
    assert told in done.output


def test_weights_are_counted_as_they_are_kept(model_dir: Path) -> None:
    config = read_config(model_dir)
    tensors = load_file(model_dir / "model.safetensors")
    matrices = sum(t.numel() for n, t in tensors.items() if t.ndim > 1 and "embed" not in n)
    weights = count_weights(model_dir, config, "cpu", "float32", "none")
    assert weights.num_bytes(7) == 4 * matrices
    assert weights.head == config.vocab_size * config.hidden_size
    assert (
        count_weights(model_dir, config, "cpu", "float32", "int8").num_bytes(7)
        == matrices * 66 / 64
    )
    assert count_weights(model_dir, config, "cpu", "bfloat16", "none").num_bytes(7) == 2 * matrices
    assert weights.flops(10, 1) == 2 * (10 * (matrices - weights.head) + weights.head)
    routed = replace(config, experts=Experts(4, 1, 8, normalize=True))
    assert count_weights(model_dir, routed, "cpu", "float32", "none").share == 0.25


def test_the_slower_of_reading_and_multiplying_is_the_floor(model_dir: Path) -> None:
    rates = Rates(read_bytes_per_s=1e9, flops_per_s=1e10)
    weights = Weights(every=1_000_000, head=0, experts=0, share=0.0, bytes_per_number=2.0)
    assert decode_roofline_s(rates, weights, 1, 0, 0) == pytest.approx(2e-3)
    assert decode_roofline_s(rates, weights, 100, 0, 0) == pytest.approx(2e-2)
    assert decode_roofline_s(rates, weights, 1, 1000, 3000) == pytest.approx(5e-3)
    experts = replace(weights, experts=8_000_000, share=0.25)
    assert experts.num_bytes(1) == 2 * (1_000_000 + 2_000_000)
    assert experts.num_bytes(1000) == pytest.approx(2 * 9_000_000)
    config = read_config(model_dir)
    near = replace(config, windows=(10,) * config.num_layers)
    free = replace(weights, every=0)
    pairs = config.num_layers * 4 * config.num_heads * config.head_dim / 1e10
    assert prefill_roofline_s(rates, free, config, 100) == pytest.approx(pairs * 5050)
    assert prefill_roofline_s(rates, free, near, 100) == pytest.approx(pairs * (55 + 90 * 10))
