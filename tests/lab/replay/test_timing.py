"""Timings: what a user may write, how long passes take by a data sheet, by a polynomial and by a
measured profile, and what workers that share cores cost each other."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrelay.engine.stats import Role
from kvrelay.lab.replay.runtime import Contention
from kvrelay.lab.timing.profile import Profile, TimingError, arrays_of, load_timing
from kvrelay.lab.timing.roofline import GPUS, MODELS, Roofline, parse_roofline
from kvrelay.lab.timing.timing import Overheads, Polynomial, Timing, overheads_of


def prompt_s(timing: Timing, tokens: int, start: int = 0) -> float:
    """Times a pass that computes one prompt's tokens from `start` on."""
    return timing.pass_s(tokens, tokens * (start + tokens / 2), 1, 0, 0, 100_000)


def decode_s(timing: Timing, batch: int, context: int) -> float:
    return timing.pass_s(0, 0.0, 0, batch, batch * context, 100_000)


def write_json(path: Path, value: Any) -> str:
    path.write_text(json.dumps(value))
    return str(path)


def write_npz(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def grid(**changes: Any) -> dict[str, Any]:
    """Makes a profile in the profiler's own format: 10 + n / 100 ms; 2 + batch + active / 1000
    ms."""
    active, context = np.array([1000.0, 4000.0, 16000.0]), np.array([100.0, 400.0, 1600.0])
    return {
        "prefill_isl": np.array([100.0, 1000.0, 4000.0]),
        "prefill_ttft_ms": np.array([11.0, 20.0, 50.0]),
        "decode_active_kv_tokens": active,
        "decode_context_length": context,
        "decode_itl": 2 + active[:, None] / context[None, :] + active[:, None] / 1000,
        **changes,
    }


# -- what a user may write ---------------------------------------------------------------------


def test_a_polynomial_is_read_from_json(tmp_path: Path) -> None:
    file = {"kind": "polynomial", "prefill_ms": [0.001, 0.1, 5], "decode_ms": [4, 2, 8]}
    links = {"peer_bytes_per_s": 25e9, "bytes_per_token": 1000}
    timing = load_timing(write_json(tmp_path / "t.json", {**file, "links": links}))
    assert isinstance(timing, Polynomial)
    assert prompt_s(timing, 100) == pytest.approx((10 + 10 + 5) / 1e3)
    assert timing.pass_s(0, 0.0, 0, 3, 50, 100) == pytest.approx((1 + 1 + 8) / 1e3)
    assert (timing.links.peer_bytes_per_s, timing.links.bytes_per_token) == (25e9, 1000)
    assert timing.links.message_s == Polynomial((0, 0, 1), (0, 0, 1)).links.message_s


GOOD = {"kind": "polynomial", "prefill_ms": [0, 1, 5], "decode_ms": [4, 2, 8]}


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ({**GOOD, "kind": "cubic"}, r"t.json: kind = 'cubic': expected \"polynomial\""),
        ([1], r"kind = \[1\]: expected \"polynomial\""),
        ({**GOOD, "prefill_ms": [1, 2]}, r"prefill_ms = \[1, 2\]: expected three numbers"),
        ({**GOOD, "decode_ms": [1, 2, "x"]}, "decode_ms = .*: expected three numbers"),
        ({**GOOD, "decode_ms": [0, 0, 0]}, "decode_ms = .*: expected a time above 0"),
        ({**GOOD, "prefil_ms": 3}, "prefil_ms is not known; there are kind, prefill_ms"),
        ({**GOOD, "links": {"speed": 3}}, "links.speed is not known; there are bytes_per_token"),
        ({**GOOD, "links": {"peer_bytes_per_s": 0}}, "links.peer_bytes_per_s = 0: expected at lea"),
        ({**GOOD, "links": {"bytes_per_token": 1.5}}, "links.bytes_per_token = 1.5: expected a wh"),
    ],
)
def test_a_wrong_json_file_is_named_with_what_would_be_right(
    tmp_path: Path, file: Any, complaint: str
) -> None:
    with pytest.raises(TimingError, match=complaint) as caught:
        load_timing(write_json(tmp_path / "t.json", file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("profile", "timing 'profile': expected a .json or .npz file, or GPU:MODEL"),
        ("missing.json", "missing.json: No such file"),
        ("missing.npz", "missing.npz: No such file"),
        ("h10:llama-3-8b", "no GPU 'h10'; did you mean h100?"),
        ("tpu:llama-3-8b", "no GPU 'tpu'; there are h100, h200"),
        ("h100:llama-3-8", "no model and no config.json 'llama-3-8'; did you mean llama-3-8b?"),
        ("h100:llama-3-70b", "weights of 139 GB do not fit into 1 x 80 GB; expected h100x2"),
        ("h100:/nowhere/config.json", "/nowhere/config.json: No such file"),
    ],
)
def test_a_wrong_name_is_told_with_what_there_is(text: str, complaint: str) -> None:
    with pytest.raises(TimingError) as caught:
        load_timing(text)
    assert complaint in str(caught.value)


