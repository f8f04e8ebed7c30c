"""Which UCX transports an agent's connections use, as UCX itself reports them.

NIXL does not tell: its telemetry (1.5) has times, bytes and number of descriptors of a transfer,
and of a backend it names only the plugin. UCX keeps a tree of its objects for inspection, in which
an agent's endpoints are found under the agent's name, and `ucp_ep_query` names the transports of an
endpoint. Asked once per connection, when it was just made. Where this UCX answers otherwise than
expected, the answer is "unknown", never a guess.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterable
from pathlib import Path

UNKNOWN = "unknown"

OBJECT_NAME = re.compile(r"0x[0-9a-f]+")
MIN_UCX, NEXT_UCX = (1, 15), (2, 0)  # versions whose ABI the structures below are of
FIELD_TRANSPORTS = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS
MAX_TRANSPORTS = 32

RDMA = ("rc_", "dc_", "ud_", "ib", "srd", "gga")
COPY_FROM_PROCESS = ("cma", "knem", "xpmem")
BULK_ON_CPU = (COPY_FROM_PROCESS, RDMA, ("sysv", "posix"), ("tcp",))
BULK_ON_GPU = (("cuda_ipc",), RDMA, COPY_FROM_PROCESS, ("sysv", "posix"), ("tcp",))
"""An endpoint has transports for several purposes; bulk data takes the first of these kinds."""


class _Transport(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.POINTER(_Transport)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    )


class _EndpointAttributes(ctypes.Structure):  # ucp_ep_attr_t
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_char * 128),
        ("remote_sockaddr", ctypes.c_char * 128),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    )


_OnName = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)


def endpoints(agent: str) -> set[int]:
    """The agent's UCX endpoints, one or more per peer; none if UCX does not say."""
    found: set[int] = set()
    workers = f"/ucp/context/{agent}/worker"
    for worker in _children(workers):
        _children(f"{workers}/{worker}")  # UCX fills in a level when the one above is listed
        for name in _children(f"{workers}/{worker}/ep"):
            if OBJECT_NAME.fullmatch(name):
                found.add(int(name, 16))
    return found


def lane(endpoints: Iterable[int], on_gpu: bool) -> str:
    """What bulk data of these endpoints goes by, such as "cma/memory" or "rc_mlx5/mlx5_0:1";
    `on_gpu`: between GPUs. "unknown" if UCX does not say, or they differ."""
    lanes = {bulk_lane(_transports(endpoint), on_gpu) for endpoint in endpoints}
    return lanes.pop() if len(lanes) == 1 else UNKNOWN


def bulk_lane(transports: list[tuple[str, str]], on_gpu: bool) -> str:
    """Of (transport, device) pairs, those that bulk data goes by."""
    for kind in BULK_ON_GPU if on_gpu else BULK_ON_CPU:
        of_kind = [f"{name}/{device}" for name, device in transports if name.startswith(kind)]
        if of_kind:
            return " ".join(dict.fromkeys(of_kind))
    return UNKNOWN


def _children(path: str) -> list[str]:
    ucs = _libraries().get("libucs")
    names: list[str] = []
    if ucs is not None:

        def on_name(name: bytes, _: object) -> None:
            names.append(name.decode(errors="replace"))

        ucs.ucs_vfs_path_list_dir(path.encode(), _OnName(on_name), None)
    return names


def _transports(endpoint: int) -> list[tuple[str, str]]:
    ucp = _libraries()["libucp"]
    entries = (_Transport * MAX_TRANSPORTS)()
    attributes = _EndpointAttributes(field_mask=FIELD_TRANSPORTS)
    attributes.transports = _Transports(entries, MAX_TRANSPORTS, ctypes.sizeof(_Transport))
    if ucp.ucp_ep_query(ctypes.c_void_p(endpoint), ctypes.byref(attributes)) != 0:
        return []
    count = min(attributes.transports.num_entries, MAX_TRANSPORTS)
    return [(each.transport.decode(), each.device.decode()) for each in entries[:count]]


@functools.cache
def _libraries() -> dict[str, ctypes.CDLL]:
    """The libucs and libucp that NIXL has loaded; nothing unless they are as expected."""
    paths: dict[str, set[str]] = {"libucs": set(), "libucp": set()}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        name = re.split(r"[-.]", Path(path).name)[0]
        if name in paths:
            paths[name].add(path)
    if any(len(found) != 1 for found in paths.values()):  # a second UCX may be in the process
        return {}
    libraries = {name: ctypes.CDLL(found.pop()) for name, found in paths.items()}
    if not hasattr(libraries["libucs"], "ucs_vfs_path_list_dir"):
        return {}
    version = [ctypes.c_uint() for _ in range(3)]
    libraries["libucp"].ucp_get_version(*(ctypes.byref(part) for part in version))
    libraries["libucs"].ucs_vfs_path_list_dir.argtypes = (
        ctypes.c_char_p,
        _OnName,
        ctypes.c_void_p,
    )
    return libraries if MIN_UCX <= (version[0].value, version[1].value) < NEXT_UCX else {}
