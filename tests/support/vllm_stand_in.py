"""A stand-in for vLLM, as far as a worker uses it: what comes out has the form of 0.32's.

Recorded from it: names and types of outputs, KV events (integers as hashes, the salt in the
`extra_keys` of the first block, a Stored again where a block is reused), statistics after each
step, what is raised for a token that the model does not have, and how a KV connector is called. The
model is a hash: the next token depends on all before it, and with a temperature on the seed and on
how many were drawn, or without a seed on how many the engine has drawn. It is the largest of a row
of logits, which bans and logits processors edit. KV of a token is a hash of all up to it; where
what is in a block is not that, another token comes, and other KV of those that follow. Blocks are
cached as they are allocated, and shared by requests that begin alike, in the same step too. A group
of layers with a window has blocks of what it reads, and block 0, which nobody writes, in place of
the others. A step computes as much of a prompt as steps may. Ranks have the memory of their heads
each, and a connector each, in this process. One that pools gives the KV of a prompt's last token.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from kvrelay.decode_worker.vllm.form import Form, GroupForm
from kvrelay.decode_worker.vllm.weights import reload
from kvrelay.engine.model.checkpoint.families import read_config

VOCAB = 256
IMAGE_MARK, IMAGE_TOKEN = 250, 251
NUM_LAYERS = 2
NUM_HEADS = 2
WIDTH = 4  # numbers that a layer keeps of a token: a head's key and value


class BlockStored(SimpleNamespace): ...


class BlockRemoved(SimpleNamespace): ...


class AllBlocksCleared(SimpleNamespace): ...


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
    lora: str = ""  # its adapter's name
    num_drawn: int = 0
    num_cached: int = 0
    num_computed: int = -1  # tokens that have KV; -1: it has not been scheduled
    num_after: int = 0  # tokens that have KV after the step
    block_ids: list[list[int]] = field(default_factory=list)  # by group of layers
    edits: list[Callable[[list[int], torch.Tensor], torch.Tensor]] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return f"{self.key}-5eed"

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


def kv_of(tokens: list[int], lora: str = "") -> torch.Tensor:
    return torch.frombuffer(
        bytearray(blake2b(f"{tokens}{lora}".encode(), digest_size=8).digest()), dtype=torch.int16
    ).float()


class ImageToken(int):
    """One of those that an image is: the model sees the image in it, others only its number."""

    image: str

    @classmethod
    def of(cls, image: str) -> ImageToken:
        made = cls(IMAGE_TOKEN)
        made.image = image
        return made

    def __repr__(self) -> str:
        return f"{IMAGE_TOKEN} of {self.image}"


class Renderer:
    """Makes 2 tokens of an image, and one more for each 10 pixels of its height. What it has made
    is cached, apart where `skip_mm_cache` is set: such an image need not be given again."""

    def __init__(self) -> None:
        self.cached: dict[bool, dict[str, int]] = {False: {}, True: {}}

    def render_cmpl(self, prompts: list[dict[str, Any]], *, skip_mm_cache: bool) -> list[Any]:
        (prompt,) = prompts
        given = prompt["multi_modal_data"]["image"], prompt["multi_modal_uuids"]["image"]
        images = [*zip(*given, strict=True)]
        tokens: list[int] = []
        places = []
        for token in prompt["prompt_token_ids"]:
            if token != IMAGE_MARK or not images:
                tokens.append(token)
                continue
            image, name = images.pop(0)
            known = self.cached[skip_mm_cache]
            if image is None and name not in known:
                raise ValueError("Cache miss for image at index 0 but data is not provided.")
            count = known.setdefault(name, 0 if image is None else 2 + image.size[1] // 10)
            places.append(SimpleNamespace(offset=len(tokens), length=count))
            tokens += [ImageToken.of(name)] * count
        if images:
            raise ValueError(f"Expected {len(images)} more placeholders")
        found = {"prompt_token_ids": tokens, "mm_placeholders": {"image": places}}
        return [{**found, "cache_salt": prompt.get("cache_salt", "")}]


class KVConnectorMetadata: ...


class SupportsHMA: ...


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorBase_V1:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


def digest_of(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    return blake2b(b"".join(each.read_bytes() for each in files), digest_size=4).hexdigest()


def next_token(tokens: list[int], drawn: str = "") -> int:
    """What follows. `drawn`: of the seed and the number of tokens drawn by it; "": greedy."""
    return blake2b(f"{tokens} {drawn}".encode(), digest_size=1).digest()[0]


class VLLMValidationError(Exception):
    """No ValueError, as vLLM's is none."""


