"""`kvrelay chat` and `kvrelay status`: talk to a running server from the terminal.

Both are HTTP clients and know nothing of the server but its URL and a key. What goes wrong between
is said in one line, with a non-zero exit.

`/status` as tables for a terminal.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import click
import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrelay.cluster.cli.own_key import NOT_FOUND, OwnKey
from kvrelay.engine.stats import RECOMPUTED

_TIER_COLUMNS = {"num_host_blocks": "in host", "num_disk_blocks": "on disk"}
WORTH_TELLING = 1.02  # times smaller: pages that are not full take as much
_SIZE = "tensor_parallel_size"
_KINDS = {"full": "full attention", "window": "sliding window", "state": "states"}
_ROUTER_KEYS = ("num_live", "num_queued")
_MAX_LINKS = 8  # lines; the slowest are shown
_STATE_COLOURS = {
    "up": "green",
    "backoff": "yellow",
    "silent": "yellow",
    "draining": "yellow",
    "down": "red",
}


def status_table(status: dict[str, Any]) -> Group:
    """One row per worker, a row that sums them up, one per router, and what the router that was
    asked has served. Blocks are KV blocks."""
    several = [each["model"] for each in status.get("models", [])]
    table = Table(title=", ".join(several) or status.get("model"))
    table.add_column("worker")
    table.add_column("role")
    table.add_column("state")
    workers = status.get("workers", [])
    # Terminals are narrow: tiers that hold nothing have no column.
    tiers = [key for key in _TIER_COLUMNS if any(worker.get(key) for worker in workers)]
    names = ["blocks used", "cached", *(_TIER_COLUMNS[key] for key in tiers)]
    has_ranks = any(worker.get(_SIZE, 1) > 1 for worker in workers)
    versions = {(worker.get("model"), worker.get("weights")) for worker in workers}
    has_versions = len(versions) > len({model for model, _ in versions})
    if has_versions:
        table.add_column("weights")
    if has_ranks:
        table.add_column("ranks", justify="right")
    for name in (*names, "running", "waiting", "hit rate"):
        table.add_column(name, justify="right")
    for worker in workers:
        table.add_row(
            worker["worker"],
            worker["role"],
            _coloured(str(worker["state"])),
            *([worker.get("weights", "?")] if has_versions else []),
            *([str(worker.get(_SIZE, "?"))] if has_ranks else []),
            *_load([worker], worker, tiers),
        )
    if len(workers) > 1:
        table.add_section()
        table.add_row("all", *[""] * (2 + has_versions + has_ranks), *_load(workers, status, tiers))
    routers = status.get("routers")
    groups = [(worker, each) for worker in workers for each in worker.get("groups") or ()]
    models = status.get("models")
    parts = [models_table(models)] if models else []
    parts += [_routers_table(routers)] if routers else []
    if groups:
        parts.append(_groups_table(groups))
    links = [(worker["worker"], link) for worker in workers for link in worker.get("links", ())]
    if links:
        parts.append(_links_table(links))
    return Group(table, *parts, *_router_lines(status))


def models_table(models: list[dict[str, Any]]) -> Table:
    """One row per model: its workers, and what the router has of it."""
    table = Table()
    table.add_column("model")
    for name in ("workers up", "requests", "waiting", "hit rate", "output tokens"):
        table.add_column(name, justify="right")
    for each in models:
        counts = (str(each[f"num_{name}"]) for name in ("up", "live", "queued"))
        rate, name = (
            f"{100 * each['cache_hit_rate']:.0f} %",
            ", ".join([each["model"], *each["aliases"]]),
        )
        table.add_row(name, *counts, rate, str(each["output_tokens"]))
    return table


def _groups_table(groups: list[tuple[dict[str, Any], dict[str, Any]]]) -> Table:
    """One row per worker and kind of groups of layers: what they have of its pool, and how many
    tokens were computed again because their windows or states were not there."""
    table = Table()
    for name in ("worker", "KV of layers"):
        table.add_column(name)
    for name in ("groups", "blocks used", "cached", "evicted", "tokens recomputed"):
        table.add_column(name, justify="right")
    for worker, each in groups:
        counts = [each[f"num_{name}"] for name in ("groups", "used", "cached", "evicted")]
        again = (worker.get("counters") or {}).get(RECOMPUTED + each["kind"], 0)
        counts.append("-" if each["kind"] == "full" else f"{again:.0f}")
        table.add_row(worker["worker"], _KINDS[each["kind"]], *map(str, counts))
    return table


def _links_table(links: list[tuple[str, dict[str, Any]]]) -> Table:
    """One row per worker and peer that it can read, the slowest first: how fast a
    small read was when the two were connected."""
    slowest = sorted(links, key=lambda each: each[1]["bytes_per_s"])
    left = len(links) - _MAX_LINKS
    table = Table(caption=f"and {left} that are faster" if left > 0 else None)
    for name in ("KV read by", "from"):
        table.add_column(name)
    table.add_column("first read", justify="right")
    for worker, link in slowest[:_MAX_LINKS]:
        rate = link["bytes_per_s"]
        timed = f"{rate / 1e9:.2f} GB/s" if rate else "not timed"
        table.add_row(worker, link["peer"], timed)
    return table


def _routers_table(routers: list[dict[str, Any]]) -> Table:
    """One row per router: where its API is, and what it serves; "?" of one that does not say."""
    table = Table()
    has_store = any(router.get("store_up") is not None for router in routers)
    for name in ("router", "state", "API"):
        table.add_column(name)
    table.add_column("live", justify="right")
    table.add_column("queued", justify="right")
    if has_store:
        table.add_column("Redis")
    for router in routers:
        is_silent = router["state"] == "up" and router.get("num_live") is None
        cells = [
            str(router["router"]),
            _coloured("silent" if is_silent else router["state"]),
            router.get("url") or "",
            *("?" if router.get(key) is None else str(router[key]) for key in _ROUTER_KEYS),
        ]
        if has_store:
            store_up = router.get("store_up")
            cells.append("?" if store_up is None else _coloured("up" if store_up else "down"))
        table.add_row(*cells)
    return table


def _coloured(state: str) -> str:
    return f"[{_STATE_COLOURS.get(state, 'default')}]{state}[/]"


def _load(workers: list[dict[str, Any]], rated: dict[str, Any], tiers: Sequence[str]) -> list[str]:
    def total(key: str) -> int:
        return sum(worker.get(key, 0) for worker in workers)

    return [
        f"{total('num_used_blocks')} / {total('num_blocks')}",
        str(total("num_cached_blocks")),
        *(_in_tier(workers, key) for key in tiers),
        str(total("num_running")),
        str(total("num_waiting")),
        f"{100 * rated.get('cache_hit_rate', 0.0):.1f} %",
    ]


def _in_tier(workers: list[dict[str, Any]], key: str) -> str:
    """Blocks, and on disk how many times smaller a codec makes them."""
    num_blocks = sum(worker.get(key, 0) for worker in workers)
    on_disk = [worker for worker in workers if worker.get("disk_used_bytes")]
    if key != "num_disk_blocks" or not on_disk:
        return str(num_blocks)
    taken = sum(worker["disk_used_bytes"] for worker in on_disk)
    ratio = sum(worker["disk_ratio"] * worker["disk_used_bytes"] for worker in on_disk) / taken
    return f"{num_blocks} ({ratio:.2f}x)" if ratio > WORTH_TELLING else str(num_blocks)


def _router_lines(status: dict[str, Any]) -> list[str]:
    """What the router serves, and what has become of what it served."""
    totals = status.get("totals", {})
    ended = ", ".join(f"{count} {reason}" for reason, count in totals.get("requests", {}).items())
    return [
        *_version_lines(status),
        *(
            f"{model}: {scaling['why']}" if model else scaling["why"]
            for model, scaling in scalings_of(status).items()
        ),
        *_restart_lines(status.get("restart", {})),
        f"{status.get('num_live', 0)} live, {status.get('num_queued', 0)} queued",
        f"ended: {ended or 'none'}",
        f"retries: {sum(totals.get('retries', {}).values())}",
        f"tokens: {totals.get('prompt_tokens', 0)} in ({totals.get('cached_tokens', 0)} cached), "
        f"{totals.get('output_tokens', 0)} out",
        *(
            f"avoided: KV from {link['source']} to {link['reader']}, of which"
            f" {link['lost_share']:.0%} did not come"
            for link in status.get("bad_links", ())
        ),
    ]


def scalings_of(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the autoscaler of each of several models says; of one, by no name."""
    found = {each["model"]: each["scaling"] for each in status.get("models") or ()}
    return {name: each for name, each in (found or {"": status.get("scaling")}).items() if each}


