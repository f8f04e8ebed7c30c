"""`kvrelay profile`: the real engine, measured at a few points, becomes a timing to use."""

from __future__ import annotations

from io import StringIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks.serving.fidelity import as_served
from benchmarks.serving.fidelity_load import (
    BlockIds,
    WorkloadSpec,
    plan,
    read_recording,
    record,
    trace_of,
    write_recording,
)
from kvrelay.cluster.api.text.tokenizer import ChatPrompt, Tokenizer
from kvrelay.cluster.config import Config
from kvrelay.lab.bench.load import RequestTiming
from kvrelay.lab.cli.profile import profile, profile_tables
from kvrelay.lab.profiling.forward import Grid, ProfileError
from kvrelay.lab.profiling.measure import fit_line
from kvrelay.lab.profiling.served import (
    LOAD,
    contention_of,
    fit_gaps,
    gaps_together,
    least_gap_s,
    merged,
    plan_mixture,
    prompts_slowed,
    steps_slowed,
)
from kvrelay.lab.replay.replay import Replay, replay
from kvrelay.lab.replay.trace import Trace, TraceRequest
from kvrelay.lab.timing.profile import arrays_of, load_timing, profile_of
from kvrelay.lab.timing.timing import overheads_of
from kvrelay.router.config import RouterConfig
from kvrelay.router.messages import Output
from tests.engine.model.tiny import make_checkpoint


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_this_machine_is_measured_with_the_engine_the_agents_and_another_worker(
    tmp_path: Path,
) -> None:
    make_checkpoint("llama", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")  # looked for, not used
    config = tmp_path / "kvrelay.toml"
    config.write_text('[engine]\nnum_blocks = 80\n[model]\ndevice = "cpu"\ndtype = "float32"\n')
    out = tmp_path / "measured.npz"
    args = ["--model", str(tmp_path / "model"), "--config", str(config), "--out", str(out)]
    result = CliRunner().invoke(profile, [*args, "--small", "--no-serving"])
    assert result.exit_code == 0, result.output
    with np.load(out) as file:
        arrays = dict(file)
    assert list(arrays["prefill_isl"]) == [1, 32, 128, 256]
    assert set(arrays["decode_context_length"]) == {32, 128}
    assert set(arrays["decode_active_kv_tokens"] / arrays["decode_context_length"]) == {1, 4}
    timing = load_timing(str(out))
    assert timing.pass_s(64, 2048.0, 1, 0, 0, 1) > 0
    assert timing.pass_s(0, 0.0, 0, 2, 128, 1) > 0
    links, overheads = timing.links, overheads_of(timing)
    assert links.bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert min(links.peer_bytes_per_s, links.host_bytes_per_s, links.disk_bytes_per_s) > 1e6
    assert 0 < links.message_s < 1
    assert overheads.prefill_slowdown >= 1
    assert overheads.decode_slowdown >= 1
    assert "TTFT" in result.output
    assert f"--timing {out}" in result.output


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--out", "profile.json"], "expected a name that ends in .npz"),
        (["--out", "/nowhere/profile.npz"], "there is no such folder"),
        (["--model", "/nowhere/model"], "/nowhere/model"),
        (["--dtype", "int3"], "model.dtype = 'int3'"),
    ],
)
def test_what_cannot_be_measured_is_one_line(args: list[str], complaint: str) -> None:
    result = CliRunner().invoke(profile, args)
    assert result.exit_code != 0
    assert complaint in result.output
    assert "Traceback" not in result.output


def test_only_what_fits_is_measured() -> None:
    grid = Grid(prompts=(1, 512, 2048), contexts=(32, 1024))
    fitting = grid.within(max_model_len=2000, num_blocks=100, block_size=16)
    assert (fitting.prompts, fitting.contexts) == ((1, 512), (32, 1024))
    with pytest.raises(ProfileError, match=r"context of 20 tokens .* expected 33 tokens or more"):
        grid.within(max_model_len=20, num_blocks=100, block_size=16)


