"""The faults that runbooks mend: each is there from its `with` to the end of it, unless mended.

A fault returns when it is complete; what it needs to go on, such as load, goes on in threads.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import psutil

from tests.operations.served import STORY
from tests.runbooks.world import World

Inject = Callable[[World], AbstractContextManager[None]]

SMALL: dict[str, object] = {
    "engine.max_model_len": 1024,
    "tiers.host_gib": 0.05,
    "router.no_workers_wait_s": 3.0,
    "router.max_queue": 24,
    "router.max_inflight_per_worker": 4,
}


def _main(world: World) -> Mapping[str, object]:
    return {
        **SMALL,
        "engine.num_blocks": 130,
        "tiers.disk_gib": 0.2,
        "tiers.disk_path": str(world.folder / "disk"),
        "tiers.disk_after_s": 0.1,
        "tracing.endpoint": f"http://127.0.0.1:{world.collector_port}",
    }


def _little_memory(_: World) -> Mapping[str, object]:
    """A request has 10 of 130 blocks at most: when one ends, those that wait fill its place."""
    return {**SMALL, "engine.num_blocks": 130, "router.max_inflight_per_worker": 48}


def _handing_over(_: World) -> Mapping[str, object]:
    return {**SMALL, "engine.num_blocks": 256, "router.policy": "round_robin", "cluster.routers": 2}


def _scaling(_: World) -> Mapping[str, object]:
    """Two workers, and a target by which each should have one stream."""
    return {
        **SMALL,
        "engine.num_blocks": 256,
        "scaling.enabled": True,
        "scaling.min_workers": 2,
        "scaling.max_workers": 2,
        "scaling.itl_target_ms": 1.0,
        "scaling.tick_s": 0.5,
        "scaling.warmup_s": 1.0,
    }


def _joined(world: World) -> Mapping[str, object]:
    """A Ray that was started before the server, and is another's to start again."""
    return {
        **SMALL,
        "engine.num_blocks": 256,
        "cluster.address": f"127.0.0.1:{world.ray_port}",
        "cluster.insecure_ray": True,
    }


RAY_IS_STUCK_S = 12.0

SERVERS = {
    "main": _main,
    "memory": _little_memory,
    "scaling": _scaling,
    "routers": _handing_over,
    "joined": _joined,
}


@contextlib.contextmanager
def traces_go_nowhere(world: World) -> Iterator[None]:
    """The collector was never started."""
    with world.load(1, 4):
        yield


@contextlib.contextmanager
def redis_dies(world: World) -> Iterator[None]:
    world.redis().kill()
    yield


@contextlib.contextmanager
def few_files(world: World) -> Iterator[None]:
    for router in world.processes("child router "):
        limit = int(router.num_fds() * 1.23)
        _, hard = router.rlimit(resource.RLIMIT_NOFILE)
        router.rlimit(resource.RLIMIT_NOFILE, (limit, hard))
    yield


@contextlib.contextmanager
def disk_is_full(world: World) -> Iterator[None]:
    """Workers may not write files beyond their first bytes, as under a quota."""
    for pid in world.workers().values():
        process = psutil.Process(pid)
        process.rlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    with world.load(1, 32):
        yield


@contextlib.contextmanager
def decode_worker_dies(world: World) -> Iterator[None]:
    """While Ray, which starts workers, does not answer on its machine."""
    (raylet,) = world.processes("raylet/raylet ")
    raylet.send_signal(signal.SIGSTOP)
    world.process("decode-0").kill()
    thread = threading.Timer(RAY_IS_STUCK_S, raylet.send_signal, [signal.SIGCONT])
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextlib.contextmanager
def decode_worker_dies_again_and_again(world: World) -> Iterator[None]:
    for attempt in range(3):
        if attempt:
            world.wait_up()
        world.process("decode-0").kill()
        time.sleep(2)
    yield


@contextlib.contextmanager
def all_workers_die(world: World) -> Iterator[None]:
    for pid in world.workers().values():
        psutil.Process(pid).kill()
    yield


@contextlib.contextmanager
def all_workers_die_under_load(world: World) -> Iterator[None]:
    with world.load(4, 32):
        time.sleep(3)
        with all_workers_die(world):
            yield


@contextlib.contextmanager
def decode_worker_stops(world: World) -> Iterator[None]:
    with world.load(4, 64):
        time.sleep(3)
        world.process("decode-0").send_signal(signal.SIGSTOP)
        yield


