"""The sessions of a trace through `kvrelay replay` and through Dynamo's simulator of itself.

`PYTHONPATH=DIR python -m benchmarks.agents.dynamo PATH [--sessions 24] [--host-gib 64] [--json F]`

DIR has `ai-dynamo-runtime` (1.6.1), installed there without its dependencies. Both get the same
device memory, link rates and sessions, and as timing the polynomials of Dynamo's simulated workers,
which are measured first: TTFT of prompts alone, and ITL by how full the pool is.

Its closed loop with prefill and decode workers knows turns of one session, and no answers in the
next prompt. So for both each agent, subagents too, is a session, whose first turn comes at its
time, and every turn is another `--think-scale` after the one before; tokens of answers are new to
both. Its first token comes from the decode worker; `--prefill 0` has one pool, on both sides.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.table import Table

from benchmarks.report import json_option, make_console, write_json
from kvrelay.lab.replay.agents import Draw
from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.readers import read_trace
from kvrelay.lab.replay.replay import ReplayResult, replay
from kvrelay.lab.replay.trace import Trace, TraceRequest
from kvrelay.lab.timing.roofline import parse_roofline
from kvrelay.lab.timing.timing import Polynomial

Figures = dict[str, Any]
GIB = 1 << 30
BLOCK = 64  # tokens, as in the published sessions; ours are of `--block-size`
MAX_SEQS, MAX_BATCHED_TOKENS = 64, 8192
PROBED = tuple(range(512, MAX_BATCHED_TOKENS + 1, 512))  # tokens of prompts that are timed alone
FILLS = tuple(share / 20 for share in range(1, 19))  # shares of the pool that a timed step uses


def by_agents(trace: Trace) -> Trace:
    """As both simulators can replay it: each agent is a session, a chain of turns."""
    last: dict[str, int] = {}
    names: dict[int, str] = {}  # by request: its agent
    requests: list[TraceRequest] = []
    for number, request in enumerate(trace.requests):
        own = [
            n for n in request.after if request.turn and trace.requests[n].turn + 1 == request.turn
        ]
        own = [n for n in own if last.get(names[n]) == n]
        name = names[own[0]] if own else f"{request.session} {number}"
        names[number], last[name] = name, number
        requests.append(replace(request, session=name, after=tuple(own[:1]), turn=request.turn))
    return replace(trace, requests=tuple(requests), answers={})


def rows(trace: Trace) -> Iterable[Figures]:
    """Mooncake's lines, with the delays of a closed loop."""
    for request in trace.requests:
        start = (
            {"delay": 1e3 * request.think_s} if request.after else {"timestamp": 1e3 * request.at_s}
        )
        yield start | {
            "session_id": request.session,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": list(request.block_ids),
        }