# -- rooflines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", MODELS)
def test_every_gpu_and_model_gives_times_that_grow(gpu: str, model: str) -> None:
    timing = parse_roofline(f"{gpu}x8:{model}")
    assert 0 < prompt_s(timing, 512) < prompt_s(timing, 4096) < prompt_s(timing, 4096, 4096)
    assert 0 < decode_s(timing, 1, 1000) <= decode_s(timing, 64, 1000) < decode_s(timing, 64, 9000)


@pytest.mark.parametrize(
    ("model", "billions"),
    [("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("qwen2.5-7b", 7.62), ("qwen2.5-32b", 32.76),
     ("qwen2.5-72b", 72.7), ("mistral-7b", 7.25)],
)  # fmt: skip
def test_the_shapes_have_the_published_number_of_parameters(model: str, billions: float) -> None:
    shape = MODELS[model]
    embedding = shape.vocab * shape.hidden
    total = shape.layer_parameters + shape.head_parameters + embedding
    assert total / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_long_prompt_is_bound_by_computing_and_a_decode_by_reading_the_weights() -> None:
    timing = parse_roofline("h100:llama-3-8b")
    flops = 2 * 7.0e9 * 8192  # the layers alone
    assert prompt_s(timing, 8192) == pytest.approx(flops / (989e12 * 0.55), rel=0.2)
    assert decode_s(timing, 1, 1) == pytest.approx(15.0e9 / (3.35e12 * 0.8) + 1e-3, rel=0.02)
    # KV of 64 x 8,000 tokens is read beside the weights.
    more_s = decode_s(timing, 64, 8000) - decode_s(timing, 64, 1)
    assert more_s == pytest.approx(64 * 7999 * 131_072 / (3.35e12 * 0.8), rel=0.01)


def test_tensor_parallel_gpus_are_faster_but_not_as_many_times() -> None:
    two, eight = (parse_roofline(f"h100x{n}:llama-3-70b") for n in (2, 8))
    for seconds in (lambda t: prompt_s(t, 4096), lambda t: decode_s(t, 8, 1000)):
        assert 1.5 < seconds(two) / seconds(eight) < 4
    assert eight.links.peer_bytes_per_s == 4 * two.links.peer_bytes_per_s
    assert eight.links.bytes_per_token == 2 * 80 * 8 * 128 * 2


def test_a_model_may_be_a_config_file_of_hugging_face(tmp_path: Path) -> None:
    config = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = parse_roofline("h100:smollm2-135m")
    for text in (f"h100:{tmp_path}", f"h100:{tmp_path}/config.json"):
        timing = load_timing(text)
        assert isinstance(timing, Roofline)
        assert timing.shape == known.shape
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 8}))
    with pytest.raises(TimingError, match="num_local_experts = 8: expected a dense model"):
        load_timing(f"h100:{tmp_path}")
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": None}))
    with pytest.raises(TimingError, match="vocab_size = None: expected a positive whole number"):
        load_timing(f"h100:{tmp_path}")


