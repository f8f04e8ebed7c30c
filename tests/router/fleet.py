"""Workers that have told their rates, what they hold, and a choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.node import NodeId
from engine.stats import Role
from router.cost import CostModel
from router.endpoint import Endpoint
from router.fleet import Fleet, decode_busy, prefill_busy
from router.placement import Work
from router.policy import Choice, Policy, Question
from router.prefix_index import NOTHING, Held
from tests.router.script import worker_info, worker_stats

STATS = worker_stats("", prefill_tokens_per_s=1000.0, decode_step_s=0.01)


def endpoint(name: str, *, info: dict[str, object] | None = None, **stats: object) -> Endpoint:
    """A worker that has told its rates, and `stats`."""
    made = Endpoint(worker_info(name, **{"num_blocks": 1000, **(info or {})}), heard_at=0.0)
    told = {"worker": name, "num_free_blocks": made.info.num_blocks, **stats}
    made.observe(0.0, replace(STATS, **told))  # type: ignore[arg-type]
    return made


def on(device: int = 0, host: int = 0, disk: int = 0) -> Held:
    """What a worker holds and has said so."""
    return Held(device, host, disk, said=device + host + disk)


class Found:
    """What a lookup has found, in tokens: the test's workers have blocks of one size."""

    def __init__(self, held: Mapping[NodeId, Held]) -> None:
        self.by_worker = held

    def held(self, endpoint: Endpoint) -> Held:
        return self.by_worker.get(endpoint.worker, NOTHING)


class Asked(Work):
    """`Work` in which what is held is counted in tokens already."""

    def held_by(self, endpoint: Endpoint) -> Held:
        return self.holdings.held(endpoint)


def work(
    num_tokens: int,
    output_tokens: float = 100.0,
    lenders: tuple[Endpoint, ...] = (),
    **cached: int | Held,
) -> Work:
    """`cached`: tokens by worker, of its device where it is a number."""
    held = {
        name.replace("_", "-"): on(tokens) if isinstance(tokens, int) else tokens
        for name, tokens in cached.items()
    }
    return Asked(num_tokens, Found(held), output_tokens, lenders)


class Chooser:
    """A policy over fleets of these workers, whose order follows each choice."""

    def __init__(self, *workers: Endpoint, policy: str = "prefix", name: str = "") -> None:
        self.cost = CostModel()
        self.policy = Policy(policy, self.cost)
        self.fleets = {
            Role.DECODE: Fleet(name, decode_busy),
            Role.PREFILL: Fleet(name, prefill_busy),
        }
        for worker in workers:
            self.fleets[worker.info.role].add(0.0, worker)

    def choose(self, todo: Work, *, now: float = 0.0, sticky: bytes = b"r") -> Choice:
        question = Question(
            now=now,
            work=todo,
            decodes=self.fleets[Role.DECODE],
            prefills=self.fleets[Role.PREFILL],
            usable=lambda worker: worker.usable(now, 1000),
            holders=lambda fleet: holders(fleet, todo),
            sticky=lambda: sticky,
        )
        choice = self.policy.choose(question)
        assert choice is not None
        for worker in (choice.decode, choice.prefill):
            if worker is not None:
                self.fleets[worker.info.role].update(now, worker)
        return choice


def holders(fleet: Fleet, todo: Work) -> Sequence[Endpoint]:
    """Of the prefix, most first."""
    found = [worker for worker in fleet if todo.held_by(worker).total]
    return sorted(found, key=lambda worker: -todo.held_by(worker).total)


def choose(todo: Work, *workers: Endpoint, policy: str = "prefix") -> Choice:
    return Chooser(*workers, policy=policy).choose(todo)


def names_of(choice: Choice) -> tuple[str, str | None]:
    return choice.decode.worker, choice.prefill.worker if choice.prefill else None
