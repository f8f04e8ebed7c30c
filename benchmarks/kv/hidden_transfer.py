"""How much of a long prompt's TTFT is owed to moving its KV between the pools.

python -m benchmarks.kv.hidden_transfer [--tokens 4000] [--rounds 3] [--json OUT]

One prefill worker, one decode worker, one request at a time. What is told are the request's own
phases, from the metrics that every request adds to: `prefill` ends with the first token; `transfer`
is from then until the decode worker has read, checked and confirmed the last blocks and could take
its first step; `first_decode` is that step.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import click
import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.report import make_console, number_table, write_json
from benchmarks.serving.first_light import MODEL, time_one
from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.lab.bench.load import LoadSpec, make_prompts

PHASES = ("prefill", "ttft", "transfer", "first_decode")


def phase_sums(url: str) -> dict[str, float]:
    """Seconds of all requests so far, by phase."""
    text = httpx.get(f"{url}/metrics", timeout=10, auth=OwnKey()).text
    sums = dict.fromkeys(PHASES, 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "kvrelay_phase_seconds_sum" and sample.labels["phase"] in sums:
                sums[sample.labels["phase"]] = sample.value
            elif sample.name == "kvrelay_ttft_seconds_sum":
                sums["ttft"] = sample.value
    return sums


@click.command()
@click.option("--tokens", default=4000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(tokens: int, rounds: int, json_path: Path | None) -> None:
    """The phases of prompts that go through both pools."""
    console = make_console()
    seen: list[dict[str, float]] = []
    settings = {"router.policy": "round_robin"}  # hands every prompt over
    with Served(settings) as server, console.status("prompts") as status:
        time_one(server.url, "Hello")
        for i in range(rounds):
            status.update(f"prompt {i + 1} of {rounds}")
            spec = LoadSpec(server.url, MODEL, 1, input_len=tokens, seed=500 + i)
            before = phase_sums(server.url)
            time_one(server.url, make_prompts(spec)[0])
            after = phase_sums(server.url)
            seen.append({phase: after[phase] - before[phase] for phase in PHASES})
    title = f"prompts of {tokens:,} tokens, 1 + 1 workers; ms"
    table = number_table("prompt", *PHASES, "transfer / TTFT", title=title)
    for i, phases in enumerate(seen, start=1):
        cells = [f"{phases[phase] * 1e3:,.1f}" for phase in PHASES]
        table.add_row(str(i), *cells, f"{phases['transfer'] / phases['ttft']:.2%}")
    console.print(table)
    share = statistics.median(phases["transfer"] / phases["ttft"] for phases in seen)
    console.print(f"median share of the transfer (wanted: below 5 %): {share:.2%}")
    write_json(json_path, {"tokens": tokens, "phases_s": seen, "share": share})


if __name__ == "__main__":
    main()
