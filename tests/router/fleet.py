"""Workers that have told their rates, what they hold, and a choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from random import Random

from kvrelay.engine.images import PlacedImage
from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.router.index.prefix_index import EXPECTED, FACT, NOTHING, Held, IndexTable
from kvrelay.router.native.bindings import address_of, bindings, ffi
from kvrelay.router.placement.cost import CostModel
from kvrelay.router.placement.endpoint import Endpoint, PromptQueue
from kvrelay.router.placement.policy import Fleet, Option, Options, Policy
from kvrelay.router.placement.work import HashedPrompt, Work
from tests.router.script import worker_info, worker_stats

STATS = worker_stats("", prefill_tokens_per_s=1000.0, decode_step_s=0.01)
ROOMY = {"num_blocks": 1000, "max_model_len": 1_000_000}


def endpoint(name: str, *, info: dict[str, object] | None = None, **stats: object) -> Endpoint:
    """A worker that has told its rates, and `stats`."""
    made = Endpoint(worker_info(name, **{**ROOMY, **(info or {})}), last_seen_at=0.0)
    told = {"worker": name, "num_free_blocks": made.info.num_blocks, **stats}
    made.on_stats(0.0, replace(STATS, **told))  # type: ignore[arg-type]
    return made


def on(device: int = 0, host: int = 0, disk: int = 0) -> Held:
    """What a worker holds and has said so."""
    return Held(device, host, disk, said=device + host + disk)


@dataclass(frozen=True)
class Todo:
    """A request, and who holds how much of its prefix, in tokens."""

    num_tokens: int
    output_tokens: float
    held: Mapping[NodeId, Held]
    sources: tuple[Endpoint, ...] = ()
    need: int = 0
    images: tuple[PlacedImage, ...] = ()


def work(
    num_tokens: int,
    output_tokens: float = 100.0,
    sources: tuple[Endpoint, ...] = (),
    **cached: int | Held,
) -> Todo:
    """`cached`: tokens by worker, of its device where it is a number. `sources` count where a test
    says who serves; a choice finds its own."""
    held = {
        name.replace("_", "-"): on(tokens) if isinstance(tokens, int) else tokens
        for name, tokens in cached.items()
    }
    return Todo(num_tokens, output_tokens, held, sources)


class Chooser:
    """A policy over fleets of these workers, whose order follows each choice. Only `sources` are
    fetched from."""

    def __init__(
        self, *workers: Endpoint, policy: str = "prefix", cost: CostModel | None = None
    ) -> None:
        self.workers = workers
        self.cost = cost or CostModel()
        self.index = IndexTable(stride=32, max_expected=1)
        self.random = Random(1)
        self.fleets = {role: Fleet("", self.cost) for role in Role}
        self.policy = Policy(
            policy, self.cost, self.index, self.fleets,
            max_inflight=1000, max_memory_wait_s=inf, probe_after_s=inf,
            fetch_sources_per_role=0,
        )  # fmt: skip
        for worker in self.workers:
            is_prefill = worker.info.role is Role.PREFILL
            self.policy.chooser.put(worker, self.index.open(int(is_prefill)))
            self.fleets[worker.info.role].add(0.0, worker)

    def choose(self, todo: Todo, *, now: float = 0.0, sticky: bytes = b"r") -> Options:
        self.update(now)
        choice = self.policy.choose(now, self.asked(todo), lambda: sticky)
        assert choice is not None
        self.update(now)
        return choice

    def update(self, now: float) -> None:
        for worker in self.workers:
            self.fleets[worker.info.role].update(now, worker)

    def asked(self, todo: Todo) -> Work:
        """A new prompt, of which the index knows who holds what. Each of its tokens has a name: the
        test's workers have blocks of one size."""
        names = bytearray(self.random.randbytes(HASH_BYTES * todo.num_tokens))
        for worker in self.workers:
            self.hold(worker, names, todo.held.get(worker.worker, NOTHING))
        models = {worker.model: worker.info.block_size for worker in self.workers}
        prompts = [HashedPrompt(model, size, 1, names) for model, size in models.items()]
        counts = todo.num_tokens, todo.num_tokens, todo.output_tokens, todo.output_tokens
        return Work(*counts, prompts, need=todo.need, images=todo.images)

    def hold(self, worker: Endpoint, names: bytearray, held: Held) -> None:
        """What it has not said is expected in its device memory."""
        said = min(held.device, held.said)
        lengths = {FACT[Tier.DEVICE]: said, EXPECTED: held.device - said}
        lengths |= {FACT[Tier.HOST]: held.host, FACT[Tier.DISK]: held.disk}
        begin = 0
        for fact, length in lengths.items():
            end = begin + HASH_BYTES * length
            self.index.change(worker.slot, names[begin:end], add=fact)
            begin = end

    def weigh(self, now: float, todo: Todo, *workers: Endpoint) -> tuple[Option, Option | None]:
        """What it costs if just these serve, and the prefill worker's part of it."""
        self.policy.chooser.ask(now, self.asked(todo), trusting=False)
        roles = [
            [w for w in workers if w.info.role is role] for role in (Role.DECODE, Role.PREFILL)
        ]
        options = self.policy.chooser.weigh(*roles, todo.sources)
        assert options is not None
        return options.best, options.best_prefill


def choose(todo: Todo, *workers: Endpoint, policy: str = "prefix") -> Options:
    return Chooser(*workers, policy=policy).choose(todo)


def names_of(choice: Options) -> tuple[str, str | None]:
    return choice.best.worker, choice.best.prefill_from


def pending_tokens(worker: Endpoint) -> int:
    """Prompt tokens known to wait for computation there, of all routers."""
    number: int = worker.struct.own_tokens + worker.struct.other_tokens
    return number


def ahead_of(prompts: PromptQueue, now: float, seconds: float) -> tuple[float, int]:
    """How long a prompt that takes `seconds` waits for shorter ones, and how many longer ones
    would wait for it."""
    num_behind = ffi.new("uint32_t *")
    wait_s: float = bindings().kvr_prompts_ahead_of(
        prompts.address, now, seconds, address_of(num_behind)
    )
    return wait_s, num_behind[0]


# -- the cost of one placement ----------------------------------------------------------------


def local_cost(cost: CostModel, now: float, decode: Endpoint, todo: Todo) -> Option:
    """What everything on one decode worker costs."""
    return Chooser(decode, *todo.sources, cost=cost).weigh(now, todo, decode)[0]


def remote_cost(cost: CostModel, decode: Endpoint, prefill: Endpoint, todo: Todo) -> Option:
    """What it costs if the prompt is computed elsewhere."""
    others = [source for source in todo.sources if source is not decode]
    return Chooser(decode, prefill, *others, cost=cost).weigh(0.0, todo, decode, prefill)[0]


def prefill_cost(cost: CostModel, now: float, worker: Endpoint, todo: Todo) -> Option:
    """What a prefill worker's part costs."""
    decode = endpoint("decode-99")
    chooser = Chooser(decode, worker, *todo.sources, cost=cost)
    found = chooser.weigh(now, todo, decode, worker)[1]
    assert found is not None
    return found
