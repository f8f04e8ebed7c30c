"""Which workers a choice looks at, and which of equally good ones it takes."""

from __future__ import annotations

from random import Random

import pytest

from kvrelay.engine.request import SamplingParams
from kvrelay.router.messages import Submit, WorkerUp
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.placement.work import Work
from kvrelay.router.router import Router
from tests.router.fleet import choose, endpoint, on, work
from tests.router.script import worker_info


def random_fleet(rng: Random) -> tuple[list[Endpoint], Work]:
    """Workers in every state, some of which hold some of the prompt."""
    weights = {
        "prompt_weights": (0.004, 0.35, 0.02, 0.06),
        "decode_weights": (0.008, 0.001, 0.01, 0.01),
    }
    size: dict[str, object] = {"num_blocks": 4000, "max_num_batched_tokens": 8192}
    workers, held, num_tokens = [], {}, rng.randint(100, 12_000)
    for role, count in (("decode", 40), ("prefill", 30)):
        for number in range(count):
            name = f"{role}-{number}"
            worker = endpoint(name, info=size, num_free_blocks=rng.randint(300, 4000), **weights)
            for request in range(rng.choice((0, 1, 3, rng.randint(0, 25)))):
                tokens = rng.choice((0, rng.randint(10, 9000)))
                worker.book(0.0, f"r{request}", tokens, rng.randint(1, 60), tokens * 1e-4)
            workers.append(worker)
            if rng.random() < 0.15:
                held[name.replace("-", "_")] = on(rng.randrange(num_tokens))
    return workers, work(num_tokens, output_tokens=rng.randint(5, 400), **held)


def test_looking_at_a_few_workers_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice among holders and idle workers against the choice among all of them."""
    chosen_s, best_s = [], []
    for seed in range(60):
        workers, todo = random_fleet(Random(seed))
        few = choose(todo, *workers)
        with monkeypatch.context() as patch:
            patch.setattr("kvrelay.router.placement.policy.NUM_HOLDERS", len(workers))
            patch.setattr("kvrelay.router.placement.policy.NUM_IDLE", len(workers))
            patch.setattr("kvrelay.router.placement.policy.MAX_TRIED", len(workers))
            every = choose(todo, *workers)
        assert len(few.decodes) < len(every.decodes)
        chosen_s.append(few.best.seconds.total)
        best_s.append(every.best.seconds.total)
    assert all(few_s >= every_s - 0.001 for few_s, every_s in zip(chosen_s, best_s, strict=True))
    assert sum(chosen_s) <= 1.02 * sum(best_s)


def test_routers_break_ties_differently() -> None:
    """Several routers that know the same must not send all that they have to one worker."""
    firsts = []
    for number in range(4):
        router = Router(f"router-{number}")
        for worker in range(16):
            router.receive(0.0, WorkerUp(worker_info(f"decode-{worker}")))
        submit = Submit("r", SamplingParams(max_tokens=8), "api", tuple(range(40)), 60.0)
        router.receive(0.0, submit)
        firsts.append(router.explain("r")[0].options.best.worker)
    assert len(set(firsts)) > 1, firsts
