"""The settings of a worker: the table [engine]."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from kvrelay.engine.settings import Count, Positive, Seconds, Section, Timeout, matching


class EngineSection(Section, frozen=True):
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16  # tokens in a KV block
    # for KV blocks, per worker; 0: 1 on a CPU, on a GPU what gpu_memory_utilization leaves
    kv_cache_gib: Annotated[float, Meta(ge=0.0, le=4096.0)] = 0.0
    # of a GPU's memory, for weights, steps and KV together
    gpu_memory_utilization: Annotated[float, Meta(ge=0.05, le=1.0)] = 0.9
    num_blocks: Count = 0  # KV blocks per worker; 0: as many as kv_cache_gib holds
    cuda_graphs: bool = True  # on a GPU: capture decode steps at start; false: launch each kernel
    # kernels of attention on a GPU: triton, or flashinfer (an extra) where it fits; auto: triton
    attention_backend: Literal["auto", "triton", "flashinfer"] = "auto"
    moe_backend: Literal["auto", "triton", "flashinfer"] = "auto"  # the same, of experts
    # processes that compute one worker's model; has to divide its heads
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    kv_dtype: Literal["auto", "float8_e4m3"] = "auto"  # auto (as model.dtype) or float8_e4m3
    window: Count = 0  # positions that each layer attends to; 0: as the model says
    sinks: Count = 0  # attention sinks: first positions outside the window (4 is usual)
    guard: bool = True  # compare block tables before each step; false: only their ranges
    # tokens per step; longer prompts are computed in chunks; 0: 512, on a GPU 8,192
    max_num_batched_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    # longest step of a decode worker that takes prompt tokens beside its decodes; 0: 50 where
    # there are prefill workers, no limit in one pool
    itl_target_ms: Annotated[float, Meta(ge=0.0, le=60_000.0)] = 0.0
    # what it grows to while prompts wait for 4 s; 0: 200 where itl_target_ms is 0, else no more
    itl_most_ms: Annotated[float, Meta(ge=0.0, le=60_000.0)] = 0.0
    max_num_seqs: Annotated[int, Meta(ge=0, le=4096)] = 0  # per step; 0: 64, on a GPU 256
    # n-gram draft tokens per sequence and step, at most; 0: none
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=64)] = 7
    max_model_len: Count = 0  # tokens of prompt and output; 0: the model's, as far as KV holds it
    max_waiting: Positive = 256  # requests at a worker, beside max_num_seqs, before it refuses
    # a worker ends itself, to be started again, when a step takes longer than this, or 20 times
    # longer than it should if that is more; ten times this before steps were measured; 0: never
    step_timeout_s: Seconds = 30.0
    max_failed_steps: Positive = 3  # health checks in a row; then a worker ends
    # folder for the stacks, and the GPU's state, of workers that end because a step hangs; "": none
    core_dumps: Annotated[str, matching("|[/~].*", "an absolute path")] = ""
    # CPU threads per worker; 0: all cores, which the workers of a machine share
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    lease_s: Timeout = 30.0  # a producer holds finished KV for its consumer this long
    handoff_timeout_s: Timeout = 30.0  # a consumer without KV after this computes it itself
    read_timeout_s: Timeout = 20.0  # of one KV transfer, at most
    # of one KV transfer, at least; in between, ten times what it takes at the measured rate
    read_floor_s: Timeout = 2.0

    def sized(self, *, gpu: bool) -> EngineSection:
        """With the sizes that the device decides. On a GPU kv_cache_gib may stay 0: how much memory
        is free is known once the weights are there."""
        return replace(
            self,
            kv_cache_gib=self.kv_cache_gib or (0.0 if gpu else 1.0),
            max_num_batched_tokens=self.max_num_batched_tokens or (8192 if gpu else 512),
            max_num_seqs=self.max_num_seqs or (256 if gpu else 64),
        )
