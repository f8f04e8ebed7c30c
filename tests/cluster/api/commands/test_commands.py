"""`kvrelay chat`, `kvrelay status` and `kvrelay bench serve` against a running server."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.client import chat, status, status_table
from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.process_messages import RouterLoad
from kvrelay.cluster.control.view import router_status
from kvrelay.cluster.status import RouterProcessStatus
from kvrelay.engine.request import Refusal
from kvrelay.lab.bench.load import (
    LoadSpec,
    RequestTiming,
    make_arrivals,
    make_prompts,
    percentile,
    summarize,
)
from kvrelay.lab.cli.bench import bench
from kvrelay.router.messages import Failed
from tests.cluster.api.conftest import MODEL, STATUS, Served


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "120")

    def invoke(command: Any, *arguments: str, **options: Any) -> Any:
        return CliRunner().invoke(command, arguments, **options)

    return invoke


@pytest.fixture
def nobody() -> str:
    """A URL at which nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_chat_answers_one_question(served: Served, run: Any) -> None:
    result = run(chat, "--url", served.url, "--max-tokens", "20", "What", "now?")
    assert result.exit_code == 0, result.output
    assert result.output == " The capital of France is Paris.\n"
    assert served.router.submits[0].sampling.max_tokens == 20


def test_chat_keeps_its_history_until_reset(served: Served, run: Any, tokenizer: Tokenizer) -> None:
    lines = "first\n\nsecond\n/what\n/reset\nthird\n/exit\n"
    result = run(chat, "--url", served.url, "--system", "Be brief.", input=lines)
    assert result.exit_code == 0, result.output
    assert result.output.count("Paris.") == 3
    assert "/reset and /exit" in result.output
    prompts = [tokenizer.decode(submit.tokens) for submit in served.router.submits]
    assert ["first" in prompt for prompt in prompts] == [True, True, False]
    assert "Paris." in prompts[1]
    assert all("Be brief." in prompt for prompt in prompts)


def test_chat_survives_a_refused_question_and_forgets_it(
    served: Served, run: Any, tokenizer: Tokenizer
) -> None:
    result = run(chat, "--url", served.url, input=f"{'long ' * 600}\nshort\n")  # then end of input
    assert result.exit_code == 0, result.output
    assert "maximum context length" in result.output
    assert "Paris." in result.output
    assert "long long" not in tokenizer.decode(served.router.submits[0].tokens)


def test_chat_says_when_the_answer_broke_off(served: Served, run: Any) -> None:
    served.router.fail_after = 2
    result = run(chat, "--url", served.url, "hi")
    assert result.exit_code == 1
    assert "the answer broke off: All attempts at this request have failed" in result.output


@pytest.mark.parametrize("command", [chat, status])
def test_commands_say_in_plain_words_that_nobody_is_there(
    run: Any, command: Any, nobody: str
) -> None:
    result = run(command, "--url", nobody)
    assert result.exit_code == 1
    assert f"no server answers at {nobody}" in result.output
    assert "kvrelay serve" in result.output
    result = run(command, "--url", "ftp://nowhere")
    assert result.exit_code == 1
    assert "is not a URL" in result.output


def test_status_is_a_table(served: Served, run: Any) -> None:
    result = run(status, "--url", served.url)
    assert result.exit_code == 0, result.output
    for text in ("decode-0", "decode", "up", "40 / 100", "25.0 %", "7 stop", "1 live"):
        assert text in result.output
    assert json.loads(run(status, "--url", served.url, "--json").output) == STATUS


def test_status_shows_the_links_by_which_kv_is_read_the_slowest_first() -> None:
    def shown(links: list[dict[str, Any]]) -> list[str]:
        console = Console(width=120, record=True, file=StringIO())
        worker = STATUS["workers"][0] | {"links": links}
        console.print(status_table(STATUS | {"workers": [worker]}))
        return console.export_text().splitlines()

    def link(number: int, bytes_per_s: float) -> dict[str, Any]:
        return {"peer": f"prefill-{number}", "bytes_per_s": bytes_per_s}

    lines = [line.replace("│", " ").split() for line in shown([link(0, 11.7e9), link(1, 0.0)])]
    rows = [line for line in lines if line[-1:] in (["GB/s"], ["timed"])]
    assert rows == [
        ["decode-0", "prefill-1", "not", "timed"],
        ["decode-0", "prefill-0", "11.70", "GB/s"],
    ]
    many = shown([link(number, 1e9 * number) for number in range(20)])
    assert sum("GB/s" in line or "not timed" in line for line in many) == 8
    assert any("and 12 that are faster" in line for line in many)
    assert not any("first read" in line for line in shown([]))