def _version_lines(status: dict[str, Any]) -> list[str]:
    """Which processes have which version of kvrelay, where not all have one."""
    processes = [(each["worker"], each) for each in status.get("workers", ())]
    processes += [(each["router"], each) for each in status.get("routers", ())]
    processes.append(("controller", status.get("controller", {})))
    names: dict[str, list[str]] = {}
    for name, process in processes:
        if process.get("version"):
            names.setdefault(process["version"], []).append(name)
    if len(names) < 2:
        return []
    return [f"kvrelay {version}: {', '.join(names[version])}" for version in sorted(names)]


def _restart_lines(restart: dict[str, Any]) -> list[str]:
    """The last restart, unless all went well."""
    state, what = restart.get("state"), "rollback" if restart.get("is_rollback") else "restart"
    if state == "stopped":
        return [f"{what} stopped: {restart.get('why')}; what runs goes on"]
    return [f"{what} under way: {state}"] if state and state != "done" else []


DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT = httpx.Timeout(30.0)
PAGE = 100
_CHAT_TIMEOUT = httpx.Timeout(10.0, read=600.0)

Command = TypeVar("Command", bound=Callable[..., Any])


def _trust(_context: click.Context, _option: click.Parameter, ca: str | None) -> None:
    """For every client of this process: it is httpx that reads the variable."""
    if ca:
        os.environ["SSL_CERT_FILE"] = ca


