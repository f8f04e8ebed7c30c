"""How KV moves between two processes of this machine: how fast."""

from __future__ import annotations

import base64
import os
import select
import subprocess
import sys
import time
from statistics import median

import numpy as np
from msgspec import Struct

from kvrelay.cluster.doctor.findings import Finding, fail, ok
from kvrelay.kvtransfer.agent import AgentError, CopyBlocks, MoveId

NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 20
REPEATS = 7
TIMEOUT_S = 20.0
LEAST_SHARE = 1 / 6  # share of what one thread copies in memory; TCP here has a tenth
SHARED_MEMORY = frozenset({"all", "shm", "sm", "mm", "cma", "knem", "xpmem", "posix", "sysv"})
"""By which names UCX_TLS lets UCX use it."""
PEER = "doctor-peer"


class Link(Struct, frozen=True):
    """As measured. Rates are bytes per second."""

    rate: float
    memory_rate: float  # a copy's within this process


def check_link(link: Link, tls: str | None) -> Finding:
    """`tls`: UCX_TLS, as the environment has it."""
    check = "KV between processes"
    rates = f"{link.rate / 1e9:.1f} GB/s (memory: {link.memory_rate / 1e9:.1f} GB/s)"
    if tls and not tls.startswith("^") and SHARED_MEMORY.isdisjoint(tls.split(",")):
        why = f"UCX_TLS={tls} is in the environment, and has no shared memory"
        return fail(check, f"{rates}: {why}", "unset UCX_TLS, or add sm to it")
    if link.rate < LEAST_SHARE * link.memory_rate:
        return fail(
            check,
            f"slow: {rates}",
            "UCX_PROTO_INFO=y prints what UCX uses. If it is tcp, allow ptrace between processes "
            "(kernel.yama.ptrace_scope = 0, CAP_SYS_PTRACE of a container) or give more /dev/shm; "
            "else look for what throttles it: cgroup limits of CPU (cpu.max), another process on "
            "the same cores, UCX_* in the environment",
        )
    return ok(check, rates)


def measure_and_check() -> Finding:
    tls = os.environ.get("UCX_TLS")
    try:
        return check_link(measure_link(), tls)
    except AgentError as error:
        fix = "unset UCX_TLS" if tls else "make setup; python -c 'import nixl' says what is missing"
        return fail("KV between processes", f"NIXL does not move KV: {error}", fix)


def measure_link() -> Link:
    """Reads blocks of another process, which is started for it, and looks at what has come. Raises
    AgentError."""
    command = [sys.executable, "-m", "kvrelay.cluster.doctor.links"]
    env = {**os.environ, "UCX_LOG_FILE": "stderr"}  # its stdout is for its metadata
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        try:
            return _read_from(_metadata_of(peer))
        finally:
            peer.kill()


def _metadata_of(peer: subprocess.Popen[bytes]) -> bytes:
    assert peer.stdout is not None
    ready, _, _ = select.select([peer.stdout], [], [], TIMEOUT_S)
    line = peer.stdout.readline() if ready else b""
    if not line:
        raise AgentError(f"the other process did not come up in {TIMEOUT_S:g} s")
    return base64.b64decode(line)


def _read_from(metadata: bytes) -> Link:
    from kvrelay.kvtransfer.movers.nixl import NixlAgent
    from kvrelay.kvtransfer.movers.pool import make_host_arena

    pool = make_host_arena(NUM_BLOCKS, BLOCK_BYTES, pinned=False)
    pool[:] = 0
    agent = NixlAgent("doctor", pool)
    blocks = tuple(range(NUM_BLOCKS))
    read = CopyBlocks(MoveId(1), PEER, 1, blocks, blocks, TIMEOUT_S)
    try:
        agent.connect(PEER, 1, NUM_BLOCKS, metadata)
        taken_s = []
        for _ in range(REPEATS):
            started = time.monotonic()
            handle = agent.copy(read)
            while (done := agent.poll(handle)) is None:
                if time.monotonic() - started > TIMEOUT_S:
                    raise AgentError(f"a read did not end in {TIMEOUT_S:g} s")
                time.sleep(0.0001)  # NIXL has no call that waits; its own thread needs the core
            if done.error is not None:
                raise AgentError(done.error)
            taken_s.append(time.monotonic() - started)
        if not (pool == _pattern()).all():
            raise AgentError("what was read is not what the other process has")
        return Link(pool.nbytes / median(taken_s), _memory_rate())
    finally:
        agent.close()


def _pattern() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Each block is one byte again and again: `[NUM_BLOCKS, 1]`."""
    return np.arange(1, NUM_BLOCKS + 1, dtype=np.uint8)[:, None]


def _memory_rate() -> float:
    source = np.ones(NUM_BLOCKS * BLOCK_BYTES, np.uint8)
    target = np.zeros_like(source)
    taken_s = []
    for _ in range(REPEATS):
        started = time.monotonic()
        target[:] = source
        taken_s.append(time.monotonic() - started)
    return source.nbytes / median(taken_s)


def _serve() -> None:
    """The other process: it says where its blocks are, and waits for its end."""
    from kvrelay.kvtransfer.movers.nixl import NixlAgent
    from kvrelay.kvtransfer.movers.pool import make_host_arena

    pool = make_host_arena(NUM_BLOCKS, BLOCK_BYTES, pinned=False)
    pool[:] = _pattern()
    agent = NixlAgent(PEER, pool)
    sys.stdout.write(base64.b64encode(agent.metadata()).decode() + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
