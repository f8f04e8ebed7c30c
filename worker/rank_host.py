"""Where a worker's further ranks run: `python -m kvrelay.worker.rank_host NAME FD`.

A process on each machine, beside the worker's own, that has some of its GPUs. It waits for the
worker to connect, once for each rank, and hands each connection to a follower's process. It ends
with these, and they with the worker.

FD is a channel (`engine.wire.channel`): a RankHostSpec comes, and a RankHost or a StartFailed goes,
then ProcessEnds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from kvrelay.engine.logs import LogSection, set_up, tell_ranks
from kvrelay.engine.model.parallel.link import RankHost, admit, start_process
from kvrelay.engine.node import NodeId
from kvrelay.engine.stderr import set_up_process
from kvrelay.engine.wire.channel import BlockingChannel, inherited, own_version, register
from kvrelay.engine.wire.pending import PendingConnections
from kvrelay.worker.messages import ProcessEnds, StartFailed

log = logging.getLogger("kvrelay.ranks")

SECRET_BYTES = 32
MAX_PENDING, MAX_PENDING_OF_ADDRESS = 64, 32  # connections that have not proved themselves yet


@dataclass(frozen=True, slots=True)
class RankHostSpec:
    cluster: str  # name of the cluster, for operators
    worker: NodeId
    epoch: int
    host: str  # where it listens: the worker's machine reaches this one by it
    num_ranks: int
    start_timeout_s: float  # for the worker to connect
    log: LogSection = field(default_factory=LogSection)
    num_gpus: int = 0  # that its ranks are given
    threads: int = 0  # that each of them has


register(RankHostSpec, RankHost)


def serve(spec: RankHostSpec, guardian: BlockingChannel) -> str:
    """Serves the worker; returns the reason why it ends."""
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    try:
        server = socket.create_server((spec.host, 0), family=family)
    except OSError as error:
        why = f"no rank can listen at {spec.host}: {error}"
        guardian.send(StartFailed(spec.worker, spec.epoch, why, permanent=False))
        return why
    secret = secrets.token_bytes(SECRET_BYTES)
    with server:
        port, package = server.getsockname()[1], own_version()
        guardian.send(RankHost(spec.host, port, spec.num_ranks, secret, package))
        ranks = start_ranks(server, secret, spec.num_ranks, spec.start_timeout_s)
    if len(ranks) < spec.num_ranks:
        for rank in ranks:
            rank.kill()
        return f"the worker did not connect within {spec.start_timeout_s:g} s"
    for rank in ranks:
        rank.wait()
    return "its ranks have ended"


def start_ranks(
    server: socket.socket, secret: bytes, num_ranks: int, timeout_s: float
) -> list[subprocess.Popen[bytes]]:
    """One for each that connects and knows the secret; fewer if the time is over. Each connection
    proves itself on a thread of its own, so that nobody waits for one who says nothing."""
    deadline = time.monotonic() + timeout_s
    ranks: list[subprocess.Popen[bytes]] = []
    pending: PendingConnections[socket.socket] = PendingConnections(
        MAX_PENDING, MAX_PENDING_OF_ADDRESS
    )
    refused: Counter[str] = Counter()  # by address
    changing = threading.Lock()  # all of these
    woken, wakes = socket.socketpair()
    server.setblocking(False)

    def prove(connected: socket.socket, address: str) -> None:
        with connected:
            try:
                admit(connected, secret)
            except OSError as error:
                with changing:
                    pending.remove(connected)
                    refused[address] += 1
                    if refused[address] == 1:
                        log.warning("refused a connection from %s: %s", address, error)
                return
            with changing:
                pending.remove(connected)
                if len(ranks) < num_ranks:
                    ranks.append(start_process(connected))
        with contextlib.suppress(OSError):  # nobody waits any more
            wakes.send(b"\0")

    with woken, wakes:
        while len(ranks) < num_ranks and (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([server, woken], [], [], left)
            if woken in ready:
                woken.recv(num_ranks)
            if server not in ready:
                continue
            try:
                connected, (address, *_) = server.accept()
            except OSError:  # who came has gone
                continue
            with changing:
                dropped = pending.add(connected, address)
            if dropped is not None:
                _cut(dropped)
            threading.Thread(target=prove, args=(connected, address), daemon=True).start()
        with changing:
            num_ranks = len(ranks)  # no more from now on
            for each in pending.all():
                _cut(each)
    if refused:
        log.warning("connections that were refused, by address: %s", refused.most_common(5))
    return ranks


def _cut(connected: socket.socket) -> None:
    """Ends what its thread waits for; that closes it."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def main() -> None:
    if os.fork():  # a daemon, as a worker's process is
        os._exit(0)
    os.setsid()
    set_up_process()
    guardian = BlockingChannel(inherited(sys.argv[2]))
    spec: RankHostSpec = guardian.receive()
    set_up(spec.log, f"{spec.worker}-ranks", takes_stderr=True)
    tell_ranks(spec.log, spec.worker)
    guardian.send(ProcessEnds(serve(spec, guardian)))
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
