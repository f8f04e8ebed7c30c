"""All measurements on a GPU, each in a process of its own, so that none finds another's memory.

python -m benchmarks.gpu [attention] [step] [throughput] [kv_transfer]: those named, or all. Needs
torch, Triton, NumPy, safetensors and transformers; kv_transfer also NIXL. Results are written to
benchmarks/results/gpu_*.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

NAMES = ("attention", "step", "throughput", "kv_transfer")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    names = parser.parse_args().names or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"{unknown[0]} is not one of {', '.join(NAMES)}")
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.gpu.{name}"]
        if subprocess.run(command, cwd=Path(__file__).parents[2]).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
