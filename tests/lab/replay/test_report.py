"""A replay's figures: what counts as what, what the tables show of it, and the picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, RenderableType

from kvrelay.lab.replay.plot import save_plot
from kvrelay.lab.replay.report import (
    Slo,
    comparison_table,
    result_table,
    summary,
    weighted_percentiles,
)
from tests.lab.replay.results_kit import busy_result, refused, result, sample


def drawn(table: RenderableType) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_times_are_of_what_was_completed_in_milliseconds() -> None:
    samples = [sample(n, ttft_s=0.001 * (n + 1)) for n in range(100)]
    samples += [refused(100, "queue_full", 0.5, 2.0), sample(101, ttft_s=9.0, e2e_s=None)]
    found = summary(result(samples))
    assert (found["requests"], found["completed"], found["unfinished"]) == (102, 100, 1)
    assert found["ttft_ms"] == pytest.approx({"mean": 50.5, "p50": 50.5, "p90": 90.1, "p99": 99.01})
    assert found["second_token_ms"]["p50"] == pytest.approx(110)
    assert found["e2e_ms"]["p99"] == pytest.approx(200)


def test_gaps_between_tokens_are_weighted_by_how_often_they_were_seen() -> None:
    found = summary(result([sample(0)]))
    assert found["itl_ms"] == pytest.approx({"mean": 10.4, "p50": 10, "p90": 10, "p99": 30})


@pytest.mark.parametrize("percent", [0, 1, 50, 90, 97.5, 99, 100])
def test_weighted_percentiles_are_those_of_the_values_written_out(percent: float) -> None:
    rng = np.random.default_rng(1)
    values, counts = rng.random(30), rng.integers(0, 5, 30)
    written_out = np.repeat(values, counts)
    expected = np.percentile(written_out, percent, method="inverted_cdf")
    assert weighted_percentiles(values, counts, [percent])[0] == expected


def test_reuse_is_the_part_of_prompt_tokens_that_was_not_computed_by_tier() -> None:
    samples = [
        sample(0, cached={"device": 400}),
        sample(1, cached={"device": 100, "host": 300}),
        sample(2),
        refused(3, "queue_full", 0.0, None),
    ]
    found = summary(result(samples))
    assert found["prefix_reuse"] == pytest.approx(800 / 3000)
    assert found["prefix_reuse_by_tier"] == pytest.approx({"device": 1 / 6, "host": 0.1})


def test_goodput_wants_all_tokens_the_first_one_early_and_the_rest_close() -> None:
    samples = [
        sample(0),
        sample(1, ttft_s=2.1, e2e_s=2.2),
        sample(2, ttft_s=0.1, e2e_s=0.7),  # 10 gaps of 60 ms
        sample(3, num_output=1, output_length=1, second_s=None, e2e_s=0.1),
        sample(4, e2e_s=None),
        refused(5, "queue_full", 0.0, None),
    ]
    goodput = summary(result(samples))["goodput"]
    assert goodput["requests"] == 2
    assert goodput["share"] == pytest.approx(2 / 6)
    assert goodput["requests_per_s"] == pytest.approx(0.02)
    assert goodput["tokens_per_s"] == pytest.approx(0.12)
    relaxed = summary(result(samples), Slo(ttft_ms=3000, itl_ms=70))["goodput"]
    assert relaxed["requests"] == 4


def test_refusals_are_told_by_reason_with_when_and_what_was_advised() -> None:
    samples = [refused(n, "queue_full", 0.01 * n, float(n)) for n in range(1, 4)]
    samples += [refused(9, "deadline", 1.0, None)]
    found = summary(result(samples))["refused"]
    assert list(found) == ["queue_full", "deadline"]
    assert found["queue_full"]["requests"] == 3
    assert found["queue_full"]["after_ms"]["p50"] == pytest.approx(20)
    assert found["queue_full"]["retry_after_s"]["p50"] == 2
    assert found["deadline"]["retry_after_s"]["p50"] is None


def test_predictions_are_compared_with_what_came() -> None:
    samples = [sample(n, predicted_ttft_s=0.1 + 0.01 * (n - 2)) for n in range(5)]
    error = summary(result([*samples, sample(9)]))["prediction_error"]
    assert error["median"] == pytest.approx(0.1)
    assert error["p90"] == pytest.approx(0.2)


def test_tenants_and_priorities_have_shares_of_what_was_asked_and_given() -> None:
    samples = [sample(0, tenant="a"), sample(1, tenant="b", priority=10), refused(2, "x", 0, None)]
    samples += [sample(3, tenant="a", num_output=22, priority=9)]
    found = summary(result(samples))
    assert list(found["per_tenant"]) == ["", "a", "b"]
    assert found["per_tenant"]["a"]["requests_share"] == 0.5
    assert found["per_tenant"]["a"]["output_tokens_share"] == 0.75
    assert found["per_tenant"][""]["refused"] == 1
    assert list(found["per_priority"]) == ["0", "9", "10"]


def test_a_summary_is_json_even_of_nothing() -> None:
    nothing = result(
        [], itl_s=np.empty(0, np.float32), itl_counts=np.empty(0, np.int32), wall_s=0.0
    )
    for one in (nothing, busy_result()):
        found = summary(one)
        assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_tables_fit_in_80_columns_and_show_what_matters() -> None:
    slower = {"session_sticky": 300.0, "random": 3.0, "prefix": 1.0}
    found = [summary(busy_result(policy, slower=much)) for policy, much in slower.items()]
    alone, compared = drawn(result_table(found[0])), drawn(comparison_table(found))
    assert max(map(len, (alone + compared).splitlines())) <= 80
    reuse = f"{100 * found[0]['prefix_reuse']:.1f}"
    words = ("TTFT", "second token", "ITL", f"{reuse} %", "40 queue_full", "tenant-2", "goodput")
    for word in words:
        assert word in alone
    for word in (
        "session_sticky",
        "prefix",
        "p99",
        "reuse",
        "refused",
        reuse,
        "good: TTFT within",
    ):
        assert word in compared


def test_tables_can_be_drawn_of_nothing() -> None:
    nothing = summary(result([refused(0, "queue_full", 0.0, None)]))
    assert "0 of 1" in drawn(result_table(nothing))
    assert "prefix" in drawn(comparison_table([nothing, nothing]))


def picture_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


@pytest.mark.slow
def test_few_and_many_workers_of_several_results_become_one_picture(tmp_path: Path) -> None:
    path = tmp_path / "two.png"
    save_plot([busy_result(policy, num_prefill=70, num_decode=2) for policy in "ab"], path)
    width, height = picture_size(path)
    assert 1_000 < width < 2_000
    assert 1_000 < height < 2_000


@pytest.mark.slow
def test_a_picture_of_nothing_is_a_picture(tmp_path: Path) -> None:
    save_plot([result([refused(0, "queue_full", 0.0, None)])], tmp_path / "none.png")
    assert picture_size(tmp_path / "none.png")
