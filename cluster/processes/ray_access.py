"""Ray, as the controller gets it: started on this machine, or joined where it asks for a token.

Ray reads its environment variables when it is imported, and never again: `apply_environment` comes
first.

Does a Ray cluster ask for a token? Without one, whoever reaches its port runs code there. Ray reads
the mode of authentication once per process, and this process has the token: so another one asks,
without it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from kvrelay.cluster.config import Config

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
        raise RayRefused(str(error)) from error
    return ray


def check_token(address: str) -> None:
    """Raises RayRefused unless the Ray cluster at `address` asks for a token."""
    from kvrelay.cluster.processes.ray_access import TokenUnknown, asks_for_token

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
