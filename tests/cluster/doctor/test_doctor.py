"""`kvrelay doctor`: each fault is found and its fix named; a healthy machine has none."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.config import Config, build_config
from kvrelay.cluster.doctor import disk, engines, links, server, software, system
from kvrelay.cluster.doctor.examine import examine, machine_checks
from kvrelay.cluster.doctor.findings import Finding, Verdict
from kvrelay.engine.config import TiersSection
from kvrelay.kvtransfer.store.folder import FolderLock
from tests.cluster.state.stores import Server
from tests.support import tiny_qwen_vl
from tests.support.s3 import ACCESS_KEY, SECRET_KEY, s3_standin

MIB, GIB = 1 << 20, 1 << 30
WORKERS: list[dict[str, Any]] = [
    {"worker": "prefill-0", "state": "up", "machine": "a", "restarts": 0, "last_error": ""},
    {"worker": "decode-0", "state": "up", "machine": "a", "restarts": 0, "last_error": ""},
]


def doctor(prefix: str, *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The command after a shell's `prefix`: its exit code, and findings by check."""
    run = f'{prefix} exec "$0" -m cluster.cli.main doctor --json "$@"'
    done = subprocess.run(
        ["sh", "-c", run, sys.executable, *arguments], capture_output=True, text=True, timeout=60
    )
    assert not done.stderr, done.stderr
    return done.returncode, {each["check"]: each for each in json.loads(done.stdout)}


def settings(**sections: dict[str, Any]) -> Config:
    return build_config(sections, "a test")


def is_fault(finding: Finding, found: str, fix: str, verdict: Verdict = Verdict.FAIL) -> None:
    assert finding.verdict is verdict, finding
    assert found in finding.found
    assert fix in finding.fix


def is_well(*findings: Finding) -> None:
    for finding in findings:
        assert finding.verdict in (Verdict.OK, Verdict.SKIPPED), finding
        assert not finding.fix


@pytest.fixture
def rdma(tmp_path: Path) -> Path:
    """The /proc and /sys of a machine with a GPU, an RDMA card and a fast network card."""
    gpu = tmp_path / "sys/bus/pci/drivers/nvidia/0000:17:00.0"
    card = tmp_path / "sys/class/infiniband/mlx5_0"
    net = tmp_path / "sys/class/net/eth0"
    for folder in (gpu, card / "device", card / "ports/1", net / "device"):
        folder.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    (card / "device/numa_node").write_text("1\n")
    (card / "ports/1/state").write_text("4: ACTIVE\n")
    for name, text in (("operstate", "up"), ("speed", "100000"), ("mtu", "9000")):
        (net / name).write_text(f"{text}\n")
    driver = tmp_path / "proc/driver/nvidia/version"
    driver.parent.mkdir(parents=True)
    driver.touch()
    return tmp_path


def test_a_model_that_reads_images_needs_pillow(tmp_path: Path) -> None:
    tiny_qwen_vl.make(tmp_path)
    seeing = settings(model={"name": str(tmp_path)})
    is_well(engines.check_images(seeing, {"pillow": "12.0"}, on_gpu=False))
    is_well(engines.check_images(seeing, {}, on_gpu=True))
    is_well(engines.check_images(settings(), {}, on_gpu=False))
    found = engines.check_images(seeing, {}, on_gpu=False)
    is_fault(found, str(tmp_path), "pip install 'kvrelay[images]'", Verdict.WARN)
    (tmp_path / "preprocessor_config.json").unlink()
    is_well(engines.check_images(seeing, {}, on_gpu=False))


@pytest.mark.slow
def test_this_machine_is_well(tmp_path: Path) -> None:
    config = tmp_path / "kvrelay.toml"
    config.write_text(f"[sessions]\nstate_dir = '{tmp_path}/state'\n")
    code, found = doctor("", "--config", str(config))
    found.pop("memory left", None)  # a test beside this one kills workers
    bad = [each for each in found.values() if each["fix"]]
    assert (code, bad) == (0, [])
    assert "GB/s (memory: " in found["KV between processes"]["found"]


@pytest.mark.slow
def test_forced_tcp_few_descriptors_and_a_full_disk_are_found_here(tmp_path: Path) -> None:
    config = tmp_path / "kvrelay.toml"
    config.write_text(f"[tiers]\ndisk_gib = 900000\nhost_gib = 1\ndisk_path = '{tmp_path}/kv'\n")
    code, found = doctor("ulimit -n 300; UCX_TLS=tcp", "--config", str(config))
    assert code == 1
    assert "UCX_TLS=tcp" in found["KV between processes"]["found"]
    assert "unset UCX_TLS" in found["KV between processes"]["fix"]
    assert "150 clients" in found["open files"]["found"]
    assert "LimitNOFILE" in found["open files"]["fix"]
    assert "of 900000 GiB wanted" in found["disk tier"]["found"]
    assert "tiers.disk_gib" in found["disk tier"]["fix"]


