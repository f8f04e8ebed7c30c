"""The thread that runs vLLM: its effects are begun here, and each step is reported to the node.

Only vLLM's public interface is used: `LLMEngine` in this process, a publisher of KV events and a
logger of statistics, both registered as its documentation says. Written for 0.32; what it needs of
a version is asked for at the start, and said where it is not there.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.decode_worker.vllm.adapters import VllmAdapters
from kvrelay.decode_worker.vllm.copies import Copies
from kvrelay.decode_worker.vllm.draws import keep_draws
from kvrelay.decode_worker.vllm.images import ImageThread, Rendered
from kvrelay.decode_worker.vllm.messages import (
    Begin,
    Cleared,
    EngineLost,
    Extend,
    Generated,
    Held,
    Hold,
    NotBegun,
    Removed,
    Stepped,
    Stop,
    Stopped,
    Stored,
)
from kvrelay.decode_worker.vllm.ranks import (
    Pipe,
    SharedPool,
    backends_of,
    forms_of,
    join_forms,
    make_shared_pool,
    process_of,
    use_pool,
)
from kvrelay.decode_worker.vllm.stages import receive_stages
from kvrelay.decode_worker.vllm.weights import VllmWeights
from kvrelay.engine.config import POOLING
from kvrelay.engine.host import Deliver, first_line
from kvrelay.engine.needs import NeedError
from kvrelay.engine.node import Effect, NodeId
from kvrelay.engine.request import Refusal, TokenLogprobs
from kvrelay.engine.step import AskProgress, PrepareGrammar
from kvrelay.engine.weights import LoadWeights, UseWeights
from kvrelay.kvtransfer.agent import AgentError, ConnectPeer, CopyBlocks, FindStored, StoreIndex
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.worker.threads import StepThread

if TYPE_CHECKING:
    from kvrelay.engine.weights import WeightsLoaded
    from kvrelay.worker.threads import TransferLoops

log = logging.getLogger("kvrelay.vllm")

PUBLISHER = "kvrelay"
EMBED = "embed"  # the task, as vLLM calls it
CLOSE_S = 15.0
RANKS_S = 120.0  # for a call of all ranks between steps, which maps memory at most
WARM_UP = Begin("warm-up", (1, 2, 3), "", {"max_tokens": 2, "temperature": 0.0})
PROBE = Begin("probe", (1, 2, 3), "", {"max_tokens": 1, "temperature": 0.0, "logprobs": 0})
POOLED = Begin("pooled", (1, 2, 3), "", {"task": EMBED, "use_activation": False})


@dataclass(slots=True)
class _Reports:
    """What vLLM has reported beside tokens, since the last step."""

    events: list[Stored | Removed | Cleared] = field(default_factory=list)
    num_running: int = 0
    num_waiting: int = 0
    used: float = 0.0
    num_preempted: int = 0
    with_events: bool = True  # not where KV is copied: routers know what is in the copy

    def publish(self, batch: Any) -> None:
        """A batch of KV events; those of further groups of layers say nothing that these do not."""
        if not self.with_events:
            return
        for event in batch.events:
            if getattr(event, "group_idx", None):
                continue
            match type(event).__name__:
                case "BlockStored":
                    keys = event.extra_keys or [None] * len(event.block_hashes)
                    # Tokens of an image do not say which one it is: such a block gets no name, and
                    # so none behind it does.
                    num = len([*takewhile(lambda own: not _has_image(own), keys)])
                    if num == 0:
                        continue
                    salt = str(keys[0][-1]) if keys[0] and event.parent_block_hash is None else ""
                    hashes, tokens = tuple(event.block_hashes[:num]), tuple(event.token_ids)
                    self.events.append(Stored(hashes, event.parent_block_hash, tokens, salt))
                case "BlockRemoved":
                    self.events.append(Removed(tuple(event.block_hashes)))
                case "AllBlocksCleared":
                    self.events.append(Cleared())

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        if scheduler_stats is not None:
            self.num_running = scheduler_stats.num_running_reqs
            self.num_waiting = scheduler_stats.num_waiting_reqs
            self.used = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.num_preempted += iteration_stats.num_preempted_reqs

    def take(self, generated: Iterable[Generated], elapsed_s: float) -> Stepped:
        events, self.events = tuple(self.events), []
        counts = self.num_running, self.num_waiting, self.used, self.num_preempted
        return Stepped(tuple(generated), events, elapsed_s, *counts)


@dataclass(frozen=True, slots=True)
class _Compared:
    """What the table of this one has is compared: vLLM may have it."""

    begin: Begin
    prompt: Any = None  # what was made of it before; None: it is text


class VllmEngine:
    """Executor of a vLLM worker's effects. Owns the engine, which only its thread calls once it has
    begun."""

    def __init__(
        self,
        name: NodeId,
        arguments: Mapping[str, Any],
        *,
        copies: bool,
        cache_dir: Path | None = None,
    ) -> None:
        """`arguments`: of vLLM's EngineArgs. Loads the model, and runs a short request, since vLLM
        compiles what it needs when it needs it first. `copies`: its KV can be copied to memory of
        the worker and back; `cache_dir`: where copies of weights are kept. Raises what vLLM
        raises."""
        # In this process: the events and statistics of a step are there when it has ended.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self.copies = Copies()
        self._reports = _Reports()
        extra = _connector(name, self.copies) if copies else {}
        is_pooling = arguments.get("runner") == POOLING
        self.edits = _can_edit(arguments) and not is_pooling
        self.drafts = bool(arguments.get("speculative_config"))
        if self.edits:
            extra |= _edits(arguments)
        # Workers that draw alike would give the choices of a request the same text.
        own = {"seed": secrets.randbits(31), "scheduling_policy": "priority", **arguments, **extra}
        self._engine = _open(own, self._reports)
        self._engine.model_executor.register_failure_callback(self._on_rank_lost)
        self.pools = self._pooled_by()
        if _is_cpu() and not is_pooling and not all(self._in_ranks(keep_draws)):
            log.warning(
                "vLLM %s samples as no version that is known: seeds may end it", self.version
            )
        if _is_cpu() and not all(self._in_ranks(receive_stages)):
            log.warning(
                "vLLM %s divides layers as no version that is known: stages may end it",
                self.version,
            )
        self._pool: NDArray[np.uint8] | SharedPool | None = None  # as ranks get it
        self._at: list[int] = []  # byte of a block at which the part of each rank begins
        if copies:
            size = self.config.parallel_config.tensor_parallel_size
            self.copies.layers, self._at = join_forms(self._in_ranks(forms_of), size)
        self._adapters = VllmAdapters(self._engine)
        self._effects: queue.SimpleQueue[Effect] = queue.SimpleQueue()
        self._images = ImageThread(self._engine.renderer, self._effects.put)
        self._ends = self._holds = False
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._deliver: Deliver = lambda message: None
        self._transfers: TransferLoops | None = None
        self.weights = VllmWeights(self._engine, self._probe, cache_dir)
        self._loads: StepThread[LoadWeights, WeightsLoaded] | None = None
        self._alone(POOLED if self.pools else WARM_UP)
        self.first = self._reports.take((), 0.0)

    @property
    def config(self) -> Any:
        """Returns what vLLM has made of the arguments."""
        return self._engine.vllm_config

    def _pooled_by(self) -> str:
        """How vLLM makes embeddings; "": it generates. Raises ValueError where what it computes of
        prompts is something else."""
        if self.config.model_config.runner_type != POOLING:
            return ""
        tasks = self._engine.get_supported_tasks()
        if EMBED not in tasks:
            raise ValueError(f"of {', '.join(tasks)} none is embeddings, and nothing else is asked")
        return str(self.config.model_config.pooler_config.seq_pooling_type).lower()

    @property
    def num_ranks(self) -> int:
        """Parts that run the model, each in a process of its own where there are several."""
        return int(self.config.parallel_config.world_size)

    def make_pool(
        self, num_blocks: int, bytes_per_block: int, *, pinned: bool
    ) -> NDArray[np.uint8]:
        """Memory for copies of KV, `[num_blocks, bytes_per_block]`, which all ranks reach. Raises
        AgentError."""
        from kvrelay.kvtransfer.movers.pool import make_host_arena, pin

        if self._in_ranks(process_of) == [os.getpid()]:
            self._pool = pool = make_host_arena(num_blocks, bytes_per_block, pinned)
            return pool
        try:
            self._pool = make_shared_pool(num_blocks, bytes_per_block)
            pool = self._pool.open()
        except OSError as error:
            size = num_blocks * bytes_per_block / 2**30
            raise AgentError(f"no {size:.1f} GiB of memory for KV of ranks: {error}") from error
        if pinned:
            pin(pool)
        return pool

    def use(self, pool: NDArray[np.uint8], share: HeadShare) -> None:
        """`pool`: as `make_pool` has made it. KV is copied from now on. `share`: as for
        `checksum_blocks`."""
        self._reports.with_events = False
        self.copies.use(pool, share, self.num_ranks)
        self._in_ranks(use_pool, self._pool, self._at)

    def _in_ranks(self, call: Callable[..., Any], *args: Any) -> list[Any]:
        """What `call` returns in each rank, of its worker there and `args`."""
        found: list[Any] = self._engine.collective_rpc(call, timeout=RANKS_S, args=args)
        return found

    def _on_rank_lost(self) -> None:
        """On a thread of vLLM's, which has seen that a process of a rank has ended."""
        if not self._ends:
            self.copies.fail("vLLM: a process of a rank has ended")

    @property
    def step_tokens(self) -> int:
        """Those of a prompt that a step computes at most."""
        scheduler = self.config.scheduler_config
        most = int(scheduler.max_num_batched_tokens)
        return min(most, scheduler.long_prefill_token_threshold or most)

    @property
    def version(self) -> str:
        import vllm

        return str(vllm.__version__)

    @property
    def attention_backends(self) -> list[str]:
        """Classes that compute attention, by which the order of numbers in a block goes."""
        return sorted({name for found in self._in_ranks(backends_of) for name in found})

    def start(self, deliver: Deliver, transfers: TransferLoops | None = None) -> VllmEngine:
        """`transfers`: what moves KV below and between workers; owned from now on."""
        self._deliver, self._transfers = deliver, transfers
        loads = self.weights.load
        self._loads = StepThread(loads, deliver, "vllm-weights", low_priority=True)
        self.copies.report = deliver
        deliver(self.first)  # the blocks of the warm-up are there
        self._images.start(deliver)
        self._thread.start()
        return self

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, Extend):
            self.copies.extend(effect)
        elif isinstance(effect, ConnectPeer | CopyBlocks | StoreIndex | FindStored):
            assert self._transfers is not None, effect
            self._transfers.submit(effect)
        elif isinstance(effect, LoadWeights):
            assert self._loads is not None, effect
            self._loads.submit(effect)
        # How far a step is, vLLM does not say: one that is slow counts as one that stands.
        elif not isinstance(effect, AskProgress) and not self._images.takes(effect):
            self._effects.put(effect)

    def close(self) -> None:
        self._ends = True
        self._images.close()
        self._effects.put(None)
        if self._loads is not None:
            self._loads.stop()
        if self._transfers is not None:
            self._transfers.close(CLOSE_S)
        self._thread.join(CLOSE_S)
        self.copies.close()

    def _run(self) -> None:
        try:
            while not self._ends:
                self._take_effects()
                began = time.perf_counter()
                outputs = [_generated(each) for each in self._engine.step()]
                for each in outputs:
                    if each.finish:
                        self._end(each.key)
                self._deliver(self._reports.take(outputs, time.perf_counter() - began))
        except Exception as error:
            log.exception("vLLM has raised")
            self._deliver(EngineLost(f"vLLM: {type(error).__name__}: {first_line(error)}"))

    def _take_effects(self) -> None:
        """Blocks while there is nothing to do. After a stop there is: a step frees its blocks."""
        has_work = self._engine.has_unfinished_requests()
        while (self._holds or not (has_work and self._effects.empty())) and not self._ends:
            effect = self._effects.get()
            if effect is not None:
                self._perform(effect)
            has_work = True

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Stop(key):
                self._engine.abort_request([key])
                self._end(key)
                self._deliver(Stopped(key))
            case Begin():
                self._begin(effect)
            case Rendered(begin, prompt):
                self._begin(begin, prompt)
            case _Compared(begin, prompt):
                if begin.key in self.copies.tables:  # else it was stopped meanwhile
                    self._add(begin, prompt)
            case UseWeights():
                used = self.weights.use(effect)
                self._deliver(self._reports.take((), 0.0))  # vLLM has forgotten its blocks
                self._deliver(used)
            case Hold(holds):
                self._holds = holds
                if holds:
                    self._deliver(Held())
            case _:
                assert isinstance(effect, PrepareGrammar), effect  # vLLM compiles it by itself

    def _alone(self, begin: Begin) -> list[Generated]:
        """Runs a request that has no images and no table, where vLLM has no other."""
        self._perform(begin)
        found: list[Generated] = []
        while self._engine.has_unfinished_requests():
            found += map(_generated, self._engine.step())
        self.copies.end(begin.key)
        return found

    def _probe(self) -> float:
        """Returns a number that follows from all weights."""
        if self.pools:
            return float(np.frombuffer(self._alone(POOLED)[-1].embedding, np.float32).sum())
        return self._alone(PROBE)[-1].logprobs[-1].logprob

    def _begin(self, effect: Begin, prompt: Any = None) -> None:
        if not self.copies.begin(effect, lambda: self._effects.put(_Compared(effect, prompt))):
            self._add(effect, prompt)

    def _add(self, effect: Begin, prompt: Any) -> None:
        try:
            lora = None if effect.need is None else self._adapters.request(effect.need)
            asked = prompt or _prompt(effect), _sampling(effect.options)
            how = {"priority": effect.priority, "lora_request": lora}
            self._engine.add_request(effect.key, *asked, **how)
        except Exception as error:  # what it refuses has classes of vLLM's own; it goes on
            self._end(effect.key)
            reason = Refusal.NEED if isinstance(error, NeedError) else Refusal.UNSUPPORTED
            self._deliver(NotBegun(effect.key, first_line(error), reason))

    def _end(self, key: str) -> None:
        self.copies.end(key)
        self._images.end(key)


