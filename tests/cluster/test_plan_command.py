"""`kvrelay plan`: what it takes, what it shows, and how it says no."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from kvrelay.cluster.cli.main import main
from kvrelay.worker.model_plan import GPU_BYTES
from tests.docs.plan import PAGE, with_plan
from tests.engine.model.checkpoint.published import MODELS

Plan = Callable[..., Result]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Plans gpt-oss-20b, of which there is the configuration alone."""
    (found,) = (each for each in MODELS if each.name == "gpt-oss-20b")
    (tmp_path / "config.json").write_text(json.dumps(found.config))
    monkeypatch.setenv("COLUMNS", "120")
    return lambda *words: CliRunner().invoke(main, ["plan", str(tmp_path), *words])


def test_a_person_is_shown_weights_kv_and_sequences(plan: Plan) -> None:
    result = plan("--gpus", "2xH100", "--context", "32768", "--context", "1000")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.replace("│", " ").split()) for line in result.output.splitlines()]
    assert "2 worker(s) on 2xH100, 79.65 GiB each" in " ".join(lines)
    assert "weights 12.81 mxfp4 experts, else bfloat16" in lines
    assert "full attention 12 1 24,576 768.0 23.6" in lines
    assert "last 128 tokens 12 1 - 3.8 3.8" in lines
    assert "sequences at once, a worker 75 256" in lines
    assert "a sequence has at most 131,072 tokens" in lines
    assert "a worker runs at most 256 at once (engine.max_num_seqs)" in lines


def test_flags_and_settings_of_serve_count(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_text("[engine]\nmax_num_seqs = 7\nblock_size = 32\n")
    words = "--gpus h100 -tp 1 --kv-cache-dtype fp8 --max-model-len 16k --set engine.block_size=64"
    result = plan(*words.split(), "--config", str(tmp_path / "k.toml"), "--json")
    found = json.loads(result.output)
    assert (found["kv_dtype"], found["max_model_len"], found["block_size"]) == (
        *("float8_e4m3", 16_000, 64),
    )
    assert found["num_sequences"] == {"8192": 7, "16000": 7}
    assert found["memory_bytes"] == GPU_BYTES["h100"]


@pytest.mark.parametrize(
    ("words", "num_gpus", "gib"),
    [
        ("--gpus L40S", 1, 44.99),
        ("--gpus 4xa100-40GB --memory 39.5GiB", 4, 39.5),
        ("--gpus 2 --memory 96GiB", 2, 96.0),
        ("--gpus 8xA100", 8, 80.0),
        ("--gpus 1xB200 --memory 180gb", 1, 167.64),
    ],
)
def test_gpus_are_named_or_their_memory_is(
    plan: Plan, words: str, num_gpus: int, gib: float
) -> None:
    result = plan(*words.split(), "--quantization", "fp8", "--context", "1000", "--json")
    found = json.loads(result.output)
    assert found["num_workers"] == num_gpus
    assert found["memory_bytes"] / (1 << 30) == pytest.approx(gib, abs=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpus 3xH10", "--gpus 3xH10: expected a number and a name, as 2xH100; there are H100,"),
        ("--gpus 0xH100", "--gpus 0xH100: expected a number and a name"),
        ("--gpus 2", "--gpus 2 --memory 96GiB"),
        ("--gpus H100 --memory much", "--memory much: expected a size, as 80GiB or 80GB"),
        ("--gpus H100 --quantization int4", "quantization int4 is not supported; supported: none"),
        ("--quantization fp8", "quantization fp8 is not supported; supported: none, int8, int4"),
        ("-tp 3", "engine.tensor_parallel_size = 3 does not divide the model's attention heads"),
        ("--max-model-len 200000", "engine.max_model_len = 200000: the model has 131072 positions"),
        ("--set engine.block_size=0", "engine.block_size = 0: expected at least 1"),
        ("--context 0", "Invalid value for '--context'"),
        ("--gpsu H100", "did you mean --gpus?"),
    ],
)
def test_what_cannot_be_planned_is_one_line(plan: Plan, words: str, said: str) -> None:
    result = plan(*words.split())
    assert result.exit_code == 2
    assert said in result.stderr


def test_what_does_not_fit_ends_with_one_and_says_what_would(plan: Plan) -> None:
    result = plan("--gpus", "1xL4", "--memory", "12GiB")
    assert result.exit_code == 1
    assert "no room for KV: 12.8 GiB of weights on each GPU" in result.output
    assert "it fits with --tensor-parallel-size 2" in result.output


def test_a_model_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = CliRunner().invoke(main, ["plan", "nobody/has-this", "--gpus", "h100"])
    assert result.exit_code == 2
    assert "cannot fetch nobody/has-this from the hub" in result.stderr
    assert result.stderr.count("\n") == 1
    result = CliRunner().invoke(main, ["plan", "no-such-folder"])
    assert "no model no-such-folder: it is not a directory" in result.stderr


def test_the_page_has_what_is_planned() -> None:
    """If this fails: `python -m tests.docs.plan`."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_plan(page) == page
