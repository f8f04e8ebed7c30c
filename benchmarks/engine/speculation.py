"""What draft tokens gain, by where they come from: workers in turns, one without drafts, one with
n-grams, and with `--drafter` one that also has a drafter.

`python -m benchmarks.engine.speculation`: answers to requests whose texts repeat themselves much
(code that is edited, data in another form) and little (a story), one request at a time and several
at once. Ratios are to the worker without drafts: of times that followed each other, so that what
else the machine does matters less. The tokens of all have to be the same, or it ends with 1.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click
from rich.progress import Progress
from rich.table import Table

from benchmarks.engine.fp8 import prose
from benchmarks.report import make_console, write_json
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import load_config
from kvrelay.cluster.prepare import prepare_model
from kvrelay.engine.model import runner
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL
from kvrelay.engine.model.cpu import step as cpu_step
from kvrelay.engine.model.drafter import Drafter, open_drafter
from kvrelay.engine.model.step_executor import StepExecutor
from kvrelay.engine.request import SamplingParams
from kvrelay.lab.bench import engine as bench
from kvrelay.lab.bench.engine import Generated, LoneWorker

COUNTERS = (
    "draft_tokens",
    "draft_tokens_accepted",
    "drafter_tokens",
    "drafter_tokens_accepted",
)
SPREAD = 1_000_003  # a prime: which drafts are wrong, by their positions
DEFAULT_JSON = Path(__file__).parents[1] / "results" / "speculation.json"
BLOCK_SIZE = 16
DRAFTS = 7
WITHOUT, NGRAMS, DRAFTER = "no drafts", "n-grams", "drafter"
PEOPLE = "Ann, 31, Oslo\nBob, 45, Rome\nCid, 28, Bonn\nDan, 39, Lyon\nEve, 52, Kyiv\nFay, 23, Bern"


@contextmanager
def cpu_time() -> Iterator[None]:
    """Times are of this process' CPU, for machines that others use, too: what a pass takes, as the
    planner learns it, and what is reported. Meant for one thread, as those that wait for others
    take CPU time. Passes in a row end by their number alone."""
    clock, begin = time.process_time, StepExecutor.__init__

    def timed(self: StepExecutor, *args: Any, **options: Any) -> None:
        begin(self, *args, **options, clock=clock)

    with (
        patch.object(StepExecutor, "__init__", timed),
        patch.object(runner, "perf_counter", clock),
        patch.object(bench, "time", SimpleNamespace(monotonic=time.monotonic, perf_counter=clock)),
        patch.object(cpu_step, "BURST_S", 3600.0),
    ):
        yield


def requests() -> dict[str, str]:
    """What is asked, by kind."""
    code = Path(__file__).read_text(encoding="utf-8")
    return {
        "question": "What is the capital of France, and why is it famous?",
        "story": "Write a short story about a lighthouse keeper and a storm.",
        "list": "List twenty animals with one sentence about each.",
        "quotes": f"Quote the important sentences of this text:\n\n{prose()[:3500]}",
        "code": f"Rename the function `main` and print the whole file again:\n\n{code[:2500]}",
        "data": f"Turn this into JSON objects with keys name, age and city:\n\n{PEOPLE}",
    }


@dataclass(frozen=True, slots=True)
class Took:
    """What answers took that were asked for at once, from when all had their first token."""

    tokens_per_s: float  # until seven tenths of all tokens were there: then some may be left alone
    token_s: float  # for a token of an answer, in the mean of all
    num_tokens: int

    @staticmethod
    def of(answers: Sequence[Generated]) -> Took:
        began = max(answer.arrived_at[0] for answer in answers)
        later = [[at for at in answer.arrived_at if at > began] for answer in answers]
        at = sorted(moment for each in later for moment in each)
        count = max(1, len(at) * 7 // 10)
        return Took(
            tokens_per_s=count / (at[count - 1] - began),
            token_s=statistics.mean((each[-1] - began) / len(each) for each in later if each),
            num_tokens=sum(len(answer.tokens) for answer in answers),
        )


class Likely:
    """Makes a drafter as right as it is asked to be. It drafts as ever, and what it takes counts;
    but then each of its tokens is the right one with this probability, and else is not. So what a
    better head would gain can be measured without one. Drafts of answers that are not known yet are
    left as they are."""

    def __init__(self, share: float) -> None:
        self._share, self._answers = share, dict[tuple[int, ...], list[int]]()

    def open(self, *args: Any) -> Drafter:
        """Opens one that is right so often."""
        drafter = open_drafter(*args)
        self._draft, drafter.draft = drafter.draft, self.draft  # type: ignore[method-assign]
        return drafter

    def learn(self, prompts: Sequence[Sequence[int]], answers: Sequence[Generated]) -> None:
        found = zip(prompts, answers, strict=True)
        self._answers = {tuple(prompt): answer.tokens for prompt, answer in found}

    def draft(self, seqs: Sequence[Any], tables: Any) -> list[list[int]]:
        drafts = self._draft(seqs, tables)
        for seq, draft in zip(seqs, drafts, strict=True):
            answer = self._answers.get(tuple(seq.context[: seq.num_prompt_tokens]), ())
            at = len(seq.context) - seq.num_prompt_tokens
            for index, token in enumerate(answer[at : at + len(draft)]):
                is_right = (at + index) * SPREAD % 1009 < self._share * 1009
                draft[index] = token if is_right else token ^ 1
        return drafts


class Workers:
    """By where their drafts come from. Owned by a measurement, from `with` to its end."""

    def __init__(
        self,
        model: str,
        quantization: str,
        drafter: str,
        most: int,
        max_tokens: int,
        acceptance: float,
    ) -> None:
        self._likely = Likely(acceptance)
        self._stack = ExitStack()
        self.workers: dict[str, LoneWorker] = {}
        threads = len(os.sched_getaffinity(0))
        for name in (WITHOUT, NGRAMS, DRAFTER)[: 3 if drafter else 2]:
            overrides = {
                "model.name": model,
                "model.quantization": quantization,
                "model.device": "cpu",
                "engine.block_size": BLOCK_SIZE,
                "engine.num_blocks": most * (2_000 + max_tokens) // BLOCK_SIZE,
                "engine.num_speculative_tokens": 0 if name == WITHOUT else DRAFTS,
                "engine.drafter": drafter if name == DRAFTER else "",
                "engine.threads": threads,
            }
            config = load_config(None, overrides)
            ready = prepare_model(config, 1, lambda _: None)
            self.tokenizer = Tokenizer(ready.path)
            opened = self._likely.open if acceptance else open_drafter
            with patch.object(runner, "open_drafter", opened):
                self.workers[name] = self._stack.enter_context(LoneWorker(config, ready))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts that come again are kept apart."""
        again: Counter[str] = Counter()
        asked = []
        for text in texts:
            content = f"{text}\n({again[text]})" if again[text] else text
            again[text] += 1
            chat = [{"role": "user", "content": content}]
            asked.append(self.tokenizer.chat_prompt(chat).tokens)
        return asked

    def ask(self, prompts: list[list[int]], sampling: SamplingParams, rounds: int) -> Row:
        """In turns, once more than `rounds` says: the first is not counted."""
        took: dict[str, list[Took]] = {name: [] for name in self.workers}
        said: dict[str, list[list[int]]] = {}
        before = {name: self._drafts(name) for name in self.workers}
        for turn in range(rounds + 1):
            for name in list(self.workers)[:: 1 if turn % 2 else -1]:
                answers = self.workers[name].generate(prompts, sampling)
                if name == WITHOUT:
                    self._likely.learn(prompts, answers)
                said[name] = [answer.tokens for answer in answers]
                took[name] += [Took.of(answers)] * (turn > 0)
        drafts = {name: self._drafts(name) - before[name] for name in self.workers}
        same = all(each == said[WITHOUT] for each in said.values())
        return Row(sum(map(len, prompts)), took, drafts, same)

    def _drafts(self, name: str) -> Counter[str]:
        counters = self.workers[name].node.core.counters
        return Counter({key: int(counters.get(key, 0)) for key in COUNTERS})


