"""`kvrelay replay`: what it makes of its options, what it writes, and how it says no."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvrelay.cluster.cli.main import main
from kvrelay.lab.replay.config import ORACLE, Fault, ReplayConfig
from kvrelay.lab.replay.replay import ReplayResult
from kvrelay.lab.replay.trace import Trace
from kvrelay.router.config import POLICIES
from tests.lab.replay.results_kit import result, sample

LINE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'


class FakeReplay:
    """Stands for the engine: keeps what it was asked, and answers at once."""

    def __init__(self) -> None:
        self.asked: list[tuple[Trace, ReplayConfig]] = []

    def __call__(
        self, trace: Trace, config: ReplayConfig, on_progress: Callable[[float, float], None]
    ) -> ReplayResult:
        self.asked.append((trace, config))
        on_progress(0.5, 10.0)
        on_progress(1.0, 20.0)
        return result([sample(n) for n in range(len(trace.requests))], config.router.policy)

    @property
    def config(self) -> ReplayConfig:
        return self.asked[0][1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeReplay:
    replay = FakeReplay()
    monkeypatch.setattr("kvrelay.lab.replay.replay.replay", replay)
    return replay


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE * 3)
    return path


def simulate(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


def test_options_become_the_cluster_that_is_simulated(fake: FakeReplay, trace_path: Path) -> None:
    options = "--prefill 8 --decode 4 --blocks 300 --block-size 256 --speedup 2.5 --max-seqs 32"
    options += " --max-batched-tokens 4096 --host-gib 64 --disk-blocks 9000 --seed 5 --timeout-s 9"
    done = simulate(trace_path, *options.split())
    assert done.exit_code == 0, done.output
    config = fake.config
    assert (config.num_prefill, config.num_decode) == (8, 4)
    assert (config.num_blocks, config.block_size) == (300, 256)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (32, 4096)
    block_bytes = config.timing.links.bytes_per_token * 256
    assert config.num_host_blocks == 64 * 2**30 // block_bytes
    assert (config.num_disk_blocks, config.seed, config.timeout_s) == (9000, 5, 9)
    assert (config.speedup, config.timing.name) == (2.5, "h100:llama-3-8b")
    assert "3 of 3" in done.stdout


def test_several_policies_are_compared_in_one_table(fake: FakeReplay, trace_path: Path) -> None:
    done = simulate(trace_path, "--policy", "round_robin, prefix,prefix")
    assert [config.router.policy for _, config in fake.asked] == ["round_robin", "prefix"]
    assert "2 policies" in done.stdout
    fake.asked.clear()
    simulate(trace_path, "--policy", "all")
    assert tuple(config.policy for _, config in fake.asked) == (*POLICIES, ORACLE)


def test_models_are_replayed_each_with_its_own_cluster(fake: FakeReplay, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * n, "input_length": 600, "output_length": 5, "hash_ids": [], "model": m}
        for n, m in enumerate(("small", "chat", "chat"))
    ]
    path, json_path = tmp_path / "trace.jsonl", tmp_path / "out.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    third = f"third={tmp_path / 'third.jsonl'}"
    (tmp_path / "third.jsonl").write_text(LINE)
    options: tuple[Any, ...] = ("--prefill", 2, "--own", "chat.decode=4", "--own", "chat.blocks=9")
    faults = "kill decode-chat-3 at 1 for 2; kill prefill-third-0 at 3 for 4"
    done = simulate(path, "--model", third, *options, "--json", json_path, "--faults", faults)
    assert done.exit_code == 0, done.output
    found = {}
    for trace, config in fake.asked:
        times = [request.at_s for request in trace.requests]
        shape = config.num_prefill, config.num_decode, config.num_blocks
        found[trace.requests[0].model or trace.name] = times, shape, config.faults
    assert found == {
        "chat": ([1.0, 2.0], (2, 4, 9), (Fault("decode-3", 1, 2),)),
        "small": ([0.0], (2, 1, 400), ()),
        "third": ([0.0], (2, 1, 400), (Fault("prefill-0", 3, 4),)),
    }
    made = json.loads(json_path.read_text())
    assert [each["model"] for each in made["results"]] == ["chat", "small", "third"]
    assert made["settings"]["chat"]["num_decode"] == 4
    table = done.stdout[done.stdout.rindex("model") :].splitlines()
    assert [line.split()[:2] for line in table if line.strip()][2:] == [
        ["chat", "2"],
        ["small", "1"],
        ["third", "1"],
    ]


def test_faults_and_the_router_come_from_the_user(
    fake: FakeReplay, trace_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "kvrelay.toml"
    path.write_text('[router]\npolicy = "least_loaded"\nmax_queue = 7\n')
    faults = "kill decode-0 at 600 for 30; kill prefill-1 at 0.5 for 1.5;"
    done = simulate(trace_path, "--config", path, "--prefill", 2, "--faults", faults)
    assert done.exit_code == 0, done.output
    assert fake.config.faults == (Fault("decode-0", 600, 30), Fault("prefill-1", 0.5, 1.5))
    assert (fake.config.router.policy, fake.config.router.max_queue) == ("least_loaded", 7)


def test_synthetic_traffic_is_made_as_asked(fake: FakeReplay) -> None:
    options = ("--requests", 50, "--rate", 5, "--seed", 3, "--block-size", 64)
    assert simulate("synthetic:chat", *options).exit_code == 0
    trace, _ = fake.asked[0]
    assert (trace.name, len(trace.requests), trace.block_tokens) == ("synthetic:chat", 50, 64)


@pytest.mark.slow
def test_json_has_the_settings_and_a_picture_is_drawn(
    fake: FakeReplay, trace_path: Path, tmp_path: Path
) -> None:
    json_path, plot_path = tmp_path / "out.json", tmp_path / "out.png"
    faults = "kill decode-0 at 1 for 1"
    options = ("--limit", 2, "--json", json_path, "--plot", plot_path, "--faults", faults)
    assert simulate(trace_path, *options, "--itl-slo-ms", 5).exit_code == 0
    found = json.loads(json_path.read_text())
    assert found["trace"] == "trace"
    assert found["settings"]["num_blocks"] == 400
    assert found["settings"]["faults"] == [{"worker": "decode-0", "at_s": 1.0, "down_s": 1.0}]
    assert found["results"][0]["ttft_ms"]["p50"] == pytest.approx(100)
    assert found["results"][0]["requests"] == 2
    assert found["results"][0]["goodput"]["requests"] == 0
    assert plot_path.read_bytes().startswith(b"\x89PNG")


def test_json_to_stdout_is_json_alone(fake: FakeReplay, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4\n")
    done = simulate(path, "--json", "-")
    assert json.loads(done.stdout)["notes"]
    assert "note: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["synthetic:chats"], "there is no synthetic:chats; there are synthetic:chat,"),
        (["TRACE", "--rate", "3"], "--requests and --rate are for synthetic:NAME"),
        (["TRACE", "--policy", "best"], "policy 'best' is unknown; there are prefix,"),
        (["TRACE", "--timing", "abacus"], "abacus"),
        ([], "no traffic: name a trace, or --model NAME=TRACE"),
        (["--model", "a"], "--model 'a': write NAME=TRACE"),
        (["--model", "a=TRACE", "--model", "a=TRACE"], "that model has traffic already"),
        (["TRACE", "--model", "a=TRACE"], "some requests name no model: all do, or none"),
        (["TRACE", "--own", "a.decode=2"], "a model of the traffic (it names none) and one of"),
        (["--model", "a=TRACE", "--own", "a.json=2"], "--own 'a.json=2': write NAME.OPTION"),
        (["--model", "a=TRACE", "--own", "a.decode=x"], "a.decode=x': 'x' is not a valid integer"),
        (
            ["--model", "a=TRACE", "--faults", "kill decode-0 at 1 for 1"],
            "workers are called decode-a-0",
        ),
        (
            ["--model", "a=TRACE", "--model", "b=TRACE", "--autoscale"],
            "--autoscale replays one model, and there are a, b",
        ),
        (["TRACE", "--faults", "stop decode-0"], "fault 'stop decode-0': write kill decode-3 at"),
        (["TRACE", "--faults", "kill decode-1 at 1 for 1"], "there is no worker 'decode-1'"),
        (["TRACE", "--host-gib", "0.01"], "holds no block; one has 0.0625 GiB"),
        (["TRACE", "--disk-gib", "9", "--disk-blocks", "9"], "give one of them"),
        (["TRACE", "--speedup", "inf"], "speedup is inf"),
        (["TRACE", "--config", "nowhere.toml"], "nowhere.toml: No such file"),
        (["TRACE", "--plot", "no-such-folder/out.png"], "no-such-folder/out.png cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_simulated(
    fake: FakeReplay, trace_path: Path, arguments: list[str], words: str
) -> None:
    done = simulate(*(each.replace("TRACE", str(trace_path)) for each in arguments))
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not fake.asked


def test_a_bad_line_of_a_trace_is_named(fake: FakeReplay, trace_path: Path) -> None:
    trace_path.write_text(LINE + LINE.replace("600", "6000"))
    done = simulate(trace_path)
    assert done.exit_code == 2
    assert f"{trace_path}, line 2: hash_ids has 2 ids" in done.stderr


def test_the_cluster_itself_answers_what_is_asked() -> None:
    options = "--requests 20 --rate 2 --prefill 1 --decode 2 --policy prefix,round_robin --json -"
    done = simulate("synthetic:chat", *options.split())
    assert done.exit_code == 0, done.output
    for found in json.loads(done.stdout)["results"]:
        assert found["completed"] == 20
        assert 0 < found["ttft_ms"]["p50"] < found["second_token_ms"]["p50"]
        assert found["itl_ms"]["p50"] > 0
