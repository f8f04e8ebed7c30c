"""A disk that goes away under a worker that serves: the answers are right, operators are told, and
the tier is of use again as soon as it can be."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.local.test_local import model_dir as model_dir
from tests.local.test_local_tiers import (
    CACHED,
    ENGINE,
    MIB,
    NUM_PROMPTS,
    ask,
    assert_clean,
    counted,
    expected,
    fill,
    wait_for,
)
from tests.support.local import LocalCluster

expected = expected  # a fixture
NOTICED_S = 30.0
BLOCKS = NUM_PROMPTS * CACHED // 16


def disk_at(folder: Path) -> dict[str, Any]:
    return {"disk_bytes": 16 * MIB, "disk_path": str(folder), "disk_after_s": 0.0}


def test_a_folder_that_vanishes_is_noticed_and_filled_again(
    model_dir: Path, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kv"
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, **disk_at(folder)) as cluster:
        assert fill(cluster) == expected
        assert counted(cluster, "disk.used") >= BLOCKS
        shutil.rmtree(folder)
        deadline = time.monotonic() + NOTICED_S
        while not any("vanished" in record.getMessage() for record in caplog.records):
            assert time.monotonic() < deadline, "nobody was told"
            assert ask(cluster) == expected
        assert ask(cluster) == expected
        wait_for(cluster, "disk.used", 1)
        assert_clean(cluster)
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, **disk_at(folder)) as cluster:
        assert ask(cluster) == expected


def test_a_truncated_file_costs_what_was_in_it_and_no_more(
    model_dir: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, **disk_at(tmp_path)) as cluster:
        assert fill(cluster) == expected
        assert counted(cluster, "disk.used") >= BLOCKS
        (path,) = tmp_path.rglob("blocks.kv")
        os.truncate(path, path.stat().st_size // 3)
        assert ask(cluster) == expected
        assert ask(cluster) == expected
        assert_clean(cluster)
    os.truncate(path, path.stat().st_size // 3)
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, **disk_at(tmp_path)) as cluster:
        assert ask(cluster) == expected
        assert_clean(cluster)
