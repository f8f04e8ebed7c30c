"""What the interpreter cannot show: that types fit in bfloat16 and FP8, for a Hopper GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.long
def test_decode_over_fp8_compiles_without_a_gpu(tmp_path):
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.compile", "decode fp8", "--sm", "90"],
        cwd=Path(__file__).parents[4], env=env, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    decode, merge = run.stdout.splitlines()
    assert "_decode" in decode
    assert "_merge" in merge
    assert "spilled 0" in decode
    assert "mma 0" not in decode.replace("wgmma 0", "")  # tensor cores, not single products
