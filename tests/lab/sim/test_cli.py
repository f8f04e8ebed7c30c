"""`kvrelay fuzz`: what it prints, and how it ends."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from kvrelay.lab.cli.fuzz import fuzz
from kvrelay.lab.sim.run import run_seed


def test_one_seed_is_summarised_with_its_hash() -> None:
    result = CliRunner().invoke(fuzz, ["--seed", "4"])
    assert result.exit_code == 0, result.output
    assert run_seed(4).event_hash in result.output
    assert "nothing found" in result.output


@pytest.mark.slow
def test_a_range_of_seeds_is_added_up() -> None:
    result = CliRunner().invoke(fuzz, ["--seeds", "4..6"])
    assert result.exit_code == 0, result.output
    assert "3 of 3 seeds" in result.output


@pytest.mark.slow
def test_what_is_found_is_shown_with_the_command_that_repeats_it() -> None:
    result = CliRunner().invoke(fuzz, ["--seeds", "5..6", "--break", "drain"])
    assert result.exit_code == 1
    assert "--break drain" in result.output
    assert "while a transfer can write to it" in result.output


def test_a_range_that_is_none_is_explained() -> None:
    for text in ("5", "9..3", "a..b"):
        result = CliRunner().invoke(fuzz, ["--seeds", text])
        assert result.exit_code == 2
        assert "0..299" in result.output
    assert CliRunner().invoke(fuzz, []).exit_code == 2