class Attention:
    """A layer that attends, and its backend."""

    @classmethod
    def get_attn_backend(cls) -> type[Attention]:
        return cls


@dataclass
class LLMEngine:
    vllm_config: Any
    publisher: Any
    loggers: list[Any]
    connectors: list[Any]  # in the scheduler, and in each rank; []: none
    workers: list[Any]  # one in each rank, with its configuration
    kv: list[list[torch.Tensor]]  # by rank and layer: [num_blocks, its heads, block_size, WIDTH]
    free: list[int]
    requests: dict[str, _Request] = field(default_factory=dict)
    # (group, hash) -> block, the oldest first
    cached: dict[tuple[int, int], int] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)  # block -> requests
    processors: list[Any] = field(default_factory=list)
    seed: int = 0
    num_drawn: int = 0  # without a seed of the request
    loras: dict[int, Any] = field(default_factory=dict)

    renderer: Renderer = field(default_factory=Renderer)
    weights: str = ""  # another one for each folder; "": those that it began with
    lose_rank: Callable[[], None] = lambda: None  # what is called when a rank's process has ended

    made: ClassVar[list[LLMEngine]] = []
    turns: ClassVar[threading.Semaphore | None] = None  # each step takes one, where it is set
    fails: ClassVar[str] = ""  # what a step raises
    windows: ClassVar[tuple[int, ...]] = (0,)  # tokens that groups of layers read; 0: all
    pooling_tasks: ClassVar[tuple[str, ...]] = ("embed",)
    unreadable: ClassVar[set[str]] = set()  # names of folders that are read in part

    @classmethod
    def from_engine_args(cls, args: Any, stat_loggers: list[Any]) -> LLMEngine:
        num_blocks, size = args.num_gpu_blocks_override, args.block_size
        cache = SimpleNamespace(num_gpu_blocks=num_blocks, block_size=size)
        model = SimpleNamespace(
            model=args.model,
            max_model_len=512 if args.max_model_len < 0 else args.max_model_len,
            dtype="torch.float32",
            use_mla=False,
            get_total_num_kv_heads=lambda: NUM_HEADS,
            get_num_kv_heads=lambda parallel: max(1, NUM_HEADS // parallel.tensor_parallel_size),
            runner_type=getattr(args, "runner", "generate"),
            pooler_config=SimpleNamespace(seq_pooling_type="LAST"),
        )
        transfer = getattr(args, "kv_transfer_config", None)
        config = SimpleNamespace(
            cache_config=cache,
            model_config=model,
            kv_transfer_config=transfer,
            scheduler_config=SimpleNamespace(
                max_num_batched_tokens=getattr(args, "max_num_batched_tokens", model.max_model_len),
                long_prefill_token_threshold=getattr(args, "long_prefill_token_threshold", 0),
            ),
            compilation_config=SimpleNamespace(static_forward_context={"layer 0": Attention}),
        )
        publisher = EventPublisherFactory.registered[args.kv_events_config.publisher]
        num_ranks = getattr(args, "tensor_parallel_size", 1)
        workers, kv = [], []
        for rank in range(num_ranks):
            sizes = {"tensor_parallel_size": num_ranks, "world_size": num_ranks, "rank": rank}
            sizes["pipeline_parallel_size"] = 1
            of_rank = SimpleNamespace(**vars(config), parallel_config=SimpleNamespace(**sizes))
            runner = dict.fromkeys(("sample_tokens", "discard_request_mask", "input_batch"))
            workers.append(SimpleNamespace(vllm_config=of_rank, rank=rank))
            workers[-1].model_runner = SimpleNamespace(**runner)
            shape = num_blocks, max(1, NUM_HEADS // num_ranks), size, WIDTH
            kv.append([torch.zeros(shape) for _ in range(NUM_LAYERS)])
        config = workers[0].vllm_config
        connectors = [] if transfer is None else _connectors(transfer, workers, kv)
        loggers = [each(config) for each in stat_loggers]
        free = list(range(1, num_blocks))
        made = cls(config, publisher(0), loggers, connectors, workers, kv, free)
        made.processors = [each(config, None, False) for each in args.logits_processors]
        made.seed = args.seed
        cls.made.append(made)
        return made

    @property
    def model_executor(self) -> Any:
        return SimpleNamespace(register_failure_callback=self._on_failure)

    def _on_failure(self, callback: Callable[[], None]) -> None:
        self.lose_rank = callback

    def collective_rpc(
        self, method: Callable[..., Any], timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        if method is reload:
            self._reload(*args)
            return [None for _ in self.workers]
        return [method(worker, *args) for worker in self.workers]

    def _reload(self, folder: str) -> None:
        begun = self.vllm_config.model_config.model
        self.weights = "" if folder == begun else digest_of(Path(folder))
        if Path(folder).name in self.unreadable:
            self.weights = "of both"
            raise ValueError(f"cannot read {folder}")

    def get_supported_tasks(self) -> tuple[str, ...]:
        pools = self.vllm_config.model_config.runner_type == "pooling"
        return (*self.pooling_tasks, "token_embed") if pools else ("generate",)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def add_request(
        self,
        key: str,
        prompt: dict[str, Any],
        params: Any,
        *,
        priority: int = 0,
        lora_request: Any = None,
    ) -> None:
        tokens = list(prompt["prompt_token_ids"])
        if max(tokens) >= VOCAB:
            raise VLLMValidationError(f"Token id {max(tokens)} is out of vocabulary")
        if isinstance(params, PoolingParams) is not ("embed" in self.get_supported_tasks()):
            raise VLLMValidationError("This model does not support this kind of request")
        assert params.seed is None or 0 <= params.seed < 1 << 63
        made = [each.new_req_logits_processor(params) for each in self.processors]
        request = _Request(key, tokens, params, prompt.get("cache_salt", ""))
        request.edits = [each for each in made if each is not None]
        if lora_request is not None:
            assert lora_request.lora_int_id in self.loras
            request.lora = lora_request.lora_name
        self.requests[key] = request

    def reset_prefix_cache(self) -> bool:
        if self.requests:
            return False
        self.cached.clear()
        self.free = [*range(1, self.vllm_config.cache_config.num_gpu_blocks)]
        self.publisher.publish(SimpleNamespace(events=[AllBlocksCleared()]))
        return True

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...

    def list_loras(self) -> set[int]:
        return {*self.loras}

    def add_lora(self, lora_request: Any) -> bool:
        if not (Path(lora_request.lora_path) / "adapter_config.json").is_file():
            raise ValueError(f"Loading lora {lora_request.lora_name} failed")
        self.loras[lora_request.lora_int_id] = lora_request
        return True

    def abort_request(self, keys: list[str]) -> None:
        for key in keys:
            self._end(key)

    def _end(self, key: str) -> None:
        if key in self.requests:
            for block in chain.from_iterable(self.requests.pop(key).block_ids):
                self._leave(block)

    def step(self) -> list[Any]:
        if self.turns is not None:
            self.turns.acquire()
        if self.fails:
            raise RuntimeError(self.fails)
        requests = [*self.requests.values()]
        self._compute(requests)
        done = [each for each in requests if each.num_computed == len(each.tokens)]
        outputs = [self._advance(each) for each in done]
        blocks = self.vllm_config.cache_config.num_gpu_blocks - 1
        held = chain.from_iterable(chain.from_iterable(r.block_ids) for r in self.requests.values())
        used = len({*held} - {0}) / blocks
        counts = {"num_running_reqs": len(self.requests), "num_waiting_reqs": 0}
        stats = SimpleNamespace(**counts, kv_cache_usage=used)
        for each in self.loggers:
            each.record(stats, SimpleNamespace(num_preempted_reqs=0), None, 0)
        return outputs

    def _compute(self, requests: list[_Request]) -> None:
        """Writes KV of all tokens that have none, or as many as a step computes, and lets the
        connector copy."""
        scheduler, new = self.vllm_config.scheduler_config, []
        most = scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens
        for each in requests:
            if each.num_computed < 0:
                new.append(each)
                self._begin(each)
            self._pass(each, each.num_computed)
            each.num_after = min(len(each.tokens), each.num_computed + most)
            self._have(each, each.num_after)
            self._cache(each)
        if self.connectors:
            self._connect(requests, new)
        else:
            self._forward(requests)
        for each in requests:
            each.num_computed = each.num_after

    def _first_read(self, group: int, num_computed: int) -> int:
        """The first row of it that the token after so many reads."""
        size, window = self.vllm_config.cache_config.block_size, self.windows[group]
        return max(0, num_computed - window + 1) // size if window else 0

    def _pass(self, request: _Request, num_computed: int) -> None:
        for group, blocks in enumerate(request.block_ids):
            for row in range(min(len(blocks), self._first_read(group, num_computed))):
                self._leave(blocks[row])
                blocks[row] = 0

    def _have(self, request: _Request, num_tokens: int) -> None:
        for blocks in request.block_ids:
            while len(blocks) * self.vllm_config.cache_config.block_size < num_tokens:
                blocks.append(self._allocate())

    def _allocate(self) -> int:
        while not self.free:  # what is cached alone
            oldest = next(each for each, block in self.cached.items() if not self.users[block])
            self._uncache(oldest)
        block = self.free.pop()
        self.users[block] = 1
        return block

    def _leave(self, block: int) -> None:
        if block:
            self.users[block] -= 1
            self._free_unused(block)

    def _free_unused(self, block: int) -> None:
        if not self.users[block] and block not in self.cached.values():
            self.free.append(block)

    def _uncache(self, known_as: tuple[int, int]) -> None:
        block = self.cached.pop(known_as)
        self._free_unused(block)
        group, name = known_as
        event = BlockRemoved(block_hashes=[name], group_idx=group)
        self.publisher.publish(SimpleNamespace(events=[event]))

    def _hits(self, request: _Request) -> list[list[int]]:
        """Blocks of the longest beginning of which each group has cached what it reads."""
        size = self.vllm_config.cache_config.block_size
        names = [name for name, *_ in self._names(request)]
        groups = range(len(self.windows))

        def lacks(rows: int) -> bool:
            return any(
                (group, names[row]) not in self.cached
                for group in groups
                for row in range(self._first_read(group, rows * size), rows)
            )

        end = len(names)
        while lacks(end):
            end -= 1
        firsts = [self._first_read(group, end * size) for group in groups]
        return [
            [0] * first + [self.cached[group, name] for name in names[first:end]]
            for group, first in enumerate(firsts)
        ]

    def _begin(self, request: _Request) -> None:
        size = self.vllm_config.cache_config.block_size
        request.block_ids = self._hits(request)
        for block in chain.from_iterable(request.block_ids):
            self.users[block] = self.users.get(block, 0) + 1
        request.num_computed = request.num_cached = len(request.block_ids[0]) * size
        if self.connectors:
            asked = self.connectors[0]
            more, _ = asked.get_num_new_matched_tokens(request, request.num_cached)
            end = request.num_cached + more
            self._pass(request, end)
            for group, blocks in enumerate(request.block_ids):  # only what is read
                blocks += [0] * (min(self._first_read(group, end), end // size) - len(blocks))
            self._have(request, end)
            asked.update_state_after_alloc(request, None, more)
            request.num_computed = request.num_cached = end

    def _connect(self, requests: list[_Request], new: list[_Request]) -> None:
        tables = {each.request_id: tuple(each.block_ids) for each in requests}
        known = [each for each in requests if each not in new]
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, num_computed_tokens=r.num_computed)
                for r in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[each.request_id for each in known],
                num_computed_tokens=[each.num_computed for each in known],
            ),
            num_scheduled_tokens={r.request_id: r.num_after - r.num_computed for r in requests},
            scheduled_spec_decode_tokens={},
            kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
        )
        scheduler, *ranks = self.connectors
        metadata = scheduler.build_connector_meta(output)
        for each in ranks:
            each.bind_connector_metadata(metadata)
            each.start_load_kv(None)
        self._forward(requests)
        for each in ranks:
            each.wait_for_save()

    def _forward(self, requests: list[_Request]) -> None:
        for each in requests:
            self._write(each, each.num_computed, each.num_after)

    def _write(self, request: _Request, first: int, end: int) -> None:
        size = self.vllm_config.cache_config.block_size
        for at in range(first, end):
            is_right = at % size or not at or self._reads_its_own(request, at)
            kv = kv_of(request.tokens[: at + 1], request.lora + self.weights) + (not is_right)
            for place, number in self._places(request, at):
                place[:] = kv + number

    def _reads_its_own(self, request: _Request, end: int) -> bool:
        size, known = self.vllm_config.cache_config.block_size, request.lora + self.weights
        return all(
            bool((place == kv_of(request.tokens[: at + 1], known) + number).all())
            for at in range(size - 1, end, size)
            for place, number in self._places(request, at, end)
        )

    def _places(
        self, request: _Request, at: int, end: int = 0
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """Where KV of a token is, of each layer and head of each group that reads it after `end`,
        and what tells these apart."""
        size = self.vllm_config.cache_config.block_size
        for group, blocks in enumerate(request.block_ids):
            if at // size < self._first_read(group, end):
                continue
            block, slot = blocks[at // size], at % size
            for rank, layers in enumerate(self.kv):
                for number, layer in enumerate(layers):
                    for own in range(layer.shape[1]):
                        head = rank * NUM_HEADS // len(self.kv) + own
                        yield (
                            layer[block, own, slot],
                            number + NUM_LAYERS * (head + NUM_HEADS * group),
                        )

    def _advance(self, request: _Request) -> Any:
        if isinstance(request.params, PoolingParams):
            self._end(request.key)
            own = SimpleNamespace(data=kv_of(request.tokens, self.weights))
            return SimpleNamespace(request_id=request.key, outputs=own, finished=True)
        params, is_first = request.params, request.num_drawn == 0
        token = self._sampled(request)
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
            self._end(request.key)
        known = None
        if params.logprobs is not None or params.logprob_token_ids:
            told = params.logprob_token_ids or range(2)
            best = {each: SimpleNamespace(logprob=-1.0 - each, rank=each + 1) for each in told}
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

    def _sampled(self, request: _Request) -> int:
        params, drawn = request.params, ""
        if params.temperature and params.seed is not None:
            drawn = f"{params.seed} {request.num_drawn}"
        elif params.temperature:
            self.num_drawn += 1
            drawn = f"{self.seed} of the engine {self.num_drawn}"
        token = next_token(request.tokens, drawn + request.lora + self.weights)
        if not self._reads_its_own(request, len(request.tokens)):
            token = (token + 1) % VOCAB
        row = -torch.arange(VOCAB, dtype=torch.float32).roll(token) / VOCAB
        output = request.tokens[len(request.tokens) - request.num_drawn :]
        for *begin, last in params._bad_words_token_ids or ():
            if output[len(output) - len(begin) :] == begin:
                row[last] = -torch.inf
        if params.allowed_token_ids:
            kept = row[params.allowed_token_ids]
            row.fill_(-torch.inf)[params.allowed_token_ids] = kept
        for each in request.edits:
            row = each(output, row)
        return int(row.argmax())

    def _names(self, request: _Request) -> list[tuple[int, int | None, list[int]]]:
        """Returns, for each full block before the last token, its hash, that before it, tokens."""
        size, parent, found = self.vllm_config.cache_config.block_size, None, []
        for start in range(0, len(request.tokens) - size, size):
            tokens = request.tokens[start : start + size]
            about = f"{parent} {tokens} {request.salt} {request.lora}"
            name = int.from_bytes(blake2b(about.encode()).digest())
            found.append((name, parent, tokens))
            parent = name
        return found

    def _cache(self, request: _Request) -> None:
        """Its full blocks, whose events are published."""
        size, events = self.vllm_config.cache_config.block_size, []
        num_rows = request.num_after // size
        for group, blocks in enumerate(request.block_ids):
            rows = zip(self._names(request), blocks[:num_rows], strict=False)
            for (name, parent, tokens), block in rows:
                if not block:
                    continue
                self.cached[group, name] = self.cached.pop((group, name), block)
                images = [(each.image, 0) for each in tokens if isinstance(each, ImageToken)]
                salt = [request.salt] if request.salt and parent is None else []
                keys = [(*((request.lora,) if request.lora else ()), *images, *salt) or None]
                about = {"block_size": size, "extra_keys": keys, "group_idx": group}
                events.append(
                    BlockStored(
                        block_hashes=[name], parent_block_hash=parent, token_ids=tokens, **about
                    )
                )
        self.publisher.publish(SimpleNamespace(events=events))


def _connectors(transfer: Any, workers: list[Any], kv: list[list[torch.Tensor]]) -> list[Any]:
    made_by = getattr(import_module(transfer.kv_connector_module_path), transfer.kv_connector)
    shape = kv[0][0].shape
    about = {
        "num_kv_heads": shape[1],
        "block_size": shape[2],
        "head_size": WIDTH,
        "dtype": kv[0][0].dtype,
        "page_size_bytes": kv[0][0][0].nbytes,
    }
    groups, names = [], []
    for number, window in enumerate(LLMEngine.windows):
        kind = "sliding_window" if window else "full_attention"
        spec = SimpleNamespace(**about, kind=kind, sliding_window=window or None)
        names.append([f"layer {layer} of group {number}" for layer in range(NUM_LAYERS)])
        groups.append(SimpleNamespace(layer_names=names[-1], kv_cache_spec=spec))
    sizes = {"num_blocks": len(kv[0][0]), "kv_cache_groups": groups, "kv_cache_layout": "LBHNC"}
    cache = SimpleNamespace(**sizes)
    made = [made_by(workers[0].vllm_config, KVConnectorRole.SCHEDULER, cache)]
    for worker, layers in zip(workers, kv, strict=True):
        made.append(made_by(worker.vllm_config, KVConnectorRole.WORKER, cache))
        caches = (zip(own, layers, strict=True) for own in names)  # groups share their memory
        made[-1].register_kv_caches(dict(chain.from_iterable(caches)))
    return made


class EngineArgs(SimpleNamespace):
    logits_processors = ()
    seed = 0


def ask(python: str, asked: Mapping[str, Any], variables: Mapping[str, str]) -> Form:
    """What vLLM would say of a checkpoint of ours: its layers have states, or keep KV as here."""
    size, shape = asked["block_size"], read_config(Path(asked["model"]))
    why_not = "states" if shape.recurrent is not None else ""
    why_not = why_not if asked["enable_prefix_caching"] else "vLLM's prefix caching is off"
    return Form(
        "0.32.0",
        max_model_len=shape.max_position_embeddings,
        block_size=size,
        weights_bytes=1 << 20,
        bytes_per_block=NUM_LAYERS * NUM_HEADS * size * WIDTH * 4,
        num_kv_heads=NUM_HEADS,
        groups=tuple(
            GroupForm("window" if window else "full", NUM_LAYERS, window, size, "float32")
            for window in LLMEngine.windows
        ),
        why_not=why_not,
    )


class KVEventsConfig(SimpleNamespace): ...


class SamplingParams(SimpleNamespace):
    def __init__(self, **given: Any) -> None:
        defaults = {"seed": None, "stop_token_ids": None, "min_tokens": 0, "logprobs": None}
        defaults |= {"logprob_token_ids": None, "extra_args": None, "allowed_token_ids": None}
        defaults["_bad_words_token_ids"] = None
        super().__init__(**{**defaults, **given})


class PoolingParams(SamplingParams): ...


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


class AdapterLogitsProcessor:
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None: ...


def install(patch: pytest.MonkeyPatch) -> None:
    """`import vllm` finds this from now on, and so does whoever asks for the form of KV."""
    patch.setattr("kvrelay.decode_worker.vllm.form.ask", ask)
    parts: dict[str, dict[str, Any]] = {
        "vllm": {
            "EngineArgs": EngineArgs,
            "LLMEngine": LLMEngine,
            "PoolingParams": PoolingParams,
            "SamplingParams": SamplingParams,
            "__version__": "0.32.0",
        },
        "vllm.config": {"KVEventsConfig": KVEventsConfig, "KVTransferConfig": SimpleNamespace},
        "vllm.distributed": {},
        "vllm.distributed.kv_transfer": {},
        "vllm.distributed.kv_transfer.kv_connector": {},
        "vllm.distributed.kv_transfer.kv_connector.v1": {},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": KVConnectorBase_V1,
            "KVConnectorMetadata": KVConnectorMetadata,
            "KVConnectorRole": KVConnectorRole,
            "SupportsHMA": SupportsHMA,
        },
        "vllm.distributed.kv_events": {
            "EventPublisher": EventPublisher,
            "EventPublisherFactory": EventPublisherFactory,
        },
        "vllm.v1": {},
        "vllm.v1.kv_cache_interface": {
            "get_kv_cache_spec_kind": lambda spec: SimpleNamespace(value=spec.kind),
            "get_kv_cache_spec_sliding_window": lambda spec: spec.sliding_window,
        },
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
        "vllm.v1.sample": {},
        "vllm.v1.sample.logits_processor": {"AdapterLogitsProcessor": AdapterLogitsProcessor},
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
    for name in ("connector", "edits"):
        patch.delitem(sys.modules, f"kvrelay.decode_worker.vllm.{name}", raising=False)
    patch.setattr(EventPublisherFactory, "registered", {})
    patch.setattr(LLMEngine, "made", [])
    patch.setattr(LLMEngine, "turns", None)
    patch.setattr(LLMEngine, "windows", (0,))
    patch.setattr(LLMEngine, "fails", "")


def turns(number: int) -> threading.Semaphore:
    """So many steps may be run, by all engines together, and then more as it is released."""
    LLMEngine.turns = threading.Semaphore(number)
    return LLMEngine.turns
