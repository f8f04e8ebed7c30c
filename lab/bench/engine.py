"""How fast the engine is, beside how fast it could be: `kvrelay bench engine`.

Life: a fresh process is started up to its first token; the rates of the machine are measured; then
a worker is built and takes turns with decodes of each batch size and prompts of each length, for
some rounds, of which the median counts.

The worker (`LoneWorker`) is built as the cluster builds it, with its own threads, but has no router
and no peer to exchange KV with: `generate` gives it requests as a router would and collects tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from random import Random
from typing import Any

from msgspec import structs

from kvrelay.cluster.config import Config, load_config
from kvrelay.cluster.prepare import PreparedModel, prepare_model
from kvrelay.cluster.roles import build_worker
from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.messages import Refused, TokenDeltas
from kvrelay.engine.model.device import cpu_has_bf16, find_device
from kvrelay.engine.model.roofline import (
    Rates,
    Weights,
    count_weights,
    decode_roofline_s,
    measure_rates,
    prefill_roofline_s,
)
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.node import Effect, NodeId, Note, Send, Wake
from kvrelay.engine.request import FinishReason, SamplingParams, TokenLogprobs
from kvrelay.engine.stats import Role
from kvrelay.kvtransfer.agent import AgentError, CopyBlocks, CopyDone, DoneAtOnce
from kvrelay.worker.node import Worker
from kvrelay.worker.spec import BuildOptions, WorkerSpec

ASKER = "measurement-0"
POLL_S = 1.0


class WorkerFailed(Exception):
    """A request was refused, or a step failed; one line."""


class _NoAgent(DoneAtOnce):
    """A PeerAgent where there is no peer."""

    def metadata(self) -> bytes:
        return b""

    def connect(self, peer: NodeId, epoch: int, num_blocks: int, metadata: bytes) -> None:
        raise AgentError(f"{peer}: this worker is alone")

    def copy(self, request: CopyBlocks) -> CopyDone:
        raise AgentError(f"{request.text}: this worker is alone")


@dataclass(slots=True)
class Generated:
    """What came for one request. Times are of time.perf_counter."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)  # each token's
    finish: FinishReason | None = None


class LoneWorker:
    """Owns the worker, from `with` to its end. Used from one thread."""

    def __init__(self, config: Config, model: PreparedModel) -> None:
        """Loads the model; takes seconds. Raises BuildError."""
        device = find_device(config.model.device).type
        spec = WorkerSpec(
            cluster="measurement",
            worker="decode-0",
            role=Role.DECODE,
            epoch=1,
            model_dir=str(model.path),
            model=structs.replace(config.model, device=device),
            engine=config.engine,
            tiers=config.tiers,
        )
        built = build_worker(spec, BuildOptions(make_agent=lambda *_: _NoAgent()))
        assert isinstance(built.node, Worker)
        self.node = built.node  # its state is at rest between calls of `generate`
        self.info = built.info
        self.notices = built.notices
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._executor = built.make_executor(self._inbox.put)
        if built.when_lost is not None:
            built.when_lost(self._inbox.put)
        self._ids = itertools.count()
        self._perform(self.node.start(time.monotonic()), {})

    def __enter__(self) -> LoneWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.close()

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        sampling: SamplingParams,
        *,
        on_step: Callable[[list[Generated]], None] = lambda _: None,
        timeout_s: float = 86_400.0,
    ) -> list[Generated]:
        """All prompts at once; their answers in order. `on_step` is called whenever tokens have
        come. Raises WorkerFailed."""
        answers: dict[str, Generated] = {}
        for prompt in prompts:
            name = f"request-{next(self._ids)}"
            answers[name] = Generated()
            work = Decode(
                request_id=name,
                attempt=1,
                router=ASKER,
                tokens=tuple(prompt),
                num_prompt_tokens=len(prompt),
                sampling=sampling,
                timeout_s=timeout_s,
            )
            self._inbox.put(work)
        found = list(answers.values())
        while any(answer.finish is None for answer in found):
            try:
                message = self._inbox.get(timeout=POLL_S)
            except Empty:
                continue
            if isinstance(message, Exception):  # what the worker computes with is gone
                raise WorkerFailed(str(message))
            if self._perform(self.node.receive(time.monotonic(), message), answers):
                on_step(found)
        return found

    def _perform(self, effects: list[Effect], answers: dict[str, Generated]) -> bool:
        """True if tokens have come. Without ticks: they are for peers, tiers and deadlines."""
        has_tokens = False
        for effect in effects:
            match effect:
                case Send(_, TokenDeltas() as frame):
                    has_tokens = True
                    _take(frame, answers)
                case Send(_, Refused(reason=reason, detail=detail)):
                    raise WorkerFailed(f"{reason}: {detail}")
                case Send() | Wake() | Note():
                    pass
                case _:
                    self._executor.perform(effect)
        return has_tokens


