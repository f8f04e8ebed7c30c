"""Tokens that are computed where layers keep windows or states and a pool is too small for all.

`python -m benchmarks.kv.parting`: one worker's real node in virtual time, with a model that is its
groups of layers, without weights. Traffic: sessions of several turns that begin with one of a few
system prompts (`chat`), whose answers are left out of the next turn (`thinking`), and that try each
turn three times (`forks`). Half of the rounds fill the pool, and are not counted.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvrelay.cluster.roles import make_worker
from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.spec import STATE_WINDOW
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.messages import TokenDeltas
from kvrelay.engine.node import Send
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import RECOMPUTED, Role
from kvrelay.engine.step import Execute, Sampled, Step, StepDone

Model = tuple[int, tuple[int, ...]]  # block size, and a window for each group (`KVSpec`)
MODELS: dict[str, Model] = {
    "qwen3-next": (96, (0, *(STATE_WINDOW,) * 36)),
    "gemma3-270m": (16, (0, *(512,) * 5)),
    "falcon-h1": (64, (0, *(STATE_WINDOW,) * 4)),
}
POOLS = {  # blocks; the last holds all
    "qwen3-next": (1500, 2500, 4000, 6000, 10**6),
    "gemma3-270m": (5000, 9000, 14000, 10**6),
    "falcon-h1": (700, 1200, 1800, 10**6),
}
STEP_S = 0.01
NUM_SESSIONS, WIDTH = 24, 4  # WIDTH of them at once
KINDS: dict[str, dict[str, Any]] = {
    "chat": {},
    "thinking": {"thinking": True},
    "forks": {"times": 3},
}


class Replay:
    """One worker whose model answers at random."""

    def __init__(self, model: Model, num_blocks: int, **settings: Any) -> None:
        block_size, windows = model
        usual = {"max_model_len": 16384, "max_num_batched_tokens": 512, "max_num_seqs": 8}
        self.config = WorkerConfig(
            node_id="worker",
            role=Role.DECODE,
            epoch=1,
            num_blocks=num_blocks,
            block_size=block_size,
            bytes_per_block=1 << 20,
            fingerprint=b"parting",
            group_windows=windows if len(windows) > 1 else (),
            has_states=STATE_WINDOW in windows,
            num_speculative_tokens=0,
            guard=False,
            **usual | settings,
        )
        self.worker = make_worker(self.config)
        self.core = self.worker.core
        self.now = 0.0
        self._queue: deque[StepDone] = deque()
        self._answers: dict[str, list[int]] = {}
        self._perform(self.worker.start(0.0))

    def submit(
        self, name: str, prompt: list[int], count: int, retention: Retention | None = None
    ) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0.0)
        tokens, timeout_s = tuple(prompt), 1e9
        self._deliver(
            Decode(name, sampling, 1, "router", tokens, len(tokens), timeout_s, retention=retention)
        )

    def run(self) -> dict[str, list[int]]:
        """To the end of all requests; returns their answers."""
        while self._queue:
            self.now += STEP_S
            self._deliver(self._queue.popleft())
        answers, self._answers = self._answers, {}
        return answers

    def _deliver(self, message: Any) -> None:
        self._perform(self.worker.receive(self.now, message))

    def _perform(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Execute):
                self._queue.append(self._done(effect.step))
            elif isinstance(effect, Send) and isinstance(effect.message, TokenDeltas):
                for delta in effect.message.deltas:
                    self._answers.setdefault(delta.request_id, []).extend(delta.tokens)

    def _done(self, step: Step) -> StepDone:
        sampled = []
        for seq in step.seqs:
            assert seq.draft_tokens == []
            more = tuple(_answer(seq, k) for k in range(1, step.repeats))
            sampled.append(Sampled(_answer(seq, 0), None, more) if seq.sample else None)
        return StepDone(step.step_id, sampled, [0] * len(step.checksum_blocks), STEP_S)


def _answer(seq: Any, more: int) -> int:
    return 7 + (seq.start + len(seq.tokens) + more) % 1000


def draw(rng: Random, count: int) -> list[int]:
    return [rng.randrange(2000, 30000) for _ in range(count)]


class Traffic:
    """`sessions` are the tokens of each so far, the last answer among them."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.systems = [draw(self.rng, self.rng.randint(800, 2400)) for _ in range(6)]
        self.sessions: list[list[int]] = [[] for _ in range(NUM_SESSIONS)]

    def chat(self, replay: Replay, number: int, *, thinking: bool = False, times: int = 1) -> None:
        """One round: a turn of each of some sessions."""
        rng, chosen = self.rng, self.rng.sample(range(NUM_SESSIONS), WIDTH)
        for at in chosen:
            if not self.sessions[at] or len(self.sessions[at]) > 9000:
                # Beginnings are popular unequally.
                system = self.systems[min(rng.randrange(6), rng.randrange(6))]
                self.sessions[at] = [*system, *draw(rng, rng.randint(20, 300))]
            else:
                self.sessions[at] += draw(rng, rng.randint(20, 500))
            for k in range(times):
                replay.submit(f"{number}-{at}-{k}", self.sessions[at], rng.randint(30, 200))
        answers = replay.run()
        for at in chosen:
            answer = answers[f"{number}-{at}-0"]
            # What a model thinks is not in the next prompt.
            self.sessions[at] += draw(rng, 60) if thinking else answer


def play(model: str, num_blocks: int, kind: str, rounds: int, seed: int) -> dict[str, float]:
    """What the worker has counted in the second half."""
    replay, traffic = Replay(MODELS[model], num_blocks), Traffic(seed)
    warm: dict[str, float] = {}
    for number in range(2 * rounds):
        if number == rounds:
            warm = dict(replay.core.counters)
        traffic.chat(replay, number, **KINDS[kind])
    assert replay.core.check_idle() == []
    counters = replay.core.counters
    return {name: counters[name] - warm.get(name, 0) for name in counters}


@click.command()
@click.option("--rounds", default=30, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)))
def main(rounds: int, seed: int, models: tuple[str, ...]) -> None:
    table = Table()
    for name in ("model", "traffic", "blocks", "tokens computed", "for want of windows or states"):
        table.add_column(name, justify="left" if name in ("model", "traffic") else "right")
    for model in models or MODELS:
        for kind in KINDS:
            for num_blocks in POOLS[model]:
                found = play(model, num_blocks, kind, rounds, seed)
                again = sum(n for name, n in found.items() if name.startswith(RECOMPUTED))
                computed = found["tokens_scheduled"]
                table.add_row(model, kind, f"{num_blocks:,}", f"{computed:,.0f}", f"{again:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