# -- measured profiles -----------------------------------------------------------------------------


def test_a_grid_is_interpolated_and_goes_on_as_it_ended(tmp_path: Path) -> None:
    timing = load_timing(write_npz(tmp_path / "p.npz", **grid()))
    assert prompt_s(timing, 100) == pytest.approx(0.011)
    assert prompt_s(timing, 550) == pytest.approx(0.0155)
    assert prompt_s(timing, 8000) == pytest.approx(0.090)
    for batch, context in ((10, 100), (8, 250), (40, 400), (2, 1600), (100, 3000), (1, 20)):
        expected = 2 + batch + batch * context / 1000
        assert decode_s(timing, batch, context) * 1e3 == pytest.approx(expected), (batch, context)


def test_points_are_the_same_as_a_grid(tmp_path: Path) -> None:
    points = {(b, c): 2.0 + b + b * c / 1000 for b in (1, 4, 16) for c in (100, 400, 1600)}
    arrays = arrays_of({100: 11.0, 1000: 20.0, 4000: 50.0}, points, {})
    timing = load_timing(write_npz(tmp_path / "p.npz", **arrays))
    other = load_timing(write_npz(tmp_path / "q.npz", **grid()))
    for batch, context in ((3, 100), (8, 250), (16, 1600), (64, 3000)):
        assert decode_s(timing, batch, context) == pytest.approx(decode_s(other, batch, context))


def test_points_that_are_no_grid_are_fitted(tmp_path: Path) -> None:
    at = [(1, 100), (4, 200), (9, 300), (16, 800), (30, 1600)]
    arrays = arrays_of({100: 11.0, 200: 12.0}, {(b, c): 2.0 + b + b * c / 1000 for b, c in at}, {})
    timing = load_timing(write_npz(tmp_path / "p.npz", **arrays))
    assert decode_s(timing, 8, 500) * 1e3 == pytest.approx(14.0)


def test_no_pass_takes_nothing_however_far_from_what_was_measured(tmp_path: Path) -> None:
    steep = grid(prefill_ttft_ms=np.array([1.0, 100.0, 400.0]))
    timing = load_timing(write_npz(tmp_path / "p.npz", **steep))
    assert prompt_s(timing, 1) == pytest.approx(1e-4)
    falling = load_timing(
        write_npz(tmp_path / "q.npz", **grid(prefill_ttft_ms=np.array([9.0, 30.0, 20.0])))
    )
    assert prompt_s(falling, 40_000) >= 0.020


def test_later_chunks_cost_what_their_pairs_cost(tmp_path: Path) -> None:
    n = np.array([100.0, 1000.0, 2000.0, 4000.0])
    curved = grid(prefill_isl=n, prefill_ttft_ms=5 + n / 100 + n * n / 2 * 1e-5)
    timing = load_timing(write_npz(tmp_path / "p.npz", **curved))
    assert isinstance(timing, Profile)
    assert timing.pair_ms == pytest.approx(1e-5)
    later, first = prompt_s(timing, 1000, 3000), prompt_s(timing, 1000)
    assert (later - first) * 1e3 == pytest.approx(1000 * 3000 * 1e-5)