def _take(frame: TokenDeltas, answers: dict[str, Generated]) -> None:
    now = time.perf_counter()
    for delta in frame.deltas:
        answer = answers[delta.request_id]
        answer.tokens += delta.tokens
        answer.logprobs += delta.logprobs
        answer.arrived_at += [now] * len(delta.tokens)
        answer.finish = delta.finish or answer.finish


BLOCK_SIZE = 16
START_TIMEOUT_S = 600.0

Tell = Callable[[str, int, int], None]  # what is measured next, how much is done, of how much


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What to measure. Lengths in tokens."""

    model: str | None = None  # None: the default
    batches: tuple[int, ...] = (1, 8, 32)
    input_len: int = 32
    output_len: int = 64
    prefills: tuple[int, ...] = (1024, 2048)
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantization: str = "none"
    device: str = "auto"
    threads: int = 0  # 0: one for each core
    max_num_batched_tokens: int = 0  # 0: as of `kvrelay serve`
    rounds: int = 3
    seed: int = 0

    @property
    def num_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def num_tokens(self) -> int:
        """That the largest measurement has in its KV cache."""
        decodes = max(self.batches, default=0) * self.table_len(self.input_len + self.output_len)
        return max([decodes, *(self.table_len(n + 1) for n in self.prefills)])

    @staticmethod
    def table_len(num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE

    def config(self) -> Config:
        """Describes a worker with room for the largest measurement. Raises ConfigError."""
        most = max(self.batches, default=1)
        overrides = {
            "model.name": self.model,
            "model.dtype": self.dtype,
            "model.device": self.device,
            "model.quantization": self.quantization,
            "engine.kv_dtype": self.kv_dtype,
            "engine.block_size": BLOCK_SIZE,
            # And a block for each sequence, which admission leaves over.
            "engine.num_blocks": self.num_tokens // BLOCK_SIZE + most + 1,
            "engine.max_num_seqs": max(64, most),
            "engine.max_waiting": max(256, most),
            "engine.threads": self.num_threads,
            "engine.num_speculative_tokens": 0,  # a floor is of a token for each sequence
        }
        if self.max_num_batched_tokens:
            overrides["engine.max_num_batched_tokens"] = self.max_num_batched_tokens
        return load_config(None, overrides)


class Prompts:
    """Random tokens, so that no prompt begins as another: nothing is found in the prefix cache."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._random = Random(seed)

    def take(self, count: int, num_tokens: int) -> list[list[int]]:
        tokens = range(self._vocab_size)
        return [self._random.choices(tokens, k=num_tokens) for _ in range(count)]


