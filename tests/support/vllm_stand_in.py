"""A stand-in for vLLM, as far as a worker uses it: what comes out has the form of 0.32's.

Recorded from it: names and types of outputs, KV events (integers as hashes, the salt in the
`extra_keys` of the first block, a Stored again where a block is reused), statistics after each
step, and what is raised for a token that the model does not have. The model is a hash: the next
token depends on all before it, and with a temperature on the seed and on how many were drawn.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from hashlib import blake2b
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

VOCAB = 256


class BlockStored(SimpleNamespace): ...


class BlockRemoved(SimpleNamespace): ...


class EventPublisher:
    def __init__(self, data_parallel_rank: int = 0) -> None: ...


class EventPublisherFactory:
    registered: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register_publisher(cls, name: str, made_by: Any) -> None:
        cls.registered[name] = made_by


@dataclass
class _Request:
    key: str
    tokens: list[int]
    params: Any
    salt: str
    num_drawn: int = 0
    num_cached: int = 0


def next_token(tokens: list[int], drawn: str = "") -> int:
    """What follows. `drawn`: of the seed and the number of tokens drawn by it; "": greedy."""
    return blake2b(f"{tokens} {drawn}".encode(), digest_size=1).digest()[0]


@dataclass
class LLMEngine:
    vllm_config: Any
    publisher: Any
    loggers: list[Any]
    requests: dict[str, _Request] = field(default_factory=dict)
    cached: dict[int, None] = field(default_factory=dict)
    has_ended: bool = False  # some request, since the last step

    turns: ClassVar[threading.Semaphore | None] = None  # each step takes one, where it is set
    fails: ClassVar[str] = ""  # what a step raises

    @classmethod
    def from_engine_args(cls, args: Any, stat_loggers: list[Any]) -> LLMEngine:
        cache = SimpleNamespace(
            num_gpu_blocks=args.num_gpu_blocks_override, block_size=args.block_size
        )
        model = SimpleNamespace(max_model_len=args.max_model_len, dtype="torch.float32")
        config = SimpleNamespace(cache_config=cache, model_config=model)
        publisher = EventPublisherFactory.registered[args.kv_events_config.publisher]
        return cls(config, publisher(data_parallel_rank=0), [each(config) for each in stat_loggers])

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def add_request(self, key: str, prompt: dict[str, Any], params: Any) -> None:
        tokens = list(prompt["prompt_token_ids"])
        if max(tokens) >= VOCAB:
            raise ValueError(f"Token id {max(tokens)} is out of vocabulary")
        self.requests[key] = _Request(key, tokens, params, prompt.get("cache_salt", ""))

    def abort_request(self, keys: list[str]) -> None:
        for key in keys:
            self.requests.pop(key, None)

    def step(self) -> list[Any]:
        if self.turns is not None:
            self.turns.acquire()
        if self.fails:
            raise RuntimeError(self.fails)
        outputs = [self._advance(request) for request in [*self.requests.values()]]
        size = self.vllm_config.cache_config.block_size
        blocks = self.vllm_config.cache_config.num_gpu_blocks - 1
        used = sum(-(-len(each.tokens) // size) for each in self.requests.values()) / blocks
        counts = {"num_running_reqs": len(self.requests), "num_waiting_reqs": 0}
        stats = SimpleNamespace(**counts, kv_cache_usage=used)
        for each in self.loggers:
            each.record(stats, SimpleNamespace(num_preempted_reqs=0), None, 0)
        return outputs

    def _advance(self, request: _Request) -> Any:
        params, is_first = request.params, request.num_drawn == 0
        if is_first:
            request.num_cached = self._cache(request)
        drawn = f"{params.seed} {request.num_drawn}" if params.temperature else ""
        token = next_token(request.tokens, drawn)
        request.tokens.append(token)
        request.num_drawn += 1
        if not is_first:
            self._cache(request)
        finish = None
        if token in (params.stop_token_ids or ()) and request.num_drawn > params.min_tokens:
            finish = "stop"
        elif request.num_drawn >= params.max_tokens:
            finish = "length"
        if finish:
            del self.requests[request.key]
        known = None
        if params.logprobs is not None:
            best = {each: SimpleNamespace(logprob=-1.0 - each, rank=each + 1) for each in range(2)}
            known = [best | {token: SimpleNamespace(logprob=-9.0, rank=token + 3)}]
        output = SimpleNamespace(
            token_ids=[token], logprobs=known, finish_reason=finish, stop_reason=None
        )
        return SimpleNamespace(
            request_id=request.key,
            outputs=[output],
            num_cached_tokens=request.num_cached,
            prompt_logprobs=None,
            prompt_token_ids=None,
            finished=finish is not None,
        )

    def _cache(self, request: _Request) -> int:
        """Full blocks, whose events are published; how many of the first tokens were there."""
        size = self.vllm_config.cache_config.block_size
        parent, events, num_hits, hits = None, [], 0, True
        for start in range(0, len(request.tokens) - size, size):
            tokens = request.tokens[start : start + size]
            block = int.from_bytes(blake2b(f"{parent} {tokens} {request.salt}".encode()).digest())
            hits = hits and block in self.cached
            num_hits += hits
            self.cached.pop(block, None)
            self.cached[block] = None
            keys = [(request.salt,)] if request.salt and parent is None else [None]
            about = {"block_size": size, "extra_keys": keys, "group_idx": 0}
            events.append(
                BlockStored(
                    block_hashes=[block], parent_block_hash=parent, token_ids=tokens, **about
                )
            )
            parent = block
        while len(self.cached) > self.vllm_config.cache_config.num_gpu_blocks - 1:
            oldest = next(iter(self.cached))
            del self.cached[oldest]
            events.append(BlockRemoved(block_hashes=[oldest], group_idx=0))
        self.publisher.publish(SimpleNamespace(events=events))
        return num_hits * size


class EngineArgs(SimpleNamespace): ...


class KVEventsConfig(SimpleNamespace): ...


class SamplingParams(SimpleNamespace):
    def __init__(self, **given: Any) -> None:
        defaults = {"seed": None, "stop_token_ids": None, "min_tokens": 0, "logprobs": None}
        super().__init__(**{**defaults, **given})


def install(patch: pytest.MonkeyPatch) -> None:
    """`import vllm` finds this from now on."""
    parts: dict[str, dict[str, Any]] = {
        "vllm": {
            "EngineArgs": EngineArgs,
            "LLMEngine": LLMEngine,
            "SamplingParams": SamplingParams,
        },
        "vllm.config": {"KVEventsConfig": KVEventsConfig},
        "vllm.distributed": {},
        "vllm.distributed.kv_events": {
            "EventPublisher": EventPublisher,
            "EventPublisherFactory": EventPublisherFactory,
        },
        "vllm.v1": {},
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.loggers": {"StatLoggerBase": object},
        "vllm.sampling_params": {
            "RequestOutputKind": SimpleNamespace(DELTA="delta"),
            "StructuredOutputsParams": SimpleNamespace,
        },
    }
    for name, names in parts.items():
        module = ModuleType(name)
        for each, value in names.items():
            setattr(module, each, value)
        patch.setitem(sys.modules, name, module)
    patch.setattr(EventPublisherFactory, "registered", {})
    patch.setattr(LLMEngine, "turns", None)
    patch.setattr(LLMEngine, "fails", "")


def turns(number: int) -> threading.Semaphore:
    """So many steps may be run, by all engines together, and then more as it is released."""
    LLMEngine.turns = threading.Semaphore(number)
    return LLMEngine.turns
