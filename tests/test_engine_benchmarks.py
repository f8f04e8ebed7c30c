"""The logic of the measurements of the engine: what they start, drop, compare and score."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.engine import speculation
from benchmarks.engine.cpu import INT8, OURS, PEER, Engine, Load, drop_slow, ratios
from benchmarks.engine.fp8 import Score, compare, pieces_of, prose, same_length, score
from benchmarks.engine.window import Spec, repeated_share, runs_of
from benchmarks.engine.window_given import Reading, by_interval, read, readings
from benchmarks.engine.window_given import Spec as GivenSpec
from engine.model.runner import ModelRunner
from lab.bench.engine import Prompts
from lab.bench.lone_worker import Answer, WorkerFailed
from tests.engine.model.tiny import VOCAB, make_checkpoint, tokens_of

COUNTS = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if not asked["output"]:
        sys.exit("out of memory")
    tokens = [prompt[:1] * asked["output"] for prompt in asked["prompts"]]
    print(json.dumps({"seconds": 0.5, "tokens": tokens}), flush=True)
"""


def test_an_engine_is_asked_line_by_line_and_its_end_is_told() -> None:
    with Engine("toy", [sys.executable, "-c", COUNTS], {}) as engine:
        assert engine.ask([[4, 5], [6]], 2) == (0.5, [[4, 4], [6, 6]])
        with pytest.raises(WorkerFailed, match="toy has ended:\nout of memory"):
            engine.ask([[1]], 0)


def test_prompts_are_a_function_of_the_seed_and_all_differ() -> None:
    first, again = (Prompts(VOCAB, 3).take(4, 50) for _ in range(2))
    assert first == again
    assert len({tuple(prompt[:16]) for prompt in first}) == 4


def test_the_load_fits_into_the_context_that_it_states() -> None:
    load = Load(batches=(2,), input_len=10, output_len=5, prefills=(8, 12))
    assert load.points() == {
        "decode 2": (2, 10, 5), "prefill 8": (1, 8, 1), "prefill 12": (1, 12, 1),
    }  # fmt: skip
    assert load.max_model_len == 16


def test_slow_peers_are_dropped_and_ours_is_compared_with_the_best() -> None:
    slow, quick = f"{PEER} bfloat16", f"{PEER} float32"
    found = {
        "decode 1": {OURS: [9.0], INT8: [9.0], slow: [9.0], quick: [8.0]},
        "decode 8": {OURS: [9.0], INT8: [9.0], slow: [30.0], quick: [8.0]},
    }
    assert drop_slow(found) == {"decode 8": {slow: 30.0}}
    assert sorted(found["decode 8"]) == sorted([OURS, INT8, quick])
    for engines in found.values():
        for name, seconds in ((OURS, 2.0), (INT8, 1.0), (slow, 3.0), (quick, 5.0)):
            if name in engines:
                assert engines[name] == []  # the warm-up does not count
                engines[name] += [seconds, 10 * seconds, seconds]
    starts = {OURS: [2.0], quick: [90.0], f"{quick}, eager": [20.0]}
    assert ratios(found, starts) == {
        "decode 1": 1.5, "int8 decode 1": 2.0, "decode 8": 2.5, "int8 decode 8": 2.0, "start": 10.0,
    }  # fmt: skip


