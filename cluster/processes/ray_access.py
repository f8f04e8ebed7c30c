"""Ray, as the controller gets it: started on this machine, or joined where it asks for a token.

Ray reads its environment variables when it is imported, and never again: `apply_environment` comes
first.

Does a Ray cluster ask for a token? Without one, whoever reaches its port runs code there. Ray reads
the mode of authentication once per process, and this process has the token: so another one asks,
without it.

Ray's autoscaler is asked for machines, again and again until it has heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType

import psutil

from kvrelay.cluster.config import Config
from kvrelay.cluster.control.messages import Machine
from kvrelay.engine.backoff import Backoff

log = logging.getLogger("kvrelay.control")

RETRY = Backoff(2.0, 60.0)  # before Ray is asked for machines again

_REFUSED = 3
_ASK = f"""
import sys
from ray._raylet import GcsClient
from ray.exceptions import RayError
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"kvrelay", None, 5)
except RayError as error:
    if type(error).__name__ != "AuthenticationError":
        raise
    sys.exit({_REFUSED})
"""


class TokenUnknown(Exception):
    """Ray did not answer as expected; one line."""


def asks_for_token(address: str, timeout_s: float = 60.0) -> bool:
    """Whether Ray's control plane at HOST:PORT turns away who has no token. Blocks for seconds.
    Raises TokenUnknown."""
    hidden = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK, address],
            env=env | {"RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise TokenUnknown(f"no answer within {timeout_s:g} s") from error
    if asked.returncode not in (0, _REFUSED):
        lines = asked.stderr.strip().splitlines()
        raise TokenUnknown(lines[-1] if lines else f"exit status {asked.returncode}")
    return asked.returncode == _REFUSED


_VERSIONS = """
import json, platform, sys, ray
from ray._common.usage.usage_lib import get_cluster_metadata
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient
there = get_cluster_metadata(GcsClient(address=canonicalize_bootstrap_address(sys.argv[1])))
named = {"Ray": there["ray_version"], "Python": there["python_version"]}
print(json.dumps([named, {"Ray": ray.__version__, "Python": platform.python_version()}]))
"""


def other_versions(address: str, timeout_s: float = 60.0) -> str:
    """Why this program cannot join the Ray cluster at `address`, which may be "auto": what runs
    there is of another version; "": it is not, or Ray does not say. Blocks for seconds."""
    apply_environment()
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _VERSIONS, address],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        there, here = json.loads(asked.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return ""
    return differing_versions(address, there, here)


def differing_versions(address: str, there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Ray compares both exactly."""
    others = [name for name in here if there[name] != here[name]]
    if not others:
        return ""
    runs, has = (" and ".join(f"{n} {each[n]}" for n in others) for each in (there, here))
    return (
        f"the Ray cluster at {address} runs {runs}, and this program has {has}: it cannot join."
        f" Install it with {runs}, or end the server and Ray, and start both anew"
    )


class NotDrained(Exception):
    """Ray was not asked to let this machine go; one line."""


def drain_this_node(timeout_s: int) -> None:
    """Ask Ray to place nothing on this machine any more, since it ends after `timeout_s`. Blocks
    for seconds. Raises NotDrained."""
    apply_environment()
    nodes = {flags["node_id"]: flags.get("gcs-address", "") for flags in raylets_here()}
    if len(nodes) != 1:
        raise NotDrained(f"this machine has {len(nodes)} nodes of a Ray cluster: expected one")
    ((node, address),) = nodes.items()
    drain_node(node, address, timeout_s)