def test_a_link_is_an_overhead_and_a_rate() -> None:
    sizes = [1e6, 4e6, 16e6]
    assert fit_line(sizes, [0.002 + size / 1e9 for size in sizes]) == (
        pytest.approx(0.002),
        pytest.approx(1e9),
    )
    # Noise: less time for more bytes.
    assert fit_line(sizes, [0.02, 0.02, 0.01]) == (0.0, pytest.approx(16e6 / 0.01))


def test_steps_beside_passes_never_take_less_than_nothing() -> None:
    assert fit_gaps({1: 3e-3, 4: 6e-3, 8: 10e-3}) == (pytest.approx(2e-3), pytest.approx(1e-3))
    assert fit_gaps({1: 4e-3, 4: 3e-3, 8: 2e-3}) == (pytest.approx(3e-3), 0.0)
    assert fit_gaps({1: 0.0, 4: 4e-3, 8: 10e-3})[0] == 0.0
    assert fit_gaps({1: 2e-3}) == (2e-3, 0.0)


def test_gaps_count_while_all_stream() -> None:
    early = RequestTiming(0.0, chunk_at=[0.0, 1.0, 2.0, 3.0, 4.0])
    late = RequestTiming(0.0, chunk_at=[1.5, 2.6, 3.8, 9.0])
    assert gaps_together([early, late]) == [1.0, 1.0, pytest.approx(1.2)]
    apart = [early, RequestTiming(0.0, chunk_at=[5.0, 6.0])]
    assert gaps_together(apart) == []
    assert least_gap_s([apart, [early, late]]) == 1.0
    assert least_gap_s([apart]) is None


def test_the_tables_show_what_was_measured_and_nothing_else() -> None:
    console = Console(width=100, record=True, file=StringIO())
    console.print(profile_tables(arrays_of({64: 100.0}, {(2, 32): 12.5}, {"message_s": 2e-4})))
    text = console.export_text()
    assert "640" in text  # tokens/s
    assert "12.5" in text
    assert "0.20 ms" in text
    assert "GB/s" not in text


# -- the workload of benchmarks.serving.fidelity -------------------------------------------------


def test_conversations_go_on_from_what_was_said_and_repeat_exactly() -> None:
    spec = WorkloadSpec(num_requests=60, seed=3)
    planned = plan(spec)
    assert planned == plan(spec)
    assert [p.at_s for p in planned] == sorted(p.at_s for p in planned)
    by_session: dict[int, list[list[dict[str, str]]]] = {}
    for each in planned:
        by_session.setdefault(each.session, []).append(each.messages)
    assert any(len(turns) > 1 for turns in by_session.values())
    for turns in by_session.values():
        for before, after in pairwise(turns):
            assert after[: len(before)] == before
            assert [m["role"] for m in after[len(before) :]] == ["assistant", "user"]
    assert len({p.messages[0]["content"] for p in planned}) == spec.num_systems


def test_equal_ids_mean_equal_tokens_up_to_the_end_of_the_block() -> None:
    ids = BlockIds()
    first = ids.of(list(range(40)))
    assert len(first) == 3
    assert ids.of(list(range(48)))[:2] == first[:2]
    assert ids.of(list(range(48)))[2] != first[2]  # 8 tokens are not 16
    other = ids.of([99, *range(1, 40)])
    assert not set(other) & set(first)


