"""The command line. Commands import what they need when they run, so `--help` is quick."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import signal
import sys
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from kvrelay.cluster.cli.flags import FlagsCommand, settings_of, warn_of_secrets
from kvrelay.cluster.cli.settings import settings_options

if TYPE_CHECKING:
    from kvrelay.cluster.config import Config
    from kvrelay.cluster.processes.ready import Ready

COMMANDS = {
    "backup": ("backup", "backup", "Copy what a server has to find again."),
    "batches": ("batches", "batches", "See, cancel or run batches of requests."),
    "logs": ("logs", "logs", "What the processes of this machine have logged."),
    "restore": ("backup", "restore", "Bring back what `kvrelay backup` has copied."),
    "audit": ("operate", "audit", "Do all KV blocks add up, and does any leak?"),
    "explain": ("explain", "explain", "Where a request's time went, and why."),
    "doctor": ("doctor", "doctor", "What is wrong here, and what to do about it."),
    "plan": ("plan", "plan", "What a model takes of a machine, and what fits."),
    "fetch": ("fetch", "fetch", "A model into the cache, before it is needed."),
    "leave": ("leave", "leave", "Workers go elsewhere, before this machine ends."),
    "role": ("operate", "role", "Prefer a worker for prompts, decoding or both."),
    "models": ("models", "models", "Which are served; add one, or remove one."),
    "update": ("weights", "update", "Other weights for a model, while it is served."),
    "up": ("hosts", "up", "Bring up a cluster on machines of your own, over ssh."),
    "down": ("hosts", "down", "End what `kvrelay up` has started."),
    "console": ("operate", "console", "The address of the console, for your browser."),
    "drain": ("operate", "drain", "Let a server finish what it has, and end."),
    "restart": ("operate", "restart", "Every process anew, one after the other."),
    "rollback": ("operate", "rollback", "Back to the version and settings before."),
    "chat": ("client", "chat", "Talk to a served model from the terminal."),
    "scaling": ("operate", "scaling", "What the autoscaler does or not, and why."),
    "status": ("client", "status", "Workers, what they do, and the cache hit rate."),
    "keys": ("keys", "keys", "Make, list and revoke API keys."),
    "usage": ("keys", "usage", "Who has used how many tokens, by day."),
    "sessions": ("sessions", "sessions", "See, park, resume, fork or close sessions."),
}
PLUGGED_IN = "kvrelay.commands"  # entry points of other distributions: dicts like COMMANDS


class LazyGroup(click.Group):
    """Knows its commands by name and imports each when it is used."""

    @cached_property
    def commands_at(self) -> dict[str, tuple[str, str, str]]:
        """Finds module, attribute and help of each."""
        found = {
            name: (f"{__package__}.{module}", attribute, about)
            for name, (module, attribute, about) in COMMANDS.items()
        }
        for plugged in entry_points(group=PLUGGED_IN):
            found |= plugged.load()
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self.commands_at])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands_at:
            return super().get_command(ctx, cmd_name)
        module, attribute, _ = self.commands_at[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, about) for name, (_, _, about) in self.commands_at.items()]
        rows += [(name, c.get_short_help_str(80)) for name, c in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvrelay", prog_name="kvrelay")
def main() -> None:
    """KVRelay serves language models from a prefill pool and a decode pool."""


@main.command(cls=FlagsCommand)
@click.argument("models", nargs=-1)
@settings_options
@click.option("--check", is_flag=True, help="Say whether this could be served, and end.")
def serve(
    models: tuple[str, ...],
    config_path: Path | None,
    overrides: dict[str, Any],
    check: bool,
    **flags: Any,
) -> None:
    """Serve MODELS with an OpenAI-compatible API.

    Each is a Hugging Face directory, a hub id, a GGUF file, gemma3-270m, or smollm2-135m, the
    default. Several have workers of their own each, as many as --prefill and --decode say, and are
    called by their names, or as NAME=MODEL says.
    """
    from rich.console import Console

    from kvrelay.cluster.config import ConfigError
    from kvrelay.cluster.processes.ready import ServeError
    from kvrelay.engine.wire.channel import ChannelError

    overrides = _models(models, settings_of(flags, overrides))
    console = Console(stderr=True, highlight=False)
    warn_of_secrets(console)
    os.umask(0o077)  # prompts, tokens and keys are in what this and its processes write
    run = _check if check else _serve
    try:
        asyncio.run(run(config_path, overrides, console))
    except (ConfigError, ServeError, ChannelError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        sys.exit(1)


def _models(given: tuple[str, ...], overrides: dict[str, Any]) -> dict[str, Any]:
    """With the settings that name the models."""
    if len(given) < 2 and not re.match(r"[\w.-]{1,64}=", "".join(given)):  # a NAME
        return overrides | ({"model.name": given[0]} if given else {})
    if "model.served_name" in overrides:
        why = "--served-model-name names one model that has no other name"
        raise click.UsageError(f"{why}: give several as NAME=MODEL, with aliases in [[models]]")
    roles = {role: overrides.get(f"cluster.{role}") for role in ("prefill", "decode")}
    numbers = {role: number for role, number in roles.items() if number is not None}
    entries = []
    for each in given:
        name, is_named, checkpoint = each.rpartition("=")
        name = name if is_named else Path(each).name.removesuffix(".gguf")
        entries.append({"name": name, "checkpoint": checkpoint, **numbers})
    return overrides | {"models": entries}


async def _serve(path: Path | None, overrides: dict[str, Any], console: Any) -> None:
    """Serve until the first SIGINT or SIGTERM; a second one ends the process at once. SIGHUP reads
    the tenants again, unless it comes because the terminal is gone."""
    from kvrelay.cluster.cli.progress import StartProgress
    from kvrelay.cluster.processes.handover import SIGNALS, taken_over
    from kvrelay.cluster.processes.launch import serve as serve_until
    from kvrelay.cluster.processes.reload import Source
    from kvrelay.engine import logs
    from kvrelay.engine.stderr import set_up_process

    found = taken_over()
    source = Source(path, overrides, asyncio.Event(), found.settings if found else None)
    config = source.read()
    set_up_process()
    log = config.log.resolved(config.sessions.state_dir, config.api.port)
    config = replace(config, log=log)
    logs.set_up(log, "supervisor")
    stop = asyncio.Event()
    clusters: list[str] = []

    def on_signal() -> None:
        if stop.is_set():
            _exit_now(clusters if config.cluster.on_stop == "end-workers" else [])
        stop.set()

    def on_stop() -> None:
        drain_s = config.cluster.drain_s
        console.print(f"stopping; requests have up to {drain_s:g} s to finish", markup=False)

    loop = asyncio.get_running_loop()
    has_terminal = _has_terminal()

    def on_hangup() -> None:
        if has_terminal and not _has_terminal():
            on_signal()
        else:
            source.hangup.set()

    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the program before this has held them
    progress = StartProgress(console)
    with progress:

        def on_ready(ready: Ready, config: Config) -> None:
            progress.close()
            logs.show_all()
            _print_ready(console, ready, config)

        await serve_until(
            config, progress.tell, stop, on_ready, source, on_stop, clusters.append, found
        )


async def _check(path: Path | None, overrides: dict[str, Any], console: Any) -> None:
    from kvrelay.cluster.processes.handover import taken_over
    from kvrelay.cluster.processes.launch import check
    from kvrelay.cluster.processes.reload import Source
    from kvrelay.engine.wire.channel import own_version

    found = taken_over()
    source = Source(path, overrides, asyncio.Event(), found.settings if found else None)
    await check(source.read(), found)
    click.echo(f"kvrelay {own_version()} can serve {path or 'these settings'}")


def _has_terminal() -> bool:
    try:
        os.tcgetpgrp(0)
    except OSError:
        return False
    return True


def _exit_now(clusters: list[str]) -> None:
    """End at once, with all that was started, and the workers of `clusters`."""
    import psutil

    from kvrelay.worker.processes import kill_workers

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    for cluster in clusters:
        kill_workers(cluster)
    os._exit(130)


def _print_ready(console: Any, ready: Ready, config: Config) -> None:
    from kvrelay.cluster.control.routers import api_url

    tls = config.tls
    urls = {name: api_url(config.api.host, port, tls.scheme) for name, port in ready.ports.items()}
    first, *further = urls
    for line in ready.lines:
        console.print(line, markup=False, soft_wrap=True)
    for router in further:
        console.print(f"{router}: {urls[router]}/v1", markup=False, soft_wrap=True)
    url = urls[first]
    console.print(f"Console: kvrelay console --url {url}", markup=False, soft_wrap=True)
    console.print(
        f"\nReady: {', '.join(ready.models.served_names)} at {url}/v1 (OpenAI-compatible). Try:\n",
        style="bold green",
        markup=False,
        soft_wrap=True,
    )
    trusted = f"--cacert {tls.ca} " if tls.api and tls.ca else ""
    key = '-H "Authorization: Bearer $KVRELAY_API_KEY" ' if config.api.key else ""
    path, asked = "completions", '"max_tokens": 30, "prompt": "The capital of France is"'
    name, own = next(iter(config.by_model().items()))
    model = ready.models.by_name[name]
    if own.model.chat_template or _has_chat_template(model.path):
        question = '[{"role": "user", "content": "What is the capital of France?"}]'
        path, asked = "chat/completions", f'"messages": {question}'
    console.print(
        f"curl {trusted}{url}/v1/{path} {key}-H 'Content-Type: application/json' -d "
        f'\'{{"model": "{model.served_name}", "temperature": 0, {asked}}}\'\n',
        markup=False,
        soft_wrap=True,
    )


def _has_chat_template(model_dir: Path) -> bool:
    """Looks where `read_chat_template` does, without the libraries that it needs."""
    config = model_dir / "tokenizer_config.json"
    is_in_config = config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
    return is_in_config or (model_dir / "chat_template.jinja").is_file()


if __name__ == "__main__":
    main()