def test_text_is_scored_as_transformers_does_whatever_the_chunks(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path)
    pieces = [tokens_of(70, seed=1), tokens_of(33, seed=2)]
    expected, best = [], []
    with torch.inference_mode():
        for piece in pieces:
            told = model(torch.tensor([piece])).logits[0, :-1].log_softmax(-1)
            expected += told.gather(1, torch.tensor(piece[1:])[:, None])[:, 0].tolist()
            best += told.argmax(-1).tolist()
    runner = ModelRunner(tmp_path, dtype="float32", device="cpu", num_blocks=5, num_threads=2)
    for chunk_len in (16, 31, 70):
        chunks: list[int] = []
        found = score(runner, pieces, chunk_len, lambda chunks=chunks: chunks.append(1))
        assert found.logprobs == pytest.approx(expected, abs=1e-3)
        assert found.best == best
        assert len(chunks) == -(-70 // chunk_len) + -(-33 // chunk_len)


def test_scores_are_compared_with_the_base() -> None:
    base, other = Score([-1.0, -1.0], [3, 4], 400), Score([-1.0, -1.02], [3, 5], 100)
    row = compare(base, other, [[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 9, 3]], 3)
    assert row["change"] == pytest.approx(0.01005, abs=1e-5)
    assert row["same_likeliest_token"] == 0.5
    assert (row["answers_the_same"], row["tokens_before_they_part"]) == (1, 2.0)
    assert row["tokens_in_the_same_bytes"] == 4.0
    assert same_length([1, 2], [1, 2]) == 2
    assert pieces_of([1, 2, 3], 2) == [[1, 2], [3]]


def test_the_documents_have_enough_prose() -> None:
    text = prose()
    assert len(text.split()) > 4000  # more than 5,000 tokens
    assert "```" not in text
    assert "| what |" not in text


def test_repeated_text_is_noticed() -> None:
    assert repeated_share([1, 2, 3, 4] * 25) == pytest.approx(1 - 4 / 97)
    assert repeated_share(list(range(50))) == 0.0
    assert list(runs_of(Spec()).values()) == [(1024, 4), (1024, 0), (0, 0)]


def test_given_text_is_read_with_a_window_and_counted_where_it_stands(tmp_path: Path) -> None:
    assert by_interval([-1.0, -1.0, -3.0, -3.0, -5.0], piece_len=4, every=2) == pytest.approx(
        [math.exp(1), math.exp(2), math.exp(3), math.exp(5)]
    )  # tokens 1, 2, 3, 5 and 6: the first of a piece has none
    make_checkpoint("llama", tmp_path)
    spec = GivenSpec(num_tokens=90, every=30, window=40, num_sinks=2, dtype="float32")
    tokens, chunks = tokens_of(90, seed=4), []
    ways = readings(spec, context_len=64)
    assert [*ways.values()][2:] == [Reading(0, 0, 90, 40), Reading(0, 0, 64, 64)]
    ways["wide"] = Reading(90, 0, 90, 90)
    found = {
        name: read(tmp_path, spec, way, tokens, lambda: chunks.append(1))
        for name, way in ways.items()
    }
    sinks, bare, pieces, none, wide = found.values()
    assert [len(each) for each in found.values()] == [3, 3, 3, 3, 3]
    for each in (sinks, bare, pieces, none):  # nothing has left the window yet
        assert each[0] == pytest.approx(wide[0])
    assert none[:2] == pytest.approx(wide[:2])
    others = [each[2] for each in (sinks, bare, pieces, wide)]
    assert len({round(each, 3) for each in others}) == 4
    assert len(chunks) == 1 + 1 + 3 + 1 + 1


def test_answers_are_timed_from_when_all_had_begun() -> None:
    quick = Answer(tokens=[1] * 6, arrived_at=[0.0, 1.0, 1.5, 1.5, 2.0, 2.0])
    slow = Answer(tokens=[1] * 3, arrived_at=[1.0, 2.0, 3.0])
    took = speculation.Took.of([quick, slow])
    assert took.num_tokens == 9
    assert took.tokens_per_s == pytest.approx(4 / 1.0)  # six after the first second
    assert took.token_s == pytest.approx((1.0 / 4 + 2.0 / 2) / 2)


def test_guesses_are_compared_with_none() -> None:
    def took(rate: float, token_s: float) -> speculation.Took:
        return speculation.Took(rate, token_s, 100)

    both = {speculation.WITHOUT: [took(50.0, 0.02)], speculation.WITH: [took(75.0, 0.01)]}
    found = speculation.Row(9, both, 40.0, 0.75, True).found()
    assert (found["throughput_ratio"], found["latency_ratio"]) == (1.5, 2.0)
    assert (found["drafts_fed"], found["drafts_held"], found["same_tokens"]) == (40, 0.75, True)