def test_what_was_measured_beside_passes_is_read_too(tmp_path: Path) -> None:
    extra = {"peer_bytes_per_s": 2e9, "bytes_per_token": 46_080, "mixed_saved_ms": 3.0}
    extra |= {"request_s": 0.004, "step_s": 0.001, "sequence_s": 0.0005, "decode_slowdown": 1.3}
    extra["start_s"] = 2.5
    more = {name: np.array(value) for name, value in extra.items()}
    timing = load_timing(write_npz(tmp_path / "p.npz", **grid(**more)))
    plain = load_timing(write_npz(tmp_path / "q.npz", **grid()))
    assert (timing.links.peer_bytes_per_s, timing.links.bytes_per_token) == (2e9, 46_080)
    assert overheads_of(timing) == Overheads(0.004, 0.001, 0.0005, decode_slowdown=1.3, start_s=2.5)
    assert overheads_of(plain) == overheads_of(parse_roofline("h100:mistral-7b")) == Overheads()
    assert decode_s(timing, 4, 400) - decode_s(plain, 4, 400) == pytest.approx(0.003)
    mixed = timing.pass_s(100, 5000.0, 1, 4, 1600, 100_000)
    apart = prompt_s(timing, 100) + decode_s(timing, 4, 400)
    assert apart - mixed == pytest.approx(0.001 + 0.003)  # one step less, and what it saves


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"decode_itl": None}, "decode_itl is missing; expected prefill_isl"),
        ({"prefill_ttft_ms": [1.0, 2.0]}, r"prefill_isl has the shape \(3,\) and prefill_ttft_ms"),
        ({"decode_itl": np.ones((2, 3))}, r"decode_itl has the shape \(2, 3\): expected \(3, 3\)"),
        ({"prefill_ttft_ms": [1.0, -2.0, 3.0]}, "prefill_ttft_ms: expected finite numbers"),
        ({"prefill_isl": ["a", "b", "c"]}, "prefill_isl: expected numbers"),
        ({"decode_context_length": [0.0, 1.0, 2.0]}, "expected contexts above 0"),
        ({"request_s": [1.0, 2.0]}, "request_s has 2 numbers: expected one"),
    ],
)
def test_a_wrong_profile_is_named_with_what_would_be_right(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    arrays = {name: value for name, value in grid(**changes).items() if value is not None}
    with pytest.raises(TimingError, match=complaint):
        load_timing(write_npz(tmp_path / "p.npz", **arrays))


def test_a_file_that_only_has_the_name_of_a_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    for content in (b"", b"not a zip file", b"PK\x03\x04 cut off"):
        path.write_bytes(content)
        with pytest.raises(TimingError, match=r"p.npz: not an .npz file"):
            load_timing(str(path))


# -- shared cores ----------------------------------------------------------------------------------


def test_a_pass_alone_takes_its_time() -> None:
    shared = Contention(Overheads(prefill_slowdown=3.0, decode_slowdown=2.0))
    shared.begin(1.0, "decode-0", Role.DECODE, False, 0.5)
    shared.begin(1.1, "decode-1", Role.DECODE, False, 0.5)
    assert shared.ends() == {"decode-0": pytest.approx(1.5), "decode-1": pytest.approx(1.6)}


def test_passes_of_both_roles_slow_each_other_down_while_they_overlap() -> None:
    shared = Contention(Overheads(prefill_slowdown=3.0, decode_slowdown=2.0))
    shared.begin(0.0, "prefill-0", Role.PREFILL, True, 1.0)
    shared.begin(0.4, "decode-0", Role.DECODE, False, 0.1)
    assert shared.ends() == {"prefill-0": pytest.approx(2.2), "decode-0": pytest.approx(0.6)}
    shared.end(0.6, "decode-0")
    # 0.2 s of overlap were worth 0.2 / 3 of the prefill's own time.
    assert shared.ends() == {"prefill-0": pytest.approx(0.6 + 0.6 - 0.2 / 3)}


def test_equal_passes_are_spread_the_less_the_longer_they_take() -> None:
    spread = {}
    for seconds in (0.01, 1.0):
        shared = Contention(Overheads(spread=0.2))
        logs = []
        for _ in range(2000):
            shared.begin(0.0, "a", Role.DECODE, False, seconds)
            logs.append(math.log(shared.ends()["a"] / seconds))
            shared.end(0.0, "a")
        assert statistics.median(logs) == pytest.approx(0.0, abs=0.02)
        spread[seconds] = statistics.stdev(logs)
    assert spread == {0.01: pytest.approx(0.2, rel=0.1), 1.0: pytest.approx(0.02, rel=0.1)}
