"""HOSTS.toml: which machines, how they are reached, and what is served on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from kvrelay.cluster.config import ConfigError, read_toml
from kvrelay.engine.settings import explain_error

Port = Annotated[int, Meta(ge=1, le=65_535)]


class HostEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A machine. The first one has Ray's control plane and the API."""

    name: Annotated[str, Meta(min_length=1)]  # as ssh knows it
    address: str = ""  # by which the other machines reach it; "": `name`
    ray_args: tuple[str, ...] = ()  # for `ray start` there, as "--num-gpus=8"

    @property
    def reached_at(self) -> str:
        return self.address or self.name


class SshSection(Struct, frozen=True, forbid_unknown_fields=True):
    # to run a command on a machine, which is put where it says {host}, or else at its end
    command: Annotated[tuple[str, ...], Meta(min_length=1)] = ("ssh", "-o", "BatchMode=yes")
    python: str = "python3"  # there, of the environment that has KVRelay
    folder: str = "~/.kvrelay"  # there, for logs and what is kept; {host}: the machine's name
    connect_s: Annotated[float, Meta(gt=0.0)] = 15.0  # for a machine to answer


class RaySection(Struct, frozen=True, forbid_unknown_fields=True):
    port: Port = 6379
    start_s: Annotated[float, Meta(gt=0.0)] = 90.0  # for a machine to have joined


class ServeSection(Struct, frozen=True, forbid_unknown_fields=True):
    config: str = ""  # settings of the server, a file beside this one; "": the defaults
    args: tuple[str, ...] = ("--host", "0.0.0.0")  # for `kvrelay serve`
    ready_s: Annotated[float, Meta(gt=0.0)] = 900.0  # models may have to be downloaded


class Hosts(Struct, frozen=True, forbid_unknown_fields=True):
    host: Annotated[tuple[HostEntry, ...], Meta(min_length=1)]
    ssh: SshSection = SshSection()
    ray: RaySection = RaySection()
    serve: ServeSection = ServeSection()

    @property
    def head(self) -> HostEntry:
        return self.host[0]

    @property
    def ray_address(self) -> str:
        return f"{self.head.reached_at}:{self.ray.port}"


def read_hosts(path: Path) -> Hosts:
    """Raises ConfigError, with one line that names the key, its value and what would be right."""
    tables: dict[str, Any] = read_toml(path)
    if not tables.get("host"):
        raise ConfigError(f'{path}: no machines; each is a table, [[host]] with name = "..."')
    try:
        hosts = convert(tables, Hosts)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain_error(str(error), tables, Hosts)}") from error
    names = [host.name for host in hosts.host]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{path}: {', '.join(twice)} is there more than once")
    return hosts


def settings_text(path: Path, hosts: Hosts) -> str:
    """Of the server. Raises ConfigError if the file cannot be read."""
    if not hosts.serve.config:
        return ""
    file = path.parent / hosts.serve.config
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve.config = {hosts.serve.config!r}: {error}") from error
