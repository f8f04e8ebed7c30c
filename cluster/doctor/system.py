"""Limits and devices of this machine against what the settings need.

Each check takes what it looks at, so that it can be shown another machine: `root` is where its
`/proc` and `/sys` are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kvrelay.cluster.config import Config
from kvrelay.cluster.doctor.findings import Finding, fail, ok, rm, skipped, warn
from kvrelay.decode_worker.vllm.arguments import num_processes

GIB = 1 << 30
MIB = 1 << 20
UNLIMITED = -1
SPARE_FILES = 512  # descriptors of a router beside those of its clients
LEAST_CLIENTS = 256
LEAST_SHM = 256 * MIB  # Ray's and UCX's segments of a small cluster
FAST_MBIT_S, JUMBO_BYTES = 25_000, 9000


def check_open_files(limit: int) -> Finding:
    """`limit`: the soft one. A router accepts half as many clients as there are descriptors."""
    check, least = "open files", SPARE_FILES + 2 * LEAST_CLIENTS
    if limit == UNLIMITED or limit >= least:
        return ok(check, "unlimited" if limit == UNLIMITED else f"{limit}")
    return fail(
        check,
        f"{limit} descriptors: {limit // 2} clients at most",
        f"ulimit -n {64 * least} before the server starts, or LimitNOFILE= in its unit",
    )


def check_locked_memory(limit: int, config: Config, root: Path) -> Finding:
    """RDMA and CUDA lock the pages of KV; `limit` is in bytes."""
    check = "locked memory"
    gpus, cards = gpus_at(root), _rdma_cards(root)
    if not gpus and not cards:
        return skipped(check, "no GPU and no RDMA device, which would lock pages")
    each = 0.0 if gpus else config.engine.sized(gpu=False).kv_cache_gib
    need = int((config.tiers.memory_gib + each) * GIB) + 64 * MIB
    if limit == UNLIMITED or limit >= need:
        return ok(check, "unlimited" if limit == UNLIMITED else f"{limit / GIB:.1f} GiB")
    return fail(
        check,
        f"{limit / MIB:.1f} MiB, and KV of {need / MIB:.0f} MiB is to be locked",
        "ulimit -l unlimited, LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 of a "
        "container; without it KV goes by TCP",
    )


def check_shared_memory(total: int, config: Config) -> Finding:
    """`total`: bytes of /dev/shm. A container has 64 MiB unless it is given more. The host tiers of
    all workers of a machine are there."""
    check = "shared memory"
    tiers = int(config.tiers.memory_gib * GIB)
    size = f"{-(-(LEAST_SHM + tiers) // GIB):.0f}g"
    how = (
        f"--shm-size={size} of a container, an emptyDir of medium Memory in a pod, or "
        f"mount -o remount,size={size} /dev/shm"
    )
    if total < LEAST_SHM:
        return fail(
            check,
            f"{total / MIB:.0f} MiB at /dev/shm, and processes of a machine pass KV and tasks by"
            " it",
            how,
        )
    if total < tiers:
        return warn(
            check,
            f"{total / GIB:.1f} GiB at /dev/shm, and the host tiers of a machine's workers take"
            f" {tiers / GIB:.1f} GiB there: of some, KV ends with their worker",
            f"{how}; or lower tiers.host_gib",
        )
    return ok(check, f"{total / GIB:.1f} GiB at /dev/shm")


def check_left_memory(left: Iterable[tuple[Path, int]]) -> Finding:
    """`left`: host memory for KV whose workers are gone, and bytes of each."""
    check = "memory left"
    found = list(left)
    if not found:
        return ok(check, "no worker has left KV in host memory")
    size = sum(num_bytes for _, num_bytes in found)
    return warn(
        check,
        f"{size / GIB:.1f} GiB of KV of {len(found)} worker(s) that are gone",
        f"start the server again, which takes it over, or free it: {rm(path for path, _ in found)}",
    )


def check_memory(available: int, config: Config, root: Path) -> Finding:
    """`available`: bytes. All workers are taken to be here; on GPUs, KV is in their memory. That of
    vLLM is in the machine's once more."""
    check = "memory"
    workers, on_gpus = config.most_workers, bool(gpus_at(root))
    kv_gib = 0.0
    for own in config.by_model().values():
        is_here = own.model.device == "cpu" or not on_gpus
        is_copied = own.engine.runs == "vllm" and num_processes(own.engine) == 1
        size = own.engine.sized(gpu=not is_here).kv_cache_gib
        kv_gib += own.most_workers * size * (is_here + is_copied)
    need = int((kv_gib + config.tiers.memory_gib) * GIB)
    if available >= need:
        return ok(check, f"{available / GIB:.1f} GiB free; KV takes {need / GIB:.1f} GiB at most")
    return fail(
        check,
        f"{available / GIB:.1f} GiB free, and KV of {workers} workers takes {need / GIB:.1f} GiB",
        "lower engine.kv_cache_gib or tiers.host_gib, or have fewer workers on a machine",
    )


