"""All checks, one after the other."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from kvrelay.cluster.config import Config
from kvrelay.cluster.doctor import disk, engines, links, server, software, system
from kvrelay.cluster.doctor.findings import Finding, fail, skipped

ROOT = Path("/")
Check = Callable[[], Finding | list[Finding]]


def machine_checks(config: Config) -> dict[str, Check]:
    """Checks of this machine, by what a user reads while they run."""

    def open_files() -> Finding:
        return system.check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    def locked() -> Finding:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return system.check_locked_memory(limit, config, ROOT)

    def shared() -> Finding:
        stat = os.statvfs("/dev/shm")
        return system.check_shared_memory(stat.f_blocks * stat.f_frsize, config)

    def left() -> Finding:
        from kvrelay.kvtransfer.store.arena import abandoned_arenas, arena_root

        return system.check_left_memory(abandoned_arenas(arena_root()))

    def disk_tier() -> Finding:
        if not config.tiers.disk_gib:
            return skipped("disk tier", "tiers.disk_gib is 0")
        return disk.check_disk_tier(_disk_folder(config), config.tiers.disk_gib)

    def left_on_disk() -> Finding:
        from kvrelay.kvtransfer.store import stale_stores

        folder = _disk_folder(config)
        parts = [folder, *sorted(folder.glob("rank-*-of-*"))]
        stores = [store for part in parts for store in stale_stores(part, b"")]
        return disk.check_left_stores(folder, {store.path: store.num_bytes for store in stores})

    def object_tier() -> Finding:
        if not config.tiers.object_bucket:
            return skipped("object tier", "tiers.object_bucket is empty")
        return disk.check_object_tier(config.tiers)

    def packages() -> Finding:
        return software.check_packages(software.requirements(), software.installed())

    return {
        "packages": packages,
        "vLLM": lambda: engines.check_vllm(config, on_gpu=bool(system.gpus_at(ROOT))),
        "images": lambda: engines.check_images(
            config, software.installed(), on_gpu=bool(system.gpus_at(ROOT))
        ),
        "KV events": lambda: software.check_events(config.events, software.installed()),
        "CUDA": lambda: software.check_cuda(software.installed(), ROOT),
        "open files": open_files,
        "locked memory": locked,
        "shared memory": shared,
        "memory left": left,
        "memory": lambda: system.check_memory(psutil.virtual_memory().available, config, ROOT),
        "CPUs": lambda: system.check_cpus(os.cpu_count() or 1, config, ROOT),
        "MTU": lambda: system.check_mtu(ROOT),
        "NUMA": lambda: system.check_numa(ROOT),
        "RDMA ports": lambda: system.check_rdma(ROOT),
        "state directory": lambda: disk.check_state_folder(config.sessions.state_path),
        "disk tier": disk_tier,
        "KV on disk": left_on_disk,
        "object tier": object_tier,
        "state store": lambda: server.check_store(config.state.url, config.state.timeout_s),
        "batches' store": lambda: server.check_store(
            config.state.batches_url, config.state.timeout_s, "batches' store"
        )[:1],  # leases of batches are by its own clock
        "KV between processes": links.measure_and_check,
    }


def server_checks(status: Mapping[str, Any], metrics: str, now: float) -> dict[str, Check]:
    """Checks of a running server. `now`: seconds since 1970, when `metrics` came."""
    return {
        "workers": lambda: server.check_workers(status),
        "hangs": lambda: server.check_hangs(status),
        "routers": lambda: server.check_routers(status),
        "controller": lambda: server.check_controller(status),
        "restarts": lambda: server.check_restarts(metrics),
        "server's state folder": lambda: server.check_server_room(metrics),
        "server's open files": lambda: server.check_server_files(metrics),
        "server's log": lambda: server.check_server_log(metrics),
        "KV layout": lambda: server.check_layouts(status),
        "server's clock": lambda: server.check_server_clock(metrics, now),
    }


def examine(checks: Mapping[str, Check]) -> Iterator[Finding]:
    """A check that cannot be made has failed; the others go on."""
    for name, check in checks.items():
        try:
            found = check()
        except OSError as error:
            found = fail(name, f"cannot be checked: {error}", "run it as the server's user")
        yield from [found] if isinstance(found, Finding) else found


def _disk_folder(config: Config) -> Path:
    from kvrelay.kvtransfer.store.folder import default_folder

    path = config.tiers.disk_path
    return Path(path).expanduser() if path else default_folder()
