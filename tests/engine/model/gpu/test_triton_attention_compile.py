"""What the interpreter cannot show: that types fit in bfloat16 and FP8, and what kernels need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def compile_cases(folder: Path, *args: str) -> list[str]:
    """Lines of what was compiled, none of it beyond its budget."""
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.compile", *args],
        cwd=Path(__file__).parents[4], env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    return run.stdout.splitlines()


@pytest.mark.slow
def test_decode_over_fp8_compiles_without_a_gpu(tmp_path):
    splits, decode, merge = compile_cases(tmp_path, "decode fp8", "--sm", "90")
    assert "_list" in splits
    assert "_decode" in decode
    assert "_merge" in merge
    assert "spilled 0" in decode
    assert "mma 0" not in decode.replace("wgmma 0", "")  # tensor cores, not single products


@pytest.mark.long
@pytest.mark.parametrize("sm", ["80", "90", "100", "120"])
def test_every_kernel_compiles_within_its_budget(tmp_path, sm):
    """Within its shared memory and registers: what is beyond them is in a thread's memory."""
    assert len(compile_cases(tmp_path, "--sm", sm)) >= 20
