"""Ray, as the controller gets it: started on this machine, or joined where it asks for a token."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from kvrelay.cluster.config import Config


class RayRefused(Exception):
    """Ray is not there, or is not fit to be used; one line for the user."""


def start_ray(config: Config, tell: Callable[[str], None]) -> ModuleType:
    """`cluster.processes.ray`, connected. Blocks. The calling thread has to live as long as Ray:
    the kernel ends Ray's processes with the very thread that started them. Raises RayRefused."""
    from kvrelay.cluster.processes import ray_environment

    ray_environment.apply()
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
    from kvrelay.cluster.processes.ray_token import TokenUnknown, asks_for_token

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