_url = click.option("--url", default=DEFAULT_URL, show_default=True, help="Where the server is.")
ca_option = click.option(
    "--ca",
    envvar="KVRELAY_CA",
    type=click.Path(exists=True, dir_okay=False),
    expose_value=False,
    callback=_trust,
    help="CA of a server with HTTPS, a PEM file; or KVRELAY_CA.",
)


def url_option(command: Command) -> Command:
    """`--url`, and `--ca`, which the command does not see."""
    return _url(ca_option(command))


api_key_option = click.option(
    "--api-key",
    envvar=["KVRELAY_API_KEY", "OPENAI_API_KEY"],
    default="",
    help="Key of a tenant, where the server has any; or KVRELAY_API_KEY, OPENAI_API_KEY.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")

operations_key_option = click.option(
    "--operations-key",
    envvar="KVRELAY_OPERATIONS_KEY",
    default="",
    help="api.operations_key; or KVRELAY_OPERATIONS_KEY. A server of yours here needs none.",
)


@contextmanager
def plain_errors(url: str) -> Iterator[None]:
    """What can go wrong with a server, in plain words."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise click.ClickException(
                f"the certificate of {url} is not trusted: name its CA with --ca or KVRELAY_CA "
                "(kvrelay serve makes tls/ca.pem in its state directory), and the server by a "
                f"name or address that the certificate has: {error}"
            ) from error
        raise click.ClickException(
            f"no server answers at {url}. Start one with 'kvrelay serve', or name another with "
            "--url."
        ) from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise click.ClickException(f"{url!r} is not a URL like {DEFAULT_URL}") from error
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx.RemoteProtocolError) and url.startswith("http://"):
            reason += "; does it serve HTTPS?"
        raise click.ClickException(f"the connection to {url} was lost: {reason}") from error
    except json.JSONDecodeError as error:
        raise click.ClickException(f"what {url} answers is not JSON: is it KVRelay?") from error


@contextmanager
def connected(url: str, key: str = "", timeout: httpx.Timeout = TIMEOUT) -> Iterator[httpx.Client]:
    """A client of the server, whose errors end the command in plain words. Where `key` is not
    enough it takes the operators', of a server of this user."""
    headers = key_headers(key)
    with (
        plain_errors(url),
        httpx.Client(base_url=url, timeout=timeout, headers=headers, auth=OwnKey()) as client,
    ):
        yield client


def show(
    url: str, key: str, path: str, render: Callable[[Any], Any], as_json: bool, **params: Any
) -> None:
    """Print what the server answers at `path`: as JSON, or as `render` makes a table of it."""
    with connected(url, key) as client:
        print_answer(get_json(client, path, **params), render, as_json)


def print_answer(found: Any, render: Callable[[Any], Any], as_json: bool) -> None:
    console = Console(highlight=False)
    if as_json:
        console.print_json(data=found)
    else:
        console.print(render(found), crop=False)


def line(text: str, style: str = "") -> Text:
    """A line as it is: no markup, and as long as it is."""
    return Text(text, style, no_wrap=True, overflow="ignore")


def _error_text(response: httpx.Response) -> str:
    """OpenAI's error message, or whatever else came."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}: {response.text[:200]}"


def key_headers(api_key: str) -> dict[str, str]:
    """Returns none without a key."""
    key = api_key.strip()
    if not (key.isascii() and key.isprintable()):
        raise click.ClickException("the API key has characters that no key has: is it one?")
    return {"authorization": f"Bearer {key}"} if key else {}


def get_json(client: httpx.Client, path: str, **params: Any) -> Any:
    """What the server answers; what it complains of becomes the command's error."""
    return ask_json(client, "GET", path, params=params)