@pytest.mark.slow
def test_wrong_settings_and_an_absent_server_are_said_in_a_line(tmp_path: Path) -> None:
    config = tmp_path / "kvrelay.toml"
    config.write_text("[tiers]\ndisk_gob = 1\n")
    for arguments, words in (
        (["--config", str(config)], "disk_gob"),
        (["--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
    ):
        command = [sys.executable, "-m", "kvrelay.cluster.cli.main", "doctor", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_kv_that_moves_slowly_within_a_machine_is_found() -> None:
    fast, slow = links.Link(5e9, 9e9), links.Link(2e8, 9e9)
    is_well(links.check_link(fast, None))
    is_well(links.check_link(fast, "tcp,sm,self"))
    is_well(links.check_link(fast, "^tcp"))
    is_fault(links.check_link(slow, None), "0.2 GB/s", "cgroup")
    tcp = links.Link(9e8, 9e9)
    is_fault(links.check_link(tcp, None), "0.9 GB/s", "ptrace")
    is_fault(links.check_link(fast, "tcp,self"), "UCX_TLS=tcp,self", "add sm")


def test_a_link_is_measured_where_ucx_prints_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_PROTO_INFO", "y")
    assert links.measure_link().rate > 0


def test_locked_memory_is_needed_with_rdma_only(rdma: Path, tmp_path: Path) -> None:
    config = settings(tiers={"host_gib": 4.0})
    is_fault(system.check_locked_memory(64 << 10, config, rdma), "4160 MiB", "memlock")
    is_well(system.check_locked_memory(system.UNLIMITED, config, rdma))
    is_well(system.check_locked_memory(64 << 10, config, tmp_path / "no devices"))


def test_little_memory_is_found(rdma: Path, tmp_path: Path) -> None:
    config = settings(tiers={"host_gib": 12.0})
    is_fault(system.check_shared_memory(64 * MIB, config), "64 MiB", "--shm-size=13g")
    is_fault(system.check_shared_memory(8 * GIB, config), "8.0 GiB", "host_gib", Verdict.WARN)
    is_well(system.check_shared_memory(16 * GIB, config))
    config = settings(engine={"kv_cache_gib": 3.0}, cluster={"prefill": 2, "decode": 2})
    is_fault(system.check_memory(8 * GIB, config, tmp_path / "no devices"), "12.0", "kv_cache_gib")
    is_well(system.check_memory(8 * GIB, config, rdma))
    vllm = settings(engine={"kv_cache_gib": 3.0, "runs": "vllm", "python": "python"})
    is_fault(system.check_memory(8 * GIB, vllm, tmp_path / "no devices"), "12.0", "kv_cache_gib")


def test_workers_of_another_layout_are_found() -> None:
    layouts = ["ab12", "ab12", "ff00"]
    workers = [{"worker": f"decode-{i}", "layout": each} for i, each in enumerate(layouts)]
    is_well(server.check_layouts({"workers": workers[:2]}))
    is_fault(server.check_layouts({"workers": workers}), "decode-2 (ff00)", "model.dtype")


def test_a_quota_below_the_threads_is_found(tmp_path: Path) -> None:
    assert system.check_cpus(16, settings(), tmp_path).verdict is Verdict.OK
    file = tmp_path / "sys/fs/cgroup/cpu.max"
    file.parent.mkdir(parents=True)
    file.write_text("max 100000\n")
    is_well(system.check_cpus(16, settings(), tmp_path))
    file.write_text("250000 100000\n")
    found = system.check_cpus(16, settings(), tmp_path)
    is_fault(found, "2.5 of 16 cores", "engine.threads = 2", Verdict.WARN)
    is_well(system.check_cpus(16, settings(engine={"threads": 2}), tmp_path))


def test_network_cards_are_looked_at(rdma: Path) -> None:
    is_well(system.check_mtu(rdma), system.check_rdma(rdma), system.check_numa(rdma))
    (rdma / "sys/class/net/eth0/mtu").write_text("1500\n")
    is_fault(system.check_mtu(rdma), "eth0: 1500", "mtu 9000", Verdict.WARN)
    (rdma / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    is_fault(system.check_rdma(rdma), "mlx5_0 port 1", "ibv_devinfo")
    (rdma / "sys/class/infiniband/mlx5_0/device/numa_node").write_text("0\n")
    is_fault(system.check_numa(rdma), "at node 1", "CUDA_VISIBLE_DEVICES", Verdict.WARN)


def test_a_slow_disk_and_a_closed_folder_are_found(tmp_path: Path) -> None:
    slow = disk.check_disk_tier(tmp_path, 0.1, lambda _: (2e9, 4e7))
    is_fault(slow, "40 MB/s read", "NVMe")
    is_well(disk.check_disk_tier(tmp_path, 0.1, lambda _: (2e9, 2e9)))
    written, read = disk.measure_disk(tmp_path)
    assert written > 0
    assert read > 0
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    is_fault(disk.check_disk_tier(tmp_path / "file", 0.1), "cannot write", "tiers.disk_path")
    is_fault(disk.check_state_folder(tmp_path / "file"), "cannot write", "sessions.state_dir")


def test_versions_that_do_not_fit_are_found(rdma: Path) -> None:
    required = ["torch>=2.6", "redis>=5; extra == 'redis'", "Ray[default]>=2.40"]
    is_well(software.check_packages(required, {"torch": "2.13.0+cu130", "ray": "2.60.0"}))
    old = software.check_packages(required, {"torch": "2.13.0", "ray": "2.60.0", "redis": "4.6"})
    is_fault(old, "redis 4.6 is not >=5", "constraints.txt")
    is_fault(software.check_packages(required, {"torch": "2.13.0"}), "ray is missing", "pip")
    is_well(software.check_packages(software.requirements(), software.installed()))
    fits = {"torch": "2.13.0+cu130", "nixl-cu13": "1.0"}
    is_well(software.check_cuda(fits, rdma))
    mixed = {"torch": "2.13.0+cu130", "nixl-cu12": "1.0"}
    is_fault(software.check_cuda(mixed, rdma), "NIXL is nixl-cu12", "nixl-cu13")
    is_fault(software.check_cuda({"torch": "2.13.0+cpu"}, rdma), "for CPUs", "deploy/README.md")


def test_a_server_is_asked_for_its_workers_and_clock() -> None:
    status: dict[str, Any] = {"workers": WORKERS}
    is_well(server.check_workers(status))
    down = WORKERS[0] | {"state": "backoff", "last_error": "no memory"}
    is_fault(server.check_workers({"workers": [down]}), "is backoff", "no-workers.md")
    found = server.check_workers({"workers": [down, WORKERS[1]]})
    is_fault(found, "prefill-0 is backoff (no memory)", "worker-down.md")
    each = [down | {"model": "chat"}, WORKERS[1] | {"model": "small"}]
    found = server.check_workers({"workers": each})
    is_fault(found, "(no memory); chat has no other", "no-workers.md")
    often = {"workers": [WORKERS[0] | {"restarts": 9}]}
    is_fault(server.check_workers(often), "9 restarts", "worker-restarts.md", Verdict.WARN)
    draining = {"workers": [WORKERS[0] | {"state": "draining"}, WORKERS[1]]}
    is_well(server.check_workers(draining))
    now = time.time()
    is_well(server.check_server_clock(f"kvrelay_clock_seconds {now + 0.4}\n", now))
    off = server.check_server_clock(f"kvrelay_clock_seconds {now - 30}\n", now)
    is_fault(off, "-30.0 s", "timesyncd")


def test_a_server_is_asked_for_its_controller_routers_and_ray() -> None:
    away = {"known": True, "has_ray": True, "age_s": 31.0}
    (found,) = server.check_controller({"controller": away})
    is_fault(found, "said nothing for 31 s", "controller-away.md")
    (found,) = server.check_controller({"controller": {"known": False, "age_s": 2.0}})
    is_fault(found, "said nothing for 2 s", "controller-away.md")
    there, ray = server.check_controller({"controller": away | {"age_s": 0.5, "has_ray": False}})
    is_well(there)
    is_fault(ray, "no worker can be started", "ray-lost.md")
    for has_ray in (True, None):  # None: it has not begun to start
        well = {"controller": away | {"age_s": 0.5, "has_ray": has_ray}}
        is_well(*server.check_controller(well))
    routers = [{"router": "router-0", "state": "up"}]
    is_well(server.check_routers({"routers": routers}))
    routers.append({"router": "router-1", "state": "backoff", "last_error": "SIGSEGV"})
    found = server.check_routers({"routers": routers})
    is_fault(found, "router-1 is backoff (SIGSEGV)", "router-process-down.md")
    is_well(server.check_hangs({"workers": WORKERS}))
    hung = server.check_hangs({"workers": [WORKERS[0] | {"hangs": 2}]})
    is_fault(hung, "prefill-0: 2", "worker-silent.md", Verdict.WARN)


def test_a_server_is_asked_for_restarts_room_files_and_its_log() -> None:
    restarts = 'kvrelay_process_restarts_total{kind="%s",process="%s"} %d\n'
    is_well(server.check_restarts(restarts % ("worker", "decode-0", 9)))
    often = server.check_restarts(restarts % ("controller", "controller", 4))
    is_fault(often, "controller: 4 restarts", "process-restarts.md", Verdict.WARN)
    room = "kvrelay_state_folder_free_bytes %g\n"
    is_well(server.check_server_room(room % 9e9))
    is_fault(server.check_server_room(room % 4e6), "4 MiB", "state-folder-full.md")
    inodes = room % 9e9 + "kvrelay_state_folder_free_files 3\n"
    is_fault(server.check_server_room(inodes), "and 3 files", "state-folder-full.md")
    hangs = room % 9e9 + "kvrelay_state_folder_unwritten_seconds 17\n"
    is_fault(server.check_server_room(hangs), "for 17 s", "state-folder-full.md")
    is_fault(server.check_server_room(""), "does not answer", "state-folder-full.md")
    files = "process_open_fds 10\nprocess_max_fds 100\nkvrelay_controller_max_files 100\n"
    is_well(server.check_server_files(files + "kvrelay_controller_open_files 80\n"))
    found = server.check_server_files(files + "kvrelay_controller_open_files 81\n")
    is_fault(found, "router: 10 of 100, controller: 81 of 100", "files-run-out.md")
    lost = 'kvrelay_log_lines_dropped_total{process="router"} %d\n'
    is_well(server.check_server_log(lost % 0))
    is_fault(server.check_server_log(lost % 3), "3 lines", "log-lost.md", Verdict.WARN)


def test_kv_that_workers_have_left_on_disk_is_named_with_what_frees_it(tmp_path: Path) -> None:
    checks = machine_checks(settings(tiers={"disk_path": str(tmp_path)}))
    (none,) = examine({"KV on disk": checks["KV on disk"]})
    is_well(none)
    for part in ("", "rank-1-of-2"):
        store = tmp_path / part / ("ab" * 16) / "decode 0"
        store.mkdir(parents=True)
        (store / "blocks.kv").write_bytes(b"x")
    (found,) = examine({"KV on disk": checks["KV on disk"]})
    is_well(found)
    assert f"'{store}'" in found.found
    assert "2 worker(s)" in found.found
    lock = FolderLock.take(store / "lock", 0.0)
    (found,) = examine({"KV on disk": checks["KV on disk"]})
    assert "1 worker(s)" in found.found, "one has it open"
    lock.release()


def test_the_state_store_answers_or_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Server(tmp_path)
    store.start()
    try:
        answers, clock = server.check_store(store.url, 5.0)
        is_well(clock)
        assert answers.verdict in (Verdict.OK, Verdict.WARN)  # a busy machine may answer late
        there = time.time
        monkeypatch.setattr(server.time, "time", lambda: there() + 60)
        is_fault(server.check_store(store.url, 5.0)[1], "-60.0 s", "timesyncd")
    finally:
        store.kill()
    (gone,) = server.check_store(store.url, 1.0, "batches' store")
    assert gone.check == "batches' store"
    is_fault(gone, "does not answer", "state-store-down.md")
    is_well(*server.check_store("", 1.0))


def test_a_check_that_cannot_be_made_has_failed_and_the_others_go_on() -> None:
    def broken() -> Finding:
        raise PermissionError(13, "Permission denied", "/dev/shm")

    checks = {"first": broken, "second": lambda: system.check_shared_memory(GIB, settings())}
    first, second = examine(checks)
    is_fault(first, "/dev/shm", "user")
    is_well(second)


def test_a_bucket_that_does_not_answer_as_it_should_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    keys = f"aws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\n"
    file.write_text(f"[default]\n{keys}")
    with s3_standin() as server:
        tiers = TiersSection(
            object_bucket="kv", object_endpoint=server.url, object_credentials=str(file)
        )
        monkeypatch.setattr(disk, "SLOW_ANSWER_S", 60.0)
        is_well(disk.check_object_tier(tiers))
        server.access_key = "another"
        is_fault(disk.check_object_tier(tiers), "403 InvalidAccessKeyId", "object_bucket")
        file.unlink()
        is_fault(disk.check_object_tier(tiers), "no credentials can be read", "object_bucket")


def test_kv_events_that_others_can_read_or_that_have_no_replay() -> None:
    def check(versions: dict[str, str], **events: str) -> Finding:
        return software.check_events(settings(events=events).events, versions)

    here, there = "tcp://127.0.0.1:5557", "tcp://*:5557"
    is_well(check({}), check({"pyzmq": "27"}, endpoint=here, replay_endpoint="ipc:///run/replay"))
    is_fault(check({}, endpoint=here), "pyzmq is missing", "kvrelay[events]")
    is_fault(check({"pyzmq": "27"}, endpoint=here), "replay", "set it", Verdict.WARN)
    is_fault(
        check({"pyzmq": "27"}, endpoint=there, replay_endpoint=here),
        there,
        "network of its own",
        Verdict.WARN,
    )