@contextlib.contextmanager
def workers_are_slow(world: World) -> Iterator[None]:
    """They run for a fifteenth of the time, as on a machine that others use: more than one of ten
    gaps between tokens is long, also where a step takes 5 ms."""
    processes = [psutil.Process(pid) for pid in world.workers().values()]
    stop = threading.Event()

    def throttle() -> None:
        """Until the runbook ends one of them; no other stays stopped then."""
        try:
            while not stop.is_set():
                for process in processes:
                    process.send_signal(signal.SIGSTOP)
                stop.wait(0.7)
                for process in processes:
                    process.send_signal(signal.SIGCONT)
                stop.wait(0.05)
        except psutil.NoSuchProcess:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

    with world.load(2, 32):
        thread = threading.Thread(target=throttle, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def flood(num_clients: int, max_tokens: int) -> Inject:
    """One tenant sends more than the workers can do."""

    @contextlib.contextmanager
    def inject(world: World) -> Iterator[None]:
        before = (world.folder / "tenants.toml").read_text()
        try:
            with world.load(num_clients, max_tokens, "noisy"):
                yield
        finally:
            (world.folder / "tenants.toml").write_text(before)
            time.sleep(3)  # until the server has read it

    return inject


@contextlib.contextmanager
def many_conversations(world: World) -> Iterator[None]:
    with world.load(80, 128, "noisy", STORY * 2):  # 240 blocks for those of each worker
        yield


@contextlib.contextmanager
def more_is_wanted_than_may_be(world: World) -> Iterator[None]:
    with world.load(6, 48):
        yield


def router_dies_again_and_again(world: World) -> AbstractContextManager[None]:
    """Once would not be noticed: it is back after 2 s. Waits between starts grow."""
    return until_doctor_has_looked(world, "router-1", "kill")


@contextlib.contextmanager
def until_doctor_has_looked(world: World, name: str, fault: str) -> Iterator[None]:
    """Each process of this name, again and again: `fault` is psutil's `suspend` or `kill`."""
    is_over = threading.Event()

    def repeat() -> None:
        while not (world.doctor_has_looked.is_set() or is_over.wait(0.2)):
            for process in world.processes(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    getattr(process, fault)()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def controller_hangs(world: World) -> AbstractContextManager[None]:
    """It is ended after 20 s, and the next one hangs as well."""
    return until_doctor_has_looked(world, "child controller ", "suspend")


@contextlib.contextmanager
def controller_dies_again_and_again(world: World) -> Iterator[None]:
    num_deaths, deadline = 0, time.monotonic() + 60
    while num_deaths < 4 and time.monotonic() < deadline:
        for process in world.processes("child controller "):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                num_deaths += 1
        time.sleep(1)
    yield


@contextlib.contextmanager
def state_disk_is_full(world: World) -> Iterator[None]:
    """By an old log, which may be deleted."""
    assert world.has_disk, "a small disk needs the right to mount one"
    (world.state_dir / "scaling").mkdir(exist_ok=True)
    old = world.state_dir / "scaling" / "endpoint.old.jsonl"
    with old.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 65536):
            pass
    try:
        yield
    finally:
        old.unlink(missing_ok=True)


@contextlib.contextmanager
def ray_is_gone(world: World) -> Iterator[None]:
    """With its head and all on it, but for the workers, which belong to nobody."""
    world.remember()
    workers = set(world.workers().values())
    head = world.ray()
    for process in (*head.children(recursive=True), head):
        if process.pid not in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    yield


@contextlib.contextmanager
def server_dies(world: World) -> Iterator[None]:
    world.remember()
    world.server.kill()
    yield


# Runbook -> (server, fault), in the order in which they are tried.
FAULTS: dict[str, tuple[str, Any]] = {
    "spans-lost": ("main", traces_go_nowhere),
    "state-store-down": ("main", redis_dies),
    "files-run-out": ("main", few_files),
    "controller-away": ("main", controller_hangs),
    "process-restarts": ("main", controller_dies_again_and_again),
    "state-folder-full": ("main", state_disk_is_full),
    "disk-store-fails": ("main", disk_is_full),
    "worker-restarts": ("main", decode_worker_dies_again_and_again),
    "itl-high": ("main", workers_are_slow),
    "worker-silent": ("main", decode_worker_stops),
    "queue-long": ("main", flood(30, 192)),
    "no-workers": ("main", all_workers_die),
    "requests-refused": ("main", flood(80, 48)),
    "requests-fail": ("main", all_workers_die_under_load),
    "tenant-refused": ("main", flood(80, 48)),
    "worker-down": ("main", decode_worker_dies),
    "ttft-high": ("main", flood(30, 192)),
    "kv-memory-full": ("memory", many_conversations),
    "scaling-limited": ("scaling", more_is_wanted_than_may_be),
    "router-process-down": ("routers", router_dies_again_and_again),
    "router-unreachable": ("routers", server_dies),
    "ray-lost": ("joined", ray_is_gone),
}