def all_of(client: httpx.Client, path: str) -> list[dict[str, Any]]:
    """What is listed there, page by page."""
    found: list[dict[str, Any]] = []
    more = True
    while more:
        after = {"after": found[-1]["id"]} if found else {}
        page = get_json(client, path, limit=PAGE, **after)
        found += page["data"]
        more = page["has_more"] and bool(page["data"])
    return found


def ask_json(client: httpx.Client, method: str, path: str, **request: Any) -> Any:
    """What `get_json` does, with any method and body."""
    response = client.request(method, path, **request)
    if response.is_error:
        more = NOT_FOUND.format(client.base_url) if response.status_code == 401 else ""
        raise click.ClickException(_error_text(response) + more)
    return response.json()


class _Chat:
    """A conversation. Invariant: `history` holds whole turns only; a turn that failed is undone."""

    def __init__(
        self, client: httpx.Client, console: Console, system: str | None, options: dict[str, Any]
    ) -> None:
        self._client = client
        self._console = console
        self._system = [{"role": "system", "content": system}] if system else []
        self._options = options
        self.history: list[dict[str, str]] = []

    def reset(self) -> None:
        self.history = []

    def ask(self, text: str) -> None:
        """One turn: the answer is written as it comes. Ctrl-C ends the answer, not the chat."""
        turn = [*self.history, {"role": "user", "content": text}]
        body = {**self._options, "messages": [*self._system, *turn], "stream": True}
        answer = ""
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise click.ClickException(_error_text(response))
                for part in _contents(response):
                    answer += part
                    self._console.out(part, end="", highlight=False)
        except KeyboardInterrupt:
            self._console.out(" (interrupted)", end="")
        self._console.out()
        self.history = [*turn, {"role": "assistant", "content": answer}]


def _contents(response: httpx.Response) -> Iterator[str]:
    """The texts of a stream of chunks."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise click.ClickException(f"the answer broke off: {chunk['error']['message']}")
        for choice in chunk.get("choices", []):
            yield choice["delta"].get("content") or ""
    raise click.ClickException("the answer broke off: the server closed the connection")


@click.command()
@click.argument("prompt", nargs=-1)
@url_option
@click.option("--model", help="Model to ask; default: the server's first.")
@click.option("--system", help="System message.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 is greedy.")
@click.option("--seed", type=int, help="For answers that can be repeated.")
@click.option("--session", help="Name of a session, whose KV the server then keeps between turns.")
@api_key_option
def chat(
    prompt: tuple[str, ...],
    url: str,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    session: str | None,
    api_key: str,
) -> None:
    """Talk to a model. With PROMPT: one question, one answer."""
    console = Console()
    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given["prompt_cache_key"] = session
    options = {key: value for key, value in given.items() if value is not None}
    with connected(url, api_key, _CHAT_TIMEOUT) as client:
        options["model"] = model or get_json(client, "/v1/models")["data"][0]["id"]
        conversation = _Chat(client, console, system, options)
        if prompt:
            conversation.ask(" ".join(prompt))
            return
        console.print(f"{options['model']} at {url}. /reset starts anew, /exit ends.")
        while True:
            try:
                text = console.input("[bold]> [/]").strip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                return
            if text == "/exit":
                return
            if text == "/reset":
                conversation.reset()
                console.print("Starting anew.")
            elif text.startswith("/"):
                console.print("There are /reset and /exit.")
            elif text:
                _ask_safely(conversation, console, text)


def _ask_safely(conversation: _Chat, console: Console, text: str) -> None:
    """A refused question does not end the chat."""
    try:
        conversation.ask(text)
    except click.ClickException as error:
        console.print(f"\n[red]{error.message}[/]", highlight=False)


@click.command()
@url_option
@json_option
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option("--interval-s", type=click.FloatRange(min=0.1), default=1.0, show_default=True)
@operations_key_option
def status(url: str, as_json: bool, watch: bool, interval_s: float, operations_key: str) -> None:
    """Show workers, their load and their cache, and routers."""
    if as_json or not watch:
        show(url, operations_key, "/status", status_table, as_json)
        return
    with (
        connected(url, operations_key) as client,
        suppress(KeyboardInterrupt),
        Live(status_table(get_json(client, "/status"))) as live,
    ):
        while True:
            time.sleep(interval_s)
            live.update(status_table(get_json(client, "/status")), refresh=True)
