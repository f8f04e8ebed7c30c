"""The settings that a worker reads, the tables [model], [engine] and [tiers], and what a worker is
configured with: plain data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field, structs

from kvrelay.engine.kv.scope import quest_mark
from kvrelay.engine.kv.tier import DEFAULT_RETENTION, Retention
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.node import NodeId
from kvrelay.engine.settings import (
    Count,
    FixedFloat,
    FixedInt,
    Positive,
    Seconds,
    Section,
    matching,
)
from kvrelay.engine.stats import Role, WorkerInfo
from kvrelay.engine.weights import NO_VERSION, WeightVersion

VLLM_CPU_BLOCK = 32  # its attention on CPUs takes multiples of so many tokens
VLLM_CPU_TOKENS = 2048  # those of a step on CPUs, where none are set
POOLING = "pooling"  # what vLLM calls its runner for embeddings
STATS_INTERVAL_S = 0.25  # between two statistics of a worker


class ModelSection(Section, frozen=True):
    name: str = "smollm2-135m"  # a Hugging Face directory, hub id, GGUF file, or built-in name
    revision: str = ""  # commit, tag or branch of a hub id; "": main, as it is when a server starts
    # what clients call it, and further names, with spaces between them; "": derived from the name
    served_name: str = ""
    # auto (bfloat16 where the hardware multiplies it), float32 or bfloat16
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"  # int4 on CPUs, fp8 on GPUs
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto (GPUs where there are any), cpu or cuda
    cache_dir: str = ""  # for converted and downloaded models; "": the user's cache directory
    chat_template: str = ""  # Jinja, or a file with it; "": the model's own


class EngineSection(Section, frozen=True):
    # the engine that computes: kvrelay, or vllm, in an environment of its own: docs/engines.md
    runs: Literal["kvrelay", "vllm"] = "kvrelay"
    # path of bin/python in that environment; "": the one that `make setup-vllm` has made
    python: str = ""
    # vLLM's EngineArgs, which go before all settings here: {enforce_eager = true}
    arguments: dict[str, Any] = field(default_factory=dict)
    # tokens in a KV block; with vllm on CPUs the next multiple of 32
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    # for KV blocks, per worker; 0: 1 on a CPU, on a GPU what gpu_memory_utilization leaves
    kv_cache_gib: Annotated[float, Meta(ge=0.0, le=4096.0)] = 0.0
    # share of a GPU's memory, for weights, steps and KV together
    gpu_memory_utilization: Annotated[float, Meta(ge=0.05, le=1.0)] = 0.9
    # KV blocks per worker, of all groups of layers; 0: as many as kv_cache_gib holds
    num_blocks: Count = 0
    cuda_graphs: bool = True  # on a GPU: capture decode steps at start; false: launch each kernel
    # kernels of attention on a GPU: triton, or flashinfer (an extra) where it fits; auto: triton
    attention_backend: Literal["auto", "triton", "flashinfer"] = "auto"
    moe_backend: Literal["auto", "triton", "flashinfer"] = "auto"  # kernels of experts, likewise
    # processes that compute one worker's model; has to divide its heads
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    kv_dtype: Literal["auto", "float8_e4m3"] = "auto"  # auto (as model.dtype) or float8_e4m3
    # what outputs of requests with kv = "quest" read of their context: below 1 a share, from 1 on
    # tokens, 512 at least; 0: nobody may ask for it
    quest_budget: Annotated[float, Meta(ge=0.0, le=1048576.0)] = 0.0
    quest_dense_layers: Count = 2  # the first ones, which read all of it for such requests too
    window: Count = 0  # positions that each layer attends to; 0: as the model says
    sinks: Count = 0  # attention sinks: first positions outside the window (4 is usual)
    guard: bool = True  # compare block tables before each step; false: only their ranges
    # tokens per step; longer prompts are computed in chunks; 0: 512, vllm: 2,048, on a GPU 8,192
    max_num_batched_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    # longest step of a decode worker that takes prompt tokens beside its decodes; 0: 50 where
    # there are prefill workers, no limit in one pool
    itl_target_ms: Annotated[float, Meta(ge=0.0, le=60_000.0)] = 0.0
    # what it grows to while prompts wait for 4 s; 0: 200 where itl_target_ms is 0, else no more
    itl_most_ms: Annotated[float, Meta(ge=0.0, le=60_000.0)] = 0.0
    max_num_seqs: Annotated[int, Meta(ge=0, le=4096)] = 0  # per step; 0: 64, on a GPU 256
    # n-gram draft tokens per sequence and step, at most; 0: none
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=64)] = 7
    # what proposes draft tokens beside n-grams: the folder of a head (EAGLE-1, EAGLE-3, Medusa, or
    # one that was trained here), or a smaller model of the same vocabulary; "mtp": the model's own
    # layer for it; "": nothing
    drafter: str = ""
    max_model_len: Count = 0  # tokens of prompt and output; 0: the model's, as far as KV holds it
    max_waiting: Positive = 256  # requests at a worker, beside max_num_seqs, before it refuses
    # a worker ends itself, to be started again, when a step takes longer than this, or 20 times
    # longer than it should if that is more; ten times this before steps were measured; 0: never
    step_timeout_s: Seconds = 30.0
    max_failed_steps: Positive = 3  # health checks in a row; then a worker ends
    # bytes of adapters that a worker holds; the last ones used stay
    adapter_bytes: Count = 1 << 30
    # bytes of images' embeddings that a worker keeps; those of one sequence may take more
    image_bytes: Count = 1 << 29
    # folder for the stacks, and the GPU's state, of workers that end because a step hangs; "": none
    core_dumps: Annotated[str, matching("|[/~].*", "an absolute path")] = ""
    # CPU threads per worker; 0: all cores, which the workers of a machine share
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    lease_s: FixedFloat = 30.0  # a producer holds finished KV for its consumer this long
    handoff_timeout_s: FixedFloat = 30.0  # a consumer without KV after this computes it itself
    read_timeout_s: FixedFloat = 20.0  # one KV transfer has at most this
    # one KV transfer has at least this; in between, ten times what it takes at the measured rate
    read_floor_s: FixedFloat = 2.0

    def sized(self, *, gpu: bool) -> EngineSection:
        """With the sizes that the device decides. On a GPU kv_cache_gib may stay 0: how much memory
        is free is known once the weights are there."""
        on_cpu = (1, 512) if self.runs != "vllm" else (VLLM_CPU_BLOCK, VLLM_CPU_TOKENS)
        unit, tokens = (1, 8192) if gpu else on_cpu
        return structs.replace(
            self,
            block_size=-(-self.block_size // unit) * unit,
            kv_cache_gib=self.kv_cache_gib or (0.0 if gpu else 1.0),
            max_num_batched_tokens=self.max_num_batched_tokens or tokens,
            max_num_seqs=self.max_num_seqs or (256 if gpu else 64),
        )

    @property
    def quest_mark(self) -> bytes:
        """What salts begin with of those who have asked for Quest; b"": nobody may."""
        return quest_mark(self.quest_budget, self.quest_dense_layers) if self.quest_budget else b""

    @property
    def pools(self) -> bool:
        """Whether vLLM is to compute embeddings, and nothing else."""
        return self.runs == "vllm" and self.arguments.get("runner") == POOLING

    @property
    def num_stages(self) -> int:
        """Processes of a worker for each tensor-parallel rank: another engine's, by its arguments
        of these names."""
        found = 1
        if self.runs != "vllm":
            return found
        for name in ("pipeline_parallel_size", "prefill_context_parallel_size"):
            size = self.arguments.get(name, 1)
            found *= size if isinstance(size, int) and size > 0 else 1
        return found

    @property
    def is_context_parallel(self) -> bool:
        """Whether ranks have different tokens of one KV block: nothing puts such blocks
        together."""
        names = ("decode_context_parallel_size", "prefill_context_parallel_size")
        return any(self.arguments.get(name, 1) != 1 for name in names)

    @property
    def itl_target_s(self) -> float:
        return self.itl_target_ms / 1e3

    @property
    def itl_most_s(self) -> float:
        return self.itl_most_ms / 1e3


DiskCodec = Literal["lossless", "none"]


class TiersSection(Section, frozen=True):
    """Where KV goes that does not fit in the workers' pools, or outlives them. Sizes are per
    machine, shared by its decode workers (by its prefill workers where it has no others)."""

    # host memory for KV, per machine; 0: no host tier; auto: a quarter of what is free at the start
    host_gib: Annotated[float, Meta(ge=0.0, le=65536.0)] | Literal["auto"] = "auto"
    # host memory for KV of those who ask for kv = "approximate", per machine; it holds 2.9 times as
    # much of bfloat16 as host_gib does of the same size
    packed_gib: Annotated[float, Meta(ge=0.0, le=65536.0)] = 0.0
    disk_gib: Annotated[float, Meta(ge=0.0, le=1048576.0)] = 0.0  # per machine; 0: no disk tier
    disk_path: str = ""  # a folder on each machine; "": "kv" in the user's cache directory
    disk_codec: DiskCodec = "none"  # how KV is made smaller on disk
    retention_s: Seconds = 3600.0  # KV is kept this long after its last use, if there is room
    disk_after_s: Seconds = 2.0  # KV that was not used for this long is written to disk
    object_bucket: str = ""  # S3, shared by all machines; "": no object tier
    object_endpoint: str = ""  # the server's URL; "": AWS in the region
    object_region: str = "us-east-1"
    object_prefix: str = "kvrelay"  # what keys begin with
    # a file in the format of ~/.aws/credentials; "": the environment, files of AWS's tools, or the
    # role of the machine or pod
    object_credentials: str = ""
    # KV that was not used for this long is written there; that of a parked session at once
    object_after_s: Seconds = 60.0
    # objects that a worker remembers, 0.5 KB each
    object_blocks: FixedInt = 1 << 16

    @property
    def set_host_gib(self) -> float:
        """What has to be there: "auto" takes what is."""
        return 0.0 if self.host_gib == "auto" else self.host_gib

    @property
    def memory_gib(self) -> float:
        """That has to be there for KV of a machine below its pools, of any kind."""
        return self.set_host_gib + self.packed_gib


class WorkerConfig(EngineSection, frozen=True, kw_only=True):
    """What a worker node knows about itself: its settings, with the sizes that its model and its
    device decide in place of those that were asked for. `epoch` is a new one at each start."""

    node_id: NodeId
    role: Role
    epoch: int
    bytes_per_block: int
    fingerprint: bytes
    agent_metadata: bytes = b""
    group_windows: tuple[int, ...] = ()  # a window for each group of layers; (): one group
    has_states: bool = False  # a step changes what it has read: layers are recurrent
    compatibility: tuple[tuple[str, str], ...] = ()  # what the fingerprint is made of, by name
    num_host_blocks: int = 0  # KV blocks in host memory, below the device's
    num_packed_blocks: int = 0  # there in four bits a number, of requests with approximate KV
    quantizes: bool = False  # KV of such requests may be kept so, there or on disk
    num_disk_blocks: int = 0
    disk_codec: DiskCodec = "none"
    disk_slot_bytes: int = 0  # the most that a block takes on disk, over all ranks
    disk_bytes: int = 0  # room on disk for blocks of any size; 0: for as many of the largest
    host_outlives: bool = False  # blocks in host memory are indexed, for when this worker has died
    reads_left_kv: bool = False  # others of the machine leave theirs there when they die
    retention: Retention = DEFAULT_RETENTION  # where a request does not say
    disk_after_s: float = 2.0  # a block that was not used for this long is written to disk
    num_object_blocks: int = 0  # that it remembers to be in the object store; 0: there is none
    object_after_s: float = 60.0  # as disk_after_s
    cores: str = ""  # as in WorkerInfo
    loads: bool = False  # what requests need, beside the model
    graph_bytes: int = 0  # captured decode steps have taken them of its GPU
    no_images: str = "its executor reads no images"  # "": it does
    weights: WeightVersion = NO_VERSION  # that it begins with
    base_weights: bytes = b""  # digest of those that its fingerprint is about
    steps_ahead: int = 0  # 1: the executor takes the next step while one runs
    chunk_steps: int = 1  # that a prompt has blocks of windows ahead for
    left_reads_s: float = 13.0  # half of the blocks may be left to reads for so long
    stats_interval_s: float = STATS_INTERVAL_S
    max_snapshot_blocks: int = 1 << 12  # in one message to a router; 18 bytes each

    @property
    def kv_windows(self) -> Windows:
        """The blocks that sequences keep."""
        return Windows.within(
            self.num_blocks,
            self.block_size,
            self.group_windows or (self.window,),
            num_sinks=self.sinks,
            max_model_len=self.max_model_len,
            ahead=self.max_num_batched_tokens * self.chunk_steps,
        )

    @property
    def kv_root(self) -> bytes:
        """The fingerprint that its block hashes begin with."""
        return self.weights.root_key(self.fingerprint, self.base_weights)

    @property
    def store_kind(self) -> bytes:
        """What workers have in common that read one another's objects: as many ranks, too."""
        size = self.tensor_parallel_size
        alone = size == 1 or self.runs != "kvrelay"  # one process has the KV of all ranks
        return self.fingerprint if alone else self.fingerprint + size.to_bytes(2)

    def info(self) -> WorkerInfo:
        windows = self.kv_windows
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
            fingerprint=self.kv_root,
            num_host_blocks=self.num_host_blocks + self.num_packed_blocks,
            num_disk_blocks=self.num_disk_blocks,
            cores=self.cores,
            loads=self.loads,
            repeats_draws=self.runs == "kvrelay",
            max_seq_blocks=windows.max_blocks(self.max_model_len) if windows.any else 0,
            group_windows=tuple(window.size for window in windows.groups) if windows.any else (),
            weights=self.weights.name,
            store_kind=self.store_kind,
            graph_bytes=self.graph_bytes,
        )