def test_a_recording_is_a_trace_with_what_the_client_saw(tmp_path: Path) -> None:
    class Words(Tokenizer):
        def __init__(self) -> None:
            pass

        def chat_prompt(self, messages: list[dict[str, str]]) -> ChatPrompt:  # type: ignore[override]
            text = " ".join(m["content"] for m in messages)
            return ChatPrompt([len(word) for word in text.split()], "")

    planned = plan(WorkloadSpec(num_requests=5))
    timings = []
    for i, each in enumerate(planned):
        tokens = len(Words().chat_prompt(each.messages).tokens)
        timing = RequestTiming(10.0 + i, chunk_at=[10.5 + i, 10.6 + i, 10.8 + i])
        timing.num_prompt_tokens, timing.num_output_tokens = tokens, 3
        timings.append(timing)
    write_recording(tmp_path / "r.jsonl", record(Words(), planned, timings))
    recorded = read_recording(tmp_path / "r.jsonl")
    assert [each.timestamp for each in recorded] == [0.0, 1000.0, 2000.0, 3000.0, 4000.0]
    assert recorded[0].ttft_s == pytest.approx(0.5)
    assert recorded[0].gaps_s == [pytest.approx(0.1), pytest.approx(0.2)]
    trace = trace_of(recorded, "recorded")
    assert trace.block_tokens == 16
    assert [r.at_s for r in trace.requests] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert all(len(r.block_ids) == -(-r.input_length // 16) for r in trace.requests)


@pytest.mark.slow
def test_slowdowns_are_found_again_from_what_clients_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster whose prompts and streams slow each other, by known factors."""
    slowed = {"prefill_slowdown": 3.0, "prefill_alone_slowdown": 1.1, "decode_slowdown": 1.7}
    slowed |= {"decode_alone_slowdown": 1.2, "spread": 0.2}
    arrays = arrays_of({16: 40.0, 256: 400.0}, {(1, 64): 12.0, (8, 64): 20.0}, slowed)
    planned = plan_mixture(lambda words, tokens: 0.002 * words + 0.015 * tokens)
    seen = [RequestTiming(each.at_s) for each in planned]
    on_answer = Replay._on_answer

    def note(self: Replay, now: float, answer: Output) -> None:
        timing = seen[int(answer.request_id[1:])]
        timing.chunk_at += [now] * bool(answer.tokens)
        on_answer(self, now, answer)

    monkeypatch.setattr(Replay, "_on_answer", note)
    # As it was measured: by a policy that hands every prompt over.
    served = Config(router=RouterConfig(policy="round_robin"))
    cluster = as_served(served, profile_of(arrays, "slowed", "a test"), 500)
    requests = [TraceRequest(each.at_s, each.num_words, each.num_tokens) for each in planned]
    replay(Trace("mixture", tuple(requests)), cluster)
    for timing, each in zip(seen, planned, strict=True):
        timing.num_prompt_tokens, timing.num_output_tokens = each.num_words, each.num_tokens
    alone = profile_of(arrays | dict.fromkeys(slowed, np.array(1.0)), "alone", "a test")
    found = contention_of(alone, seen)
    for name, real in slowed.items():
        assert getattr(found, name) == pytest.approx(real, rel=0.15), name


def test_spans_that_overlap_are_one() -> None:
    assert merged([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0, 2.5)]) == [(0.0, 2.5), (3.0, 4.0)]


def test_prompts_are_slowed_by_what_they_met() -> None:
    """Alone 1.5 times as long; 3 times while there is a stream: half of the second, and all of the
    third and the fourth, which overlap."""
    prompts = [(0.0, 1.5), (10.0, 14.5), (20.0, 26.0), (23.0, 29.0)]
    works_s = [1.0, 2.0, 1.0, 2.0]
    streams = [(11.5, 16.0), (18.0, 30.0)]
    assert prompts_slowed(prompts, works_s, streams) == pytest.approx((1.5, 3.0))


def test_a_load_in_which_nothing_met_says_nothing() -> None:
    with pytest.raises(ProfileError, match="never met"):
        prompts_slowed([(0.0, 1.0)], [1.0], [(2.0, 3.0)])
    with pytest.raises(ProfileError, match="never met"):
        steps_slowed([(0.0, 1.0)], [[2.0, 3.0]], lambda _: 0.5)


def test_a_mixture_keeps_a_cluster_as_busy_as_it_is_meant_to() -> None:
    planned = plan_mixture(lambda words, tokens: 2.0)
    assert [each.at_s for each in planned] == sorted(each.at_s for each in planned)
    mean_gap_s = planned[-1].at_s / (len(planned) - 1)
    assert mean_gap_s == pytest.approx(2.0 / LOAD, rel=0.3)
