"""A worker's GPUs stay held while it lives, whoever dies beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.model.tiny import make_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(170)]


def test_the_gpus_of_a_worker_outlive_its_guardian(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path)
    command = [sys.executable, "-m", "tests.e2e.held_gpus", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=160)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert seen == {
        "started": 0.0,
        "actors": ["ray::DecodeWorker", "ray::PrefillWorker"],
        "refused": "1 GPU(s) of 127.0.0.1 are not free",
        "guardian killed": 0.0,
        "worker lives": True,
        "worker ended": 2.0,
        "closed": 3.0,
        "groups left": 0,
    }
