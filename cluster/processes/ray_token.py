"""Does a Ray cluster ask for a token? Without one, whoever reaches its port runs code there.

Ray reads the mode of authentication once per process, and this process has the token: so another
one asks, without it.
"""

from __future__ import annotations

import os
import subprocess
import sys

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