def _connector(name: NodeId, copies: Copies) -> dict[str, Any]:
    """Arguments with which vLLM makes connectors to `copies`."""
    from vllm.config import KVTransferConfig

    from kvrelay.decode_worker.vllm.connector import PIPE, PROCESS, KVRelayConnector

    KVRelayConnector.made_for[name] = copies
    place = {PROCESS: os.getpid(), PIPE: Pipe(copies.copied).path}
    config = KVTransferConfig(
        kv_connector=KVRelayConnector.__name__,
        kv_connector_module_path=KVRelayConnector.__module__,
        engine_id=name,
        kv_role="kv_both",
        kv_connector_extra_config=place,
    )
    return {"kv_transfer_config": config}


def _can_edit(arguments: Mapping[str, Any]) -> bool:
    """Whether vLLM takes logits processors of the interface that `edits` is of: its runner for
    GPUs has another one, and beside drafts it has none."""
    return _is_cpu() and not arguments.get("speculative_config")


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _edits(arguments: Mapping[str, Any]) -> dict[str, Any]:
    from kvrelay.decode_worker.vllm.edits import LogitEdits

    return {"logits_processors": [*(arguments.get("logits_processors") or ()), LogitEdits]}


def _open(arguments: Mapping[str, Any], reports: _Reports) -> Any:
    from vllm import EngineArgs, LLMEngine
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import EventPublisher, EventPublisherFactory
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Publisher(EventPublisher):  # type: ignore[misc]
        def __init__(self, data_parallel_rank: int = 0, **_: Any) -> None:
            super().__init__(data_parallel_rank)

        def publish(self, events: Any) -> None:
            reports.publish(events)

        def shutdown(self) -> None:
            """There is nothing that it has opened."""

    class Logger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            """Nothing of it is needed."""

        def record(
            self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any
        ) -> None:
            reports.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            """The worker logs that it is up by itself."""

    EventPublisherFactory.register_publisher(PUBLISHER, Publisher)
    events = KVEventsConfig(enable_kv_cache_events=True)
    events.publisher = PUBLISHER
    return LLMEngine.from_engine_args(
        EngineArgs(**{**arguments, "kv_events_config": events}), stat_loggers=[Logger]
    )