def drain_node(node: str, address: str, timeout_s: int) -> None:
    """As `drain_this_node`, for a node of the Ray cluster at HOST:PORT."""
    flags = {
        "address": address,
        "node-id": node,
        "reason": "DRAIN_NODE_REASON_PREEMPTION",  # that of idle ones is refused to others
        "reason-message": "kvrelay leave",
        "deadline-remaining-seconds": str(timeout_s),
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
    try:
        asked = subprocess.run(
            [*command, *(f"--{name}={value}" for name, value in flags.items())],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise NotDrained(f"Ray at {address} does not answer within {timeout_s} s") from error
    if asked.returncode:
        lines = asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"]
        raise NotDrained(f"Ray at {address} does not drain this machine: {lines[-1]}")


def raylets_here() -> list[dict[str, str]]:
    """The flags of each raylet of this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        program, *flags = process.info["cmdline"] or [""]
        if Path(program).name == "raylet":
            parts = (flag.removeprefix("--").partition("=") for flag in flags)
            found.append({name: value for name, _, value in parts})
    return found


ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 lets every other process delay a decode step
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or Ray warns of a change to come
}


def apply_environment() -> None:
    """Set what the user has not set. Call before Ray is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    has_token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path.home() / ".ray" / "auth_token"
    if file.is_file() and file.stat().st_mode & 0o077:
        with contextlib.suppress(OSError):  # it belongs to another user
            file.chmod(0o600)  # Ray makes it readable by all; who reads it runs code
    if has_token or file.is_file():
        # A cluster that was started where there is a token asks for it; joining needs telling.
        os.environ.setdefault("RAY_AUTH_MODE", "token")


class RayRefused(Exception):
    """Ray is not there, or is not fit to be used; one line for the user."""


def start_ray(config: Config, tell: Callable[[str], None]) -> ModuleType:
    """`cluster.processes.ray`, connected. Blocks. The calling thread has to live as long as Ray:
    the kernel ends Ray's processes with the very thread that started them. Raises RayRefused."""
    apply_environment()
    import kvrelay.cluster.processes.ray as ray

    address = config.cluster.address
    tell(f"joining {address}" if address else "starting")
    try:
        ray.connect(address, config.cluster.ray_dashboard_port)
        if address and not config.cluster.insecure_ray:
            tell("joined; does it ask for a token?")
            check_token(ray.control_plane())
    except ray.RayUnavailable as error:
        raise RayRefused((other_versions(address) if address else "") or str(error)) from error
    return ray


def check_token(address: str) -> None:
    """Raises RayRefused unless the Ray cluster at `address` asks for a token."""
    try:
        if asks_for_token(address):
            return
        problem = "asks for no token, so whoever reaches it runs code on its machines"
    except TokenUnknown as error:
        problem = f"does not say whether it asks for a token ({error})"
    raise RayRefused(
        f"the Ray cluster at {address} {problem}. On each machine, put one token into "
        "~/.ray/auth_token (`ray get-auth-token --generate` makes it) and start Ray with "
        "RAY_AUTH_MODE=token: see deploy/README.md. --insecure-ray serves without."
    )


def resources_of(text: str, machines: Iterable[Machine]) -> dict[str, float]:
    """What Ray knows of a machine such as `text` says ("GPU=8"), or as the largest that there is;
    empty if there is none."""
    if text:
        return {name: float(n) for name, n in (part.split("=") for part in text.split(","))}
    largest = max(machines, key=lambda machine: (machine.num_gpus, machine.num_cpus), default=None)
    if largest is None:
        return {}
    return {"GPU": largest.num_gpus} if largest.num_gpus else {"CPU": largest.num_cpus}


class AskedMachines:
    """The last number that the controller wants is asked for until Ray has heard it: it may come
    while Ray is not there yet, or does not answer. Owned by the controller's process."""

    def __init__(self, ask: Callable[[int], Awaitable[bool]]) -> None:
        """`ask`: of Ray; False: it is not known yet what a machine is. Raises what Ray does."""
        self._ask = ask
        self.wanted: int | None = None  # None: nothing was wanted
        self._asked: int | None = None

    async def settle(self) -> None:
        """Ask for what is wanted, and try again where that fails, until it is done."""
        failures = 0
        while self._asked != (wanted := self.wanted) and wanted is not None:
            try:
                if not await self._ask(wanted):
                    return
                self._asked, failures = wanted, 0
            except Exception as error:  # Ray's: what serves goes on with the machines there are
                failures += 1
                pause_s = RETRY.pause_s(failures)
                text = "Ray was not asked for %d machines: %s; again in %g s"
                log.warning(text, wanted, error, pause_s)
                await asyncio.sleep(pause_s)

    async def give_back(self, timeout_s: float) -> None:
        """At the end of the cluster nobody needs those that were asked for: what Ray was asked for
        outlives who did."""
        if self._asked:
            self.wanted = 0
            try:
                await asyncio.wait_for(self.settle(), timeout_s)
            except TimeoutError:
                log.warning("Ray did not hear that its machines are needed no more")
