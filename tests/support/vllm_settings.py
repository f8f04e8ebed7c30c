"""Settings of small servers whose workers run vLLM on a CPU, with all tiers below them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def small(folder: Path, start_timeout_s: float, *, host_gib: float = 0.25) -> dict[str, Any]:
    """`folder`: has its state and its disk tier, which a server finds when it is started again."""
    return {
        "engine.max_model_len": 2048,
        "engine.num_blocks": 256,
        "engine.threads": 1,
        "model.dtype": "float32",
        "cluster.start_timeout_s": start_timeout_s,
        "sessions.state_dir": str(folder / "state"),
        "tiers.host_gib": host_gib,
        "tiers.disk_gib": 1,
        "tiers.disk_path": str(folder / "kv"),
        "tiers.disk_after_s": 0.1,
    }
