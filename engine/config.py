"""Sizes and limits that a worker is built with: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from engine.node import NodeId
from engine.stats import Role, WorkerInfo
from engine.tier import DEFAULT_RETENTION, Retention

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of the KV cache: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # a key of DTYPE_BYTES

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker node knows about itself. `epoch` is a new one at each start."""

    node_id: NodeId
    role: Role
    epoch: int
    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    fingerprint: bytes
    agent_metadata: bytes = b""
    compatibility: tuple[tuple[str, str], ...] = ()  # what the fingerprint is made of, by name
    num_host_blocks: int = 0  # KV blocks in host memory, below the device's
    num_disk_blocks: int = 0
    retention: Retention = DEFAULT_RETENTION  # of requests that do not say
    disk_after_s: float = 2.0  # a block that was not used for this long is written to disk
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    itl_target_s: float = 0.0  # prompts beside decodes are fed as far as a step stays below; 0: all
    max_waiting: int = 256
    lease_s: float = 30.0  # a producer holds blocks this long after it announced the last ones
    handoff_timeout_s: float = 30.0  # a consumer without news of its KV computes it after this
    read_timeout_s: float = 20.0  # one transfer
    stats_interval_s: float = 0.25

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker=self.node_id,
            role=self.role,
            epoch=self.epoch,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            bytes_per_block=self.bytes_per_block,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            fingerprint=self.fingerprint,
            num_host_blocks=self.num_host_blocks,
            num_disk_blocks=self.num_disk_blocks,
        )
