"""What good streams notice of requests that make steps fail: real nodes over a real model, in one
process, with faults that one request brings.

    python -m benchmarks.isolation [--streams 12] [--tokens 60] [--output FILE]

One row for each kind of fault and number of bad requests: streams that failed or got other tokens
than without, their longest silence after the first token, workers that ended, and how the bad ones
were refused.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.table import Table

from benchmarks.report import make_console, write_json
from kvrelay.engine.config import EngineSection
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.model.sampling import sampler
from kvrelay.engine.model.sampling.grammar import Grammars
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step
from tests.support.local import Completion, LocalCluster

BAD = 666  # the seed of a bad request
AFTER = 5  # tokens, from which on it fails
NAN = {5: float("nan")}
KINDS = {
    "grammar": {"grammar": "start: /[a-z ]*/\n"},
    "sampling": {"logit_bias": {1: 0.1}},
    "NaN logits": {"logit_bias": NAN},
    "step": {},
}
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    num_bad: int
    failed: int  # good streams
    altered: int
    silence_s: float
    workers_ended: int
    refusals: dict[str, int]  # reason -> bad requests


def _is_bad(seq: ScheduledSeq) -> bool:
    is_late = len(seq.context) - seq.num_prompt_tokens >= AFTER
    return seq.sample and seq.sampling.seed == BAD and is_late


@contextmanager
def faults(kind: str) -> Iterator[None]:
    """While it lasts, bad requests raise in the part of a step that `kind` says."""
    follow, edit, run_pass = Grammars._follow, sampler.edit, ModelRunner._run

    def failing_follow(self: Grammars, seq: ScheduledSeq) -> None:
        if kind == "grammar" and _is_bad(seq):
            raise ValueError("Invalid buffer size")
        follow(self, seq)

    def failing_edit(row: Any, seq: ScheduledSeq, window: int) -> None:
        if kind == "sampling" and _is_bad(seq):
            raise OverflowError("int too large to convert")
        edit(row, seq, window)

    def failing_pass(self: ModelRunner, step: Step, *rest: Any) -> Any:
        if kind == "step" and any(map(_is_bad, step.seqs)):
            raise RuntimeError("shape mismatch")
        return run_pass(self, step, *rest)

    with (
        patch.object(Grammars, "_follow", failing_follow),
        patch.object(sampler, "edit", failing_edit),
        patch.object(ModelRunner, "_run", failing_pass),
    ):
        yield


def prompts(count: int) -> list[list[int]]:
    return [[(37 * i + 11 * j) % 4000 + 100 for j in range(30 + 5 * i)] for i in range(count)]


def measure(cluster: LocalCluster, kind: str, num_bad: int, good: list[Completion]) -> Outcome:
    """`good`: what the good streams say without bad ones."""
    plain = SamplingParams(max_tokens=len(good[0].tokens), temperature=0.0)
    bad = replace(plain, seed=BAD, **KINDS[kind])  # type: ignore[arg-type]
    with faults(kind):
        futures = [cluster.submit(prompt, plain) for prompt in prompts(len(good))]
        poison = [cluster.submit([7 + number] * 20, bad) for number in range(num_bad)]
        answers = [future.result(TIMEOUT_S) for future in futures]
        refused = [future.result(TIMEOUT_S).failed for future in poison]
    cluster.wait_idle()
    gaps = [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.arrived_at, answer.arrived_at[1:], strict=False)
    ]
    return Outcome(
        kind,
        num_bad,
        failed=sum(answer.failed is not None for answer in answers),
        altered=sum(a.tokens != b.tokens for a, b in zip(answers, good, strict=True)),
        silence_s=max(gaps),
        workers_ended=len(cluster.host.failed),
        refusals=dict(Counter("none" if r is None else str(r.reason) for r in refused)),
    )


def run(
    model: Path, streams: int, tokens: int, kinds: Sequence[str], counts: Sequence[int]
) -> list[Outcome]:
    """Measures each kind of fault and number of bad requests, on one prefill and two decode
    workers."""
    with LocalCluster(model, prefill=1, decode=2, engine=EngineSection(threads=1)) as cluster:
        plain = SamplingParams(max_tokens=tokens, temperature=0.0)
        good = cluster.generate(prompts(streams), plain)
        return [measure(cluster, kind, count, good) for kind in kinds for count in counts]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isolation", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    asked = parser.parse_args()
    model = resolve_model(asked.model, progress=lambda text: print(text, file=sys.stderr))
    found = run(model, asked.streams, asked.tokens, asked.kinds, (0, 1, 2, 4))
    table = Table("fault", "bad", "failed", "altered", "silence s", "workers ended", "refusals")
    for each in found:
        refusals = ", ".join(f"{count} {reason}" for reason, count in each.refusals.items())
        counts = map(str, (each.num_bad, each.failed, each.altered))
        table.add_row(
            each.kind, *counts, f"{each.silence_s:.2f}", str(each.workers_ended), refusals
        )
    make_console().print(table)
    write_json(asked.output, {"outcomes": [asdict(each) for each in found]})


if __name__ == "__main__":
    main()