@pytest.mark.parametrize(
    ("disk", "shown"),
    [
        ({}, "900"),
        ({"disk_used_bytes": 1000, "disk_ratio": 1.45}, "900 (1.45x)"),
        ({"disk_used_bytes": 1000, "disk_ratio": 0.98}, "900"),  # pages that are not full
        ({"disk_used_bytes": 0, "disk_ratio": 0.0}, "900"),
    ],
)
def test_status_shows_how_much_smaller_kv_is_on_disk(disk: dict[str, Any], shown: str) -> None:
    console = Console(width=120, record=True, file=StringIO())
    (worker,) = STATUS["workers"]
    console.print(status_table(STATUS | {"workers": [worker | disk]}))
    cells = [line.split("│") for line in console.export_text().splitlines() if "decode-0" in line]
    assert shown in [cell.strip() for cell in cells[0]]


def test_status_shows_each_router_and_that_one_does_not_answer() -> None:
    def shown(*routers: RouterProcessStatus) -> list[list[str]]:
        console = Console(width=120, record=True, file=StringIO())
        console.print(status_table(STATUS | {"routers": msgspec.to_builtins(routers)}))
        lines = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
        return [line for line in lines if line and line[0].startswith("router")]

    first = router_status("router-0", 1, ProcessState.UP, "0.0.0.0", 8000, RouterLoad(3, 1, True))
    second = router_status("router-1", 4, ProcessState.UP, "", 8001, None)
    third = router_status("router-2", 2, ProcessState.BACKOFF, "::1", 8002, None)
    assert shown(first, second, third) == [
        ["router-0", "up", "http://127.0.0.1:8000", "3", "1", "up"],
        ["router-1", "silent", "http://127.0.0.1:8001", "?", "?", "?"],
        ["router-2", "backoff", "http://[::1]:8002", "?", "?", "?"],
    ]
    alone = router_status("router-0", 1, ProcessState.UP, "localhost", 8000, RouterLoad(0, 0, None))
    assert shown(alone) == [["router-0", "up", "http://localhost:8000", "0", "0"]]
    away = router_status("router-0", 1, ProcessState.UP, "h", 1, RouterLoad(0, 0, False))
    assert shown(away)[0][-1] == "down"


def test_status_shows_versions_where_they_differ() -> None:
    def shown(worker: str, router: str) -> list[str]:
        console = Console(width=120, record=True, file=StringIO())
        one = router_status("router-0", 1, ProcessState.UP, "h", 1, None)
        one.version = router
        workers = [STATUS["workers"][0] | {"version": worker}]
        routers = [msgspec.to_builtins(one)]
        console.print(status_table(STATUS | {"workers": workers, "routers": routers}))
        return [line.strip() for line in console.export_text().splitlines() if "kvrelay" in line]

    assert shown("0.1.0", "0.1.0") == []
    assert shown("unknown", "0.1.0") == ["kvrelay 0.1.0: router-0", "kvrelay unknown: decode-0"]


def test_status_shows_weights_where_workers_of_a_model_have_several() -> None:
    def shown(*pairs: tuple[str, str]) -> str:
        console = Console(width=140, record=True, file=StringIO())
        one = STATUS["workers"][0]
        workers = [one | {"model": model, "weights": weights} for model, weights in pairs]
        console.print(status_table(STATUS | {"workers": workers}))
        return console.export_text()

    assert "weights" not in shown(("chat", "v1"), ("chat", "v1"), ("small", "w1"))
    assert "weights" in shown(("chat", "v1"), ("chat", "v2"), ("small", "w1"))


def test_status_shows_ranks_where_a_worker_has_several() -> None:
    def shown(*sizes: int) -> str:
        console = Console(width=140, record=True, file=StringIO())
        one = STATUS["workers"][0]
        workers = [one | {"worker": f"w-{n}", "tensor_parallel_size": n} for n in sizes]
        console.print(status_table(STATUS | {"workers": workers}))
        return console.export_text()

    assert "ranks" not in shown(1, 1)
    lines = [line.replace("│", " ").split() for line in shown(1, 4).splitlines()]
    assert [line[:4] for line in lines if line[:1] in (["w-1"], ["w-4"])] == [
        ["w-1", "decode", "up", "1"],
        ["w-4", "decode", "up", "4"],
    ]


def load(served: Served, *arguments: str) -> list[str]:
    sizes = ["--num-requests", "12", "--input-len", "20", "--output-len", "6"]
    return ["serve", "--url", served.url, *sizes, *arguments]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_bench_measures_an_open_loop(
    served: Served, run: Any, tmp_path: Path, tokenizer: Tokenizer, endpoint: str
) -> None:
    served.router.answer = lambda submit: tokenizer.encode("word " * 400)
    served.router.num_cached_tokens = 10
    path = tmp_path / "result.json"
    groups = ["--prefix-groups", "2", "--prefix-len", "30"]
    slo = ["--ttft-slo-ms", "60000", "--itl-slo-ms", "60000"]
    arguments = ["--rate", "200", "--endpoint", endpoint, *groups, *slo, "--json", str(path)]
    result = run(bench, *load(served, *arguments))
    assert result.exit_code == 0, result.output
    assert "12 of 12 requests" in result.output
    found = json.loads(path.read_text())
    assert found["num_completed"] == 12
    assert found["errors"] == {}
    assert found["output_tokens"] == 12 * 6
    assert 0 < found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"] <= found["e2e_ms"]["p99"]
    assert found["itl_ms"]["p50"] is not None
    assert found["share_within_slo"] == 1
    assert found["goodput_per_s"] == found["requests_per_s"]
    prompt_tokens = sum(len(submit.tokens) for submit in served.router.submits)
    assert found["prompt_tokens"] == prompt_tokens
    assert found["cached_tokens_share"] == round(12 * 10 / prompt_tokens, 4)
    assert found["parameters"]["model"] == MODEL
    assert all(submit.sampling.stop_token_ids == () for submit in served.router.submits)