@dataclass(frozen=True, slots=True)
class Row:
    num_prompt_tokens: int
    took: dict[str, list[Took]]
    drafts: dict[str, Counter[str]]
    same: bool

    def found(self) -> dict[str, Any]:
        """Medians; ratios above 1 speak for drafts."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.took[WITHOUT][0].num_tokens,
            "same_tokens": self.same,
            "workers": {name: self._of(name) for name in self.took},
        }

    def _of(self, name: str) -> dict[str, Any]:
        pairs = [*zip(self.took[name], self.took[WITHOUT], strict=True)]
        drafts = self.drafts[name]
        return {
            "tokens_per_s": round(statistics.median(own.tokens_per_s for own, _ in pairs), 1),
            "ms_per_token": round(1e3 * statistics.median(own.token_s for own, _ in pairs), 2),
            "throughput_ratio": round(
                statistics.median(own.tokens_per_s / base.tokens_per_s for own, base in pairs), 2
            ),
            "latency_ratio": round(
                statistics.median(base.token_s / own.token_s for own, base in pairs), 2
            ),
            **{key: drafts[key] for key in COUNTERS},
        }


@click.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
@click.option("--quantization", default="none", show_default=True)
@click.option("--drafter", default="", help="A head's folder, or a smaller model.")
@click.option("--kinds", default="", help="Only these requests, with commas; else all.")
@click.option("--at-once", default="4,16", show_default=True, help="Requests of mixed kinds.")
@click.option("--max-tokens", default=200, show_default=True)
@click.option(
    "--acceptance",
    default=0.0,
    help="As if the drafter's tokens were right with this probability; 0: as they are.",
)
@click.option("--cpu-time", "by_cpu", is_flag=True, help="Times are of the CPU: with one thread.")
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), default=DEFAULT_JSON)
def main(
    model: str,
    quantization: str,
    drafter: str,
    kinds: str,
    at_once: str,
    max_tokens: int,
    acceptance: float,
    by_cpu: bool,
    temperature: float,
    rounds: int,
    path: Path,
) -> None:
    """Compare, and print a table."""
    console = make_console()
    batches = [int(count) for count in at_once.split(",") if count]
    texts = requests()
    if unknown := {*filter(None, kinds.split(","))} - {*texts}:
        raise click.BadParameter(f"--kinds {', '.join(unknown)}: there are {', '.join(texts)}")
    asked = {name: [text] for name, text in texts.items() if not kinds or name in kinds.split(",")}
    asked |= {f"{n} at once": list(islice(cycle(texts.values()), n)) for n in batches}
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=5)
    rows: dict[str, dict[str, Any]] = {}
    with (
        cpu_time() if by_cpu else nullcontext(),
        Workers(
            model, quantization, drafter, max([1, *batches]), max_tokens, acceptance
        ) as workers,
        Progress(console=console, transient=True) as progress,
    ):
        for name, each in progress.track(asked.items(), description="answers"):
            rows[name] = workers.ask(workers.prompts(each), sampling, rounds).found()
    title = f"{model}, weights {quantization}, temperature {temperature:g}"
    title += ", CPU time" if by_cpu else ""
    title += f", drafter made right at {acceptance:.0%}" if acceptance else ""
    table = Table("", "in", "out", "drafts", "tokens/s", "ratio", "ms a token", title=title)
    for column in ("ratio", "drafts", "accepted", "of the drafter", "accepted", "same"):
        table.add_column(column)
    for name, row in rows.items():
        for drafts, own in row["workers"].items():
            cells = [row["prompt_tokens"], row["output_tokens"], drafts, own["tokens_per_s"]]
            cells += [own["throughput_ratio"], own["ms_per_token"], own["latency_ratio"]]
            cells += [*(own[key] for key in COUNTERS), "yes" if row["same_tokens"] else "NO"]
            table.add_row(name, *map(str, cells))
    console.print(table)
    write_json(path, {"title": title, "max_tokens": max_tokens, "rounds": rounds, "rows": rows})
    sys.exit(0 if all(row["same_tokens"] for row in rows.values()) else 1)


if __name__ == "__main__":
    main()