def _prompt(begin: Begin) -> dict[str, Any]:
    salt = {"cache_salt": begin.salt} if begin.salt else {}
    return {"prompt_token_ids": list(begin.tokens), **salt}


def _sampling(options: Mapping[str, Any]) -> Any:
    from vllm import PoolingParams, SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    given = dict(options)
    if "task" in given:
        return PoolingParams(**given)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    # The stop tokens that are given have the model's own among them.
    return SamplingParams(
        **given, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )


def _has_image(keys: Sequence[Any] | None) -> bool:
    """Whether what is in a block depends on an image; `keys`: as in vLLM's events."""
    return any(isinstance(each, tuple | list) for each in keys or ())


def _generated(output: Any) -> Generated:
    """What a step has given to a request."""
    if not isinstance(output.outputs, list):  # one token ends it, which nobody sees
        vector = output.outputs.data.float().cpu().numpy().tobytes()
        return Generated(output.request_id, (0,), finish="length", embedding=vector)
    own = output.outputs[0]
    tokens = tuple(own.token_ids)
    prompt = [each for each in output.prompt_logprobs or () if each]
    prompt_tokens = list(output.prompt_token_ids or ())[1:] if prompt else []
    return Generated(
        output.request_id,
        tokens,
        tuple(map(_logprobs, tokens, own.logprobs)) if own.logprobs else (),
        own.finish_reason or "",
        output.num_cached_tokens or 0,
        tuple(map(_logprobs, prompt_tokens, prompt)),
    )


def _logprobs(token: int, known: Mapping[int, Any]) -> TokenLogprobs:
    """Takes that of `token`, and of all that came with it, the best first: `token` is last where it
    is none of those that were asked for."""
    best = sorted((each.rank, other, each.logprob) for other, each in known.items())
    return TokenLogprobs(known[token].logprob, tuple((other, p) for _, other, p in best))