def check_cpus(num_cores: int, config: Config, root: Path) -> Finding:
    """`num_cores`: of the machine. Threads are counted by them, whatever a container may use."""
    check = "CPUs"
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if not quota.isdigit() or not period.isdigit():
        return ok(check, f"{num_cores} cores, without a quota")
    allowed = int(quota) / int(period)
    if allowed >= num_cores or 0 < config.engine.threads <= allowed:
        return ok(check, f"{num_cores} cores, {allowed:g} of them by quota")
    return warn(
        check,
        f"a quota of {allowed:g} of {num_cores} cores: whoever uses it up stands still until the "
        "next period",
        f"engine.threads = {max(1, int(allowed))}, or no CPU limit for the pod or unit",
    )


def check_mtu(root: Path) -> Finding:
    check = "MTU"
    small, fast = [], []
    for card in sorted((root / "sys/class/net").glob("*")):
        is_real, is_up = (card / "device").exists(), _read(card / "operstate") == "up"
        speed, mtu = _number(card / "speed"), _number(card / "mtu")
        if is_real and is_up and speed >= FAST_MBIT_S:
            fast.append(card.name)
            if mtu < JUMBO_BYTES:
                small.append(f"{card.name}: {mtu} bytes at {speed // 1000} Gbit/s")
    if small:
        return warn(
            check,
            "; ".join(small),
            f"ip link set dev {small[0].split(':')[0]} mtu {JUMBO_BYTES}, on every machine and "
            "switch between them",
        )
    if not fast:
        return skipped(check, f"no network card of {FAST_MBIT_S // 1000} Gbit/s or more")
    return ok(check, f"{', '.join(fast)}: {JUMBO_BYTES} bytes or more")


def check_numa(root: Path) -> Finding:
    """Every GPU should have an RDMA card at its own NUMA node."""
    check = "NUMA"
    gpus = {gpu.name: _number(gpu / "numa_node", -1) for gpu in gpus_at(root)}
    cards = {card.name: _number(card / "device/numa_node", -1) for card in _rdma_cards(root)}
    if not gpus or not cards:
        return skipped(check, "needs GPUs and RDMA devices")
    far = [name for name, node in gpus.items() if node >= 0 and node not in cards.values()]
    if far:
        where = ", ".join(f"{name} at node {gpus[name]}" for name in far)
        return warn(
            check,
            f"no RDMA card at the node of {where}; cards are at {sorted({*cards.values()})}",
            "move a card to that node, or let workers use the other GPUs only "
            "(CUDA_VISIBLE_DEVICES); KV crosses the sockets' link otherwise",
        )
    return ok(check, f"{len(gpus)} GPUs, each with an RDMA card at its node")


def check_rdma(root: Path) -> Finding:
    check = "RDMA ports"
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*/state"))
    if not ports:
        return skipped(check, "no RDMA device")
    down = [f"{path.parts[-4]} port {path.parts[-2]}" for path in ports if not _is_active(path)]
    if len(down) == len(ports):
        return fail(
            check, f"not active: {', '.join(down)}", "ibv_devinfo; check cable, switch, opensm"
        )
    if down:
        return warn(check, f"not active: {', '.join(down)}", "ibv_devinfo; check cable and switch")
    return ok(check, f"{len(ports)} active")


def _is_active(path: Path) -> bool:
    return "ACTIVE" in _read(path)


def gpus_at(root: Path) -> list[Path]:
    driver = root / "sys/bus/pci/drivers/nvidia"
    return sorted(path for path in driver.glob("*") if re.match(r"[0-9a-f]{4}:", path.name))


def _rdma_cards(root: Path) -> list[Path]:
    return sorted((root / "sys/class/infiniband").glob("*"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # such as the speed of a card that is down
        return ""


def _number(path: Path, otherwise: int = 0) -> int:
    text = _read(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else otherwise
