"""Where the processes of this machine listen, so that those of other machines reach them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
_SOMEWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737); nothing is sent there


def own_host(address: str) -> str:
    """`address`: of the Ray cluster, as in `cluster.address`. Without one all is on this machine.
    Else the address of the interface that leads there; does not wait for anything."""
    if not address:
        return LOOPBACK
    host = ray_address(address).rpartition(":")[0].strip("[]")
    own = _toward(host)
    # Ray's own control plane is here: then others reach us by what leads out.
    return _toward(_SOMEWHERE) if own.startswith("127.") else own


def ray_address(address: str) -> str:
    """HOST:PORT of the Ray cluster; "" if that is not known."""
    if address != "auto":
        return address
    if from_user := os.environ.get("RAY_ADDRESS", ""):
        return from_user
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        return note.read_text().strip()
    except OSError:
        return ""


def _toward(host: str) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # of a datagram socket: only the route is looked up
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])