class Dynamo:
    """Its simulator, with workers of one size."""

    def __init__(self, config: ReplayConfig) -> None:
        os.environ.setdefault("DYN_LOG", "error")
        self._core: Any = import_module("dynamo._core")
        self._config = config

    def run(
        self, lines: Iterable[Figures], mode: str = "kv_router", **options: Any
    ) -> list[Figures]:
        """Returns what came of each request."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.jsonl"
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            found = self._core.run_mocker_trace_replay(
                [str(path)],
                trace_block_size=BLOCK,
                router_mode=mode,
                capture_per_request=True,
                **(options or self._pools()),
            )
        return list(found.per_request)

    def timing(self) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """Coefficients of its polynomials: milliseconds by tokens, and by the used share."""
        one: Figures = {"extra_engine_args": {"engine": self._engine()}, "num_workers": 1}
        pool = self._config.num_blocks * self._config.block_size
        sizes = [*PROBED, *(int(share * pool) for share in FILLS)]
        lines, first = [], 0
        for number, tokens in enumerate(sizes):
            ids = list(range(first, first + -(-tokens // BLOCK)))
            first += len(ids)
            lines.append(
                {
                    "timestamp": 1e6 * number,
                    "input_length": tokens,
                    "output_length": 16,
                    "hash_ids": ids,
                }
            )
        found = sorted(self.run(lines, **one), key=lambda each: float(each["arrival_time_ms"]))
        short, long = found[: len(PROBED)], found[len(PROBED) :]
        prefill = np.polyfit(PROBED, [each["ttft_ms"] for each in short], 2)
        used = [(each["input_length"] + 8) / pool for each in long]
        decode = np.polyfit(used, [each["itl_ms"] for each in long], 2)
        return tuple(map(float, prefill)), tuple(map(float, decode))  # type: ignore[return-value]

    def _pools(self) -> Figures:
        config = self._config
        if not config.num_prefill:
            one = {"engine": self._engine()}
            return {"extra_engine_args": one, "num_workers": config.num_decode}
        return {
            "prefill_engine_args": {"engine": self._engine() | {"worker_type": "prefill"}},
            "decode_engine_args": {"engine": self._engine() | {"worker_type": "decode"}},
            "num_prefill_workers": config.num_prefill,
            "num_decode_workers": config.num_decode,
        }

    def _engine(self) -> Figures:
        config, links = self._config, self._config.timing.links
        engine: Figures = {
            "num_gpu_blocks": config.num_blocks * config.block_size // BLOCK,
            "block_size": BLOCK,
            "max_num_seqs": MAX_SEQS,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            "kv_transfer_bytes_per_token": links.bytes_per_token,
            "kv_transfer_bandwidth": links.peer_bytes_per_s / 1e9,
            "kv_transfer_timing_mode": "destination_missing",
        }
        if config.num_host_blocks:
            rate = links.host_bytes_per_s / 1e9
            engine["kv_cache_bytes_per_token"] = links.bytes_per_token
            engine["native_host_offload"] = {
                "scope": "dp_rank_local",
                "num_host_blocks": config.num_host_blocks * config.block_size // BLOCK,
                "d2h_bandwidth_gbps": rate,
                "h2d_bandwidth_gbps": rate,
            }
        return engine


def of_dynamo(found: Sequence[Figures], trace: Trace) -> Figures:
    assert len(found) == len(trace.requests), "a request is missing"
    later = [each for each in found if each["turn_index"]]
    held = [each["source_held_ms"] for each in later]
    reused = sum(each["reused_input_tokens"] for each in found)
    made = {
        "requests": len(found),
        "ttft_ms": _spread([each["ttft_ms"] for each in later]),
        "reuse": reused / sum(each["input_length"] for each in found),
    }
    if all(each is not None for each in held):
        ready = [each["source_held_ms"] - each["arrival_time_ms"] for each in later]
        made["prompt_computed_ms"] = _spread(ready)
    return made


def of_ours(result: ReplayResult) -> Figures:
    done = [each for each in result.samples if each.ttft_s is not None]
    later = [each for each in done if each.turn]
    return {
        "requests": len(done),
        "ttft_ms": _spread([1e3 * (each.ttft_s or 0.0) for each in later]),
        "second_token_ms": _spread([1e3 * (each.second_s or each.ttft_s or 0.0) for each in later]),
        "reuse": sum(sum(each.cached.values()) for each in done)
        / sum(each.input_length for each in done),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"mean": float(np.mean(values)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def table(found: dict[str, Figures], title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    for column in ("later turns", "mean, ms", "p50", "p90", "p99", "reuse"):
        shown.add_column(column, justify="left" if column == "later turns" else "right")
    for name, figures in found.items():
        for kind in ("ttft_ms", "prompt_computed_ms", "second_token_ms"):
            if kind in figures:
                of = figures[kind]
                times = (f"{of[each]:,.0f}" for each in ("mean", "p50", "p90", "p99"))
                what = kind.removesuffix("_ms").replace("_", " ").replace("ttft", "TTFT")
                shown.add_row(f"{name}: {what}", *times, f"{figures['reuse']:.1%}")
    return shown


@click.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option("--sessions", type=click.IntRange(1), default=24, show_default=True)
@click.option("--start-rate", type=float, default=0.1, show_default=True, help="Sessions a second.")
@click.option("--think-scale", type=float, default=1.0, show_default=True)
@click.option("--max-input", type=click.IntRange(1), default=200_000, show_default=True)
@click.option("--prefill", type=click.IntRange(0), default=4, show_default=True)
@click.option("--decode", type=click.IntRange(1), default=4, show_default=True)
@click.option("--blocks", type=click.IntRange(1), default=800, show_default=True)
@click.option("--block-size", type=click.IntRange(BLOCK), default=512, show_default=True)
@click.option("--host-gib", type=float, default=0.0, show_default=True, help="Of each worker.")
@click.option("--timing", default="h100:llama-3-8b", show_default=True, help="Whose links.")
@click.option("--seed", type=int, default=0, show_default=True)
@json_option()
def main(
    path: Path, sessions: int, start_rate: float, think_scale: float, max_input: int,
    prefill: int, decode: int, blocks: int, block_size: int, host_gib: float, timing: str,
    seed: int, json_path: Path | None,
) -> None:  # fmt: skip
    """Replay both, show and write."""
    console = make_console()
    draw = Draw(sessions, start_rate, think_scale, max_input, seed=seed)
    trace = by_agents(read_trace(path, None, draw))
    links = parse_roofline(timing).links
    host = int(host_gib * GIB // (links.bytes_per_token * block_size))
    config = ReplayConfig(
        timing=parse_roofline(timing), num_prefill=prefill, num_decode=decode, num_blocks=blocks,
        block_size=block_size, num_host_blocks=host, seed=seed,
    )  # fmt: skip
    dynamo = Dynamo(config)
    prefill_ms, decode_ms = dynamo.timing()
    config = replace(config, timing=Polynomial(prefill_ms, decode_ms, "dynamo", links))
    found: dict[str, Figures] = {}
    for mode in ("kv_router", "round_robin"):
        found[f"Dynamo, {mode}"] = of_dynamo(dynamo.run(rows(trace), mode), trace)
    found["KVRelay"] = of_ours(replay(trace, config))
    console.print(
        table(found, f"{trace.name}, {prefill} + {decode} workers, {host_gib:g} GiB of host")
    )
    ratio = found["KVRelay"]["ttft_ms"]["mean"] / found["Dynamo, kv_router"]["ttft_ms"]["mean"]
    console.print(f"mean TTFT of later turns: {ratio:.2f} x that of Dynamo's KV router")
    if json_path is not None:
        timing_ms = {"prefill_ms": prefill_ms, "decode_ms": decode_ms}
        write_json(json_path, {"timing": timing_ms, "ratio": ratio, "results": found})


if __name__ == "__main__":
    main()