def test_bench_keeps_a_number_in_flight_and_counts_errors(served: Served, run: Any) -> None:
    served.router.refuse = Failed("", Refusal.NO_WORKERS, "none")
    result = run(bench, *load(served, "--concurrency", "3", "--json", "-"))
    assert result.exit_code == 1
    assert "'503 no_workers': 12" in result.output
    served.router.refuse = None
    served.router.fail_after = 2
    result = run(bench, *load(served, "--concurrency", "3"))
    assert "12 x attempts_exhausted" in result.output
    result = run(bench, *load(served, "--concurrency", "3", "--no-stream"))
    assert "12 x 503 attempts_exhausted" in result.output


def test_bench_without_stream_has_no_ttft(served: Served, run: Any) -> None:
    result = CliRunner().invoke(
        bench, load(served, "--concurrency", "4", "--no-stream", "--json", "-")
    )
    found = json.loads(result.stdout)
    assert found["num_completed"] == 12
    assert found["ttft_ms"]["p50"] is None
    assert found["e2e_ms"]["p50"] > 0


def test_bench_wants_one_kind_of_load(run: Any, nobody: str) -> None:
    assert "either --rate or --concurrency" in run(bench, "serve").output
    assert "--prefix-len" in run(bench, "serve", "--rate", "1", "--prefix-groups", "2").output
    result = run(bench, "serve", "--rate", "1", "--url", nobody)
    assert f"no server answers at {nobody}" in result.output


SPEC = LoadSpec(url="", model="m", num_requests=40, rate=10.0, prefix_groups=4, prefix_len=20)


def test_prompts_and_arrivals_are_a_function_of_the_seed(tokenizer: Tokenizer) -> None:
    prompts = make_prompts(SPEC)
    assert prompts == make_prompts(SPEC)
    assert make_arrivals(SPEC) == make_arrivals(SPEC)
    assert prompts != make_prompts(replace(SPEC, seed=1))
    assert len(set(prompts)) == 40
    assert len({tuple(prompt.split()[:20]) for prompt in prompts}) == 4
    lengths = [len(tokenizer.encode(prompt)) for prompt in prompts]
    assert all(0.9 * 148 <= length <= 1.2 * 148 for length in lengths)
    assert make_arrivals(SPEC)[0] == 0
    assert 0.5 < make_arrivals(replace(SPEC, num_requests=1000))[-1] / 100 < 1.5


def test_summary_of_known_timings() -> None:
    timings = [
        RequestTiming(0.0, 0.5, [0.1, 0.2, 0.4], num_prompt_tokens=10, num_output_tokens=3),
        RequestTiming(
            1.0, 2.0, [1.9, 2.0], num_prompt_tokens=10, num_cached_tokens=5, num_output_tokens=2
        ),
        RequestTiming(1.0, 1.1, error="timeout"),
    ]
    spec = replace(SPEC, ttft_slo_ms=500.0, itl_slo_ms=200.0)
    found = summarize(spec, timings, elapsed_s=2.0)
    assert found["ttft_ms"] == {"p50": 100.0, "p90": 900.0, "p99": 900.0}
    assert found["itl_ms"] == {"p50": 100.0, "p90": 200.0, "p99": 200.0}
    assert found["errors"] == {"timeout": 1}
    assert (found["requests_per_s"], found["output_tokens_per_s"]) == (1.0, 2.5)
    assert (found["goodput_per_s"], found["share_within_slo"]) == (0.5, 0.3333)
    assert found["cached_tokens_share"] == 0.25


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 2.0, 4.0, 3.0]
    assert [percentile(values, p) for p in (0, 20, 50, 99, 100)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert percentile([], 50) is None


def test_status_shows_what_groups_of_layers_hold_where_there_are_several() -> None:
    worker = {"worker": "decode-0", "role": "decode", "state": "up", "num_blocks": 100}
    counts = {"num_groups": 5, "num_used": 61, "num_cached": 72, "num_evicted": 83}
    console = Console(width=120)
    with console.capture() as captured:
        console.print(status_table(STATUS | {"workers": [worker]}))
    assert "evicted" not in captured.get()
    groups = [{"kind": "window"} | counts]
    worker |= {"groups": groups, "counters": {"prefix_tokens_recomputed:window": 94.0}}
    with console.capture() as captured:
        console.print(status_table(STATUS | {"workers": [worker]}))
    (row,) = [line for line in captured.get().splitlines() if "sliding window" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "decode-0",
        "sliding window",
        *("5", "61", "72", "83", "94"),
    ]
