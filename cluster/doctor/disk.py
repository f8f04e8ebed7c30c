"""What a server writes to: whether it may, how much fits, and how fast it goes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kvrelay.cluster.doctor.findings import Finding, fail, ok, rm, warn
from kvrelay.cluster.doctor.system import GIB, MIB
from kvrelay.engine.config import TiersSection

PROBE_BYTES = 64 * MIB
CHUNK = 16 * MIB
MAX_PROBE_S = 5.0
LEAST_RATE = 100e6  # bytes per second; below it, computing KV again is quicker
SLOW_ANSWER_S = 0.5
LEAST_FREE = 64 * MIB  # in the state directory


def check_disk_tier(
    folder: Path, gib: float, measure: Callable[[Path], tuple[float, float]] | None = None
) -> Finding:
    """`gib`: `tiers.disk_gib`. `measure`: (written, read) bytes per second in a folder."""
    check = "disk tier"
    wrong = _unusable(check, folder, "tiers.disk_path")
    if wrong is not None:
        return wrong
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = _free(folder)
    if free + held < gib * GIB:
        return fail(
            check,
            f"{free / GIB:.1f} GiB free at {folder}, of {gib:g} GiB wanted",
            "lower tiers.disk_gib, free space, or set tiers.disk_path to another disk",
        )
    written, read = (measure or measure_disk)(folder)
    rates = f"{written / 1e6:.0f} MB/s written, {read / 1e6:.0f} MB/s read at {folder}"
    if min(written, read) < LEAST_RATE:
        return fail(
            check,
            f"slow: {rates}",
            "set tiers.disk_path to a local NVMe disk; below 100 MB/s it is quicker to compute "
            "KV again, so tiers.disk_gib = 0 is better",
        )
    return ok(check, rates)


def check_left_stores(folder: Path, sizes: Mapping[Path, int]) -> Finding:
    """`sizes`: bytes of each store in `folder` that no worker has."""
    check = "KV on disk"
    if not sizes:
        return ok(check, f"no worker has left any at {folder}")
    return ok(
        check,
        f"{sum(sizes.values()) / GIB:.1f} GiB of {len(sizes)} worker(s) that are gone; the next"
        f" server takes it over, this frees it: {rm(sizes)}",
    )


def check_object_tier(tiers: TiersSection) -> Finding:
    """Lists one key, as a worker does that starts."""
    from kvrelay.kvtransfer.store.bucket import BucketError, bucket_of

    check, bucket = "object tier", bucket_of(tiers)
    started = time.monotonic()
    try:
        bucket.list(tiers.object_prefix, limit=1)
    except BucketError as error:
        return fail(check, str(error), "correct that, or leave tiers.object_bucket empty")
    took_s = time.monotonic() - started
    found = f"{bucket} answers in {1e3 * took_s:.0f} ms"
    if took_s > SLOW_ANSWER_S:
        return warn(check, found, "use a store that is nearer: KV would be computed sooner")
    return ok(check, found)


def check_state_folder(folder: Path) -> Finding:
    check = "state directory"
    wrong = _unusable(check, folder, "sessions.state_dir")
    if wrong is not None:
        return wrong
    free = _free(folder)
    if free < LEAST_FREE:
        return warn(
            check,
            f"{free / MIB:.0f} MiB free at {folder}",
            "free space, or set sessions.state_dir: sessions would not outlive the server",
        )
    return ok(check, f"{free / GIB:.1f} GiB free at {folder}")


def _unusable(check: str, folder: Path, setting: str) -> Finding | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        return fail(
            check, f"cannot write to {folder}: {why}", f"chown or free it, or set {setting}"
        )
    return None


def _free(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def measure_disk(folder: Path) -> tuple[float, float]:
    """(written, read) bytes per second of one file, on the disk rather than in the page cache. It
    ends after `MAX_PROBE_S` each way, however slow the disk is between two chunks."""
    chunk = os.urandom(CHUNK)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="kvrelay-doctor-", buffering=0) as file:
        started, num = time.monotonic(), 0
        while num < PROBE_BYTES and time.monotonic() - started < MAX_PROBE_S:
            num += file.write(chunk)
            os.fdatasync(file.fileno())
        written = num / (time.monotonic() - started)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started, num = time.monotonic(), 0
        while time.monotonic() - started < MAX_PROBE_S and (part := file.read(CHUNK)):
            num += len(part)
        return written, num / (time.monotonic() - started)
