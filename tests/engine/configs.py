"""Configurations of workers, small and without draft tokens, for tests of what reads them."""

from __future__ import annotations

from typing import Any

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.stats import Role


def worker_config(**settings: Any) -> WorkerConfig:
    usual = {
        "node_id": "w",
        "role": Role.DECODE,
        "epoch": 1,
        "bytes_per_block": 32,
        "fingerprint": b"f",
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 64,
        "num_speculative_tokens": 0,
    }
    return WorkerConfig(**usual | settings)
