"""Sizes and limits that a worker is built with: plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.engine.kv.tier import DEFAULT_RETENTION, Retention
from kvrelay.engine.kv.window import Window
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role, WorkerInfo

STATS_INTERVAL_S = 0.25  # between two statistics of a worker


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
    retention: Retention = DEFAULT_RETENTION  # where a request does not say
    disk_after_s: float = 2.0  # a block that was not used for this long is written to disk
    window: int = 0  # positions that a query attends to in any layer; 0: all
    num_sinks: int = 0  # attention sinks: first positions that are attended to as well
    cores: str = ""  # as in WorkerInfo
    guard: bool = True  # block tables are checked whole before each step, not in part
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    steps_ahead: int = 0  # 1: the executor takes the next step while one runs
    num_speculative_tokens: int = 0  # draft tokens of a sequence in a step, at most; 0: none
    itl_target_s: float = 0.0  # prompt chunks beside decodes are cut to keep steps below it; 0: not
    itl_most_s: float = 0.0  # itl_target_s where prompts have waited for long; 0: no other
    max_waiting: int = 256  # beside those that may run: more are refused
    step_timeout_s: float = 30.0  # for a step, at least, before the worker ends itself; 0: never
    max_failed_steps: int = 3  # health checks in a row, after which it ends itself
    lease_s: float = 30.0  # a producer holds blocks so long after it announced the last ones
    handoff_timeout_s: float = 30.0  # a consumer that gets no KV for so long computes it itself
    read_timeout_s: float = 20.0  # one transfer, at most
    read_floor_s: float = 2.0  # one transfer, however few bytes it has
    left_reads_s: float = 13.0  # half of the blocks may be left to reads for so long
    stats_interval_s: float = STATS_INTERVAL_S
    max_snapshot_blocks: int = 1 << 15  # in one message to a router; 18 bytes each

    @property
    def kv_window(self) -> Window:
        """The blocks that sequences keep. A prompt has blocks for the tokens of a step ahead if the
        pool has room for that, and at least one."""
        window = Window(self.block_size, self.window, self.num_sinks)
        per_step = -(-self.max_num_batched_tokens // self.block_size)
        chunk = min(per_step, self.num_blocks // 4, self.num_blocks - window.num_blocks)
        return replace(window, chunk_blocks=max(1, chunk))

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
            max_num_seqs=self.max_num_seqs,
            fingerprint=self.fingerprint,
            num_host_blocks=self.num_host_blocks,
            num_disk_blocks=self.num_disk_blocks,
            cores=self.cores,
            max_seq_blocks=self.kv_window.max_blocks(self.max_model_len) if self.window else 0,
        )
