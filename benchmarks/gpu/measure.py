"""Times on a GPU, beside what the device can do at most. Needs torch, Triton and NumPy alone."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

from benchmarks.revision import commit

RESULTS = Path(__file__).parent.parent / "results"


def about() -> dict[str, Any]:
    """Machine, versions and commit. A commit with "+" has changes that are not committed."""
    device = torch.cuda.get_device_properties(0)
    return {
        "gpu": device.name,
        "multiprocessors": device.multi_processor_count,
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "commit": commit(),
    }


def seconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """Median of `work` on the device, replayed from a CUDA graph, so that launches cost nothing."""
    work()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in marks) / 1e3


def copy_bandwidth(num_bytes: int = 4 << 30) -> float:
    """Bytes read and written per second by a copy on the device."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), repeats=10)


def matrix_rate(size: int = 8192) -> float:
    """Floating-point operations per second of a bfloat16 matrix product."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Columns are the keys of the first row."""
    cells = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    print(flush=True)


def write_json(name: str, results: Mapping[str, Any]) -> None:
    """Writes `results` to benchmarks/results/`name` as JSON."""
    (RESULTS / name).write_text(json.dumps(about() | dict(results), indent=2) + "\n")


def _text(value: Any) -> str:
    return f"{value:,.3g}" if isinstance(value, float) else str(value)