def greedy(num_tokens: int) -> SamplingParams:
    """No token ends the answer before its length does."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0)


def measure(spec: EngineSpec, tell: Tell) -> dict[str, Any]:
    """Takes a minute or more, in which nothing else should run here. Raises ConfigError,
    BuildError, WorkerFailed."""
    config = spec.config()
    points = len(spec.batches) + len(spec.prefills)
    total, done = (spec.rounds + 1) * points + 3, 0

    def next_is(what: str) -> None:
        nonlocal done
        tell(what, done, total)
        done += 1

    next_is("the model")
    model = prepare_model(config, 1, lambda _: None)
    on_gpu = find_device(spec.device).type == "cuda"
    next_is("a fresh process")
    start_s = measure_start(spec)
    next_is("memory and multiplication")
    dtype: str = config.model.dtype
    if dtype == "auto":
        dtype = ModelRunner.default_dtype("cuda" if on_gpu else "cpu")
    rates = measure_rates(*_arithmetic(on_gpu, dtype), spec.num_threads)
    weights = count_weights(
        model.path, model.config, "cuda" if on_gpu else "cpu", dtype, spec.quantization
    )
    decode_s: dict[int, list[float]] = {batch: [] for batch in spec.batches}
    prefill_s: dict[int, list[float]] = {tokens: [] for tokens in spec.prefills}
    with LoneWorker(config, model) as worker:
        prompts = Prompts(model.config.vocab_size, spec.seed)
        for turn in range(spec.rounds + 1):  # the first warms up
            for batch in spec.batches:
                next_is(f"{batch} at once" if turn else f"warming up: {batch} at once")
                asked = prompts.take(batch, spec.input_len)
                found = decode_step_s(worker.generate(asked, greedy(spec.output_len)))
                decode_s[batch] += [found] * (turn > 0)
            for tokens in spec.prefills:
                what = f"a prompt of {tokens} tokens"
                next_is(what if turn else f"warming up: {what}")
                began = time.perf_counter()
                answer = worker.generate(prompts.take(1, tokens), greedy(1))[0]
                prefill_s[tokens] += [answer.arrived_at[0] - began] * (turn > 0)
        notices, kv_bytes = worker.notices, worker.info.bytes_per_block / BLOCK_SIZE
    tell("done", total, total)
    context = spec.input_len + spec.output_len / 2
    decode = [
        _decode_row(b, found, decode_roofline_s(rates, weights, b, context, kv_bytes))
        for b, found in decode_s.items()
    ]
    prefill = [
        _prefill_row(n, found, prefill_roofline_s(rates, weights, model.config, n))
        for n, found in prefill_s.items()
    ]
    return {
        "parameters": asdict(spec) | {"model": config.model.name, "threads": spec.num_threads},
        "dtype": dtype,
        "device": "cuda" if on_gpu else "cpu",
        **_machine(rates, weights, kv_bytes),
        "decode": decode,
        "prefill": prefill,
        "start_s": start_s,
        "notices": list(notices),
    }


def _arithmetic(on_gpu: bool, dtype: str) -> tuple[str, str]:
    """Device and dtype of the products: on a CPU without bfloat16 they are of float32."""
    if on_gpu:
        return "cuda", dtype
    return "cpu", dtype if cpu_has_bf16() else "float32"


def _machine(rates: Rates, weights: Weights, kv_bytes: float) -> dict[str, Any]:
    return {
        "read_gb_per_s": round(rates.read_bytes_per_s / 1e9, 2),
        "gflops_per_s": round(rates.flops_per_s / 1e9, 1),
        "weight_bytes": int(weights.num_bytes(1 << 20)),
        "kv_bytes_per_token": int(kv_bytes),
    }


def decode_step_s(answers: list[Generated]) -> float:
    """Seconds of a step in which all of `answers` decode: from when the last of them had its first
    token. Raises WorkerFailed if there was no such step."""
    began = max(answer.arrived_at[0] for answer in answers)
    later = [at for answer in answers for at in answer.arrived_at if at > began]
    if not later:
        raise WorkerFailed(
            f"{len(answers[0].tokens)} tokens of output are too few for {len(answers)} sequences"
            " to decode together; ask for more"
        )
    return (max(later) - began) * len(answers) / len(later)


def _decode_row(batch: int, found_s: list[float], floor_s: float) -> dict[str, Any]:
    step_s = statistics.median(found_s)
    return {
        "batch": batch,
        "tokens_per_s": round(batch / step_s, 2),
        "step_ms": round(step_s * 1e3, 3),
        "floor_ms": round(floor_s * 1e3, 3),
        "share_of_roofline": round(floor_s / step_s, 3),
    }


def _prefill_row(num_tokens: int, found_s: list[float], floor_s: float) -> dict[str, Any]:
    seconds = statistics.median(found_s)
    return {
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / seconds, 2),
        "seconds": round(seconds, 4),
        "floor_s": round(floor_s, 4),
        "share_of_roofline": round(floor_s / seconds, 3),
    }


def measure_start(spec: EngineSpec) -> dict[str, float]:
    """Seconds from starting a process to each stage; the last is the first token. Raises
    WorkerFailed."""
    began = time.monotonic()  # one clock for all processes of a machine
    command = [sys.executable, "-m", "kvrelay.lab.bench.engine_start", json.dumps(asdict(spec))]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise WorkerFailed(
            f"a fresh process did not come to its first token in {START_TIMEOUT_S:g} s"
        ) from None
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise WorkerFailed(f"a fresh process did not come to its first token: {last}")
    stages: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return {name: round(at - began, 3) for name, at in stages.items()}
