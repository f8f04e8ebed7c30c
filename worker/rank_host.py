"""Where a worker's further ranks run: `python -m kvrelay.worker.rank_host NAME FD`.

A process on each machine, beside the worker's own, that has some of its GPUs. It waits for the
worker to connect, once for each rank, and hands each connection to a follower's process. It ends
with these, and they with the worker.

FD is a channel (`engine.wire.channel`): a RankHostSpec comes, and a RankHost or a StartFailed goes,
then ProcessEnds.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from kvrelay.engine.model.parallel.link import RankHost, admit, start_process
from kvrelay.engine.node import NodeId
from kvrelay.engine.stderr import set_up_process
from kvrelay.engine.wire.channel import BlockingChannel, inherited, register
from kvrelay.worker.messages import ProcessEnds, StartFailed

log = logging.getLogger("kvrelay.ranks")

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class RankHostSpec:
    cluster: str  # name of the cluster, for operators
    worker: NodeId
    epoch: int
    host: str  # where it listens: the worker's machine reaches this one by it
    num_ranks: int
    start_timeout_s: float  # for the worker to connect


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
        guardian.send(RankHost(spec.host, server.getsockname()[1], spec.num_ranks, secret))
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
    """One for each that connects and knows the secret; fewer if the time is over."""
    deadline = time.monotonic() + timeout_s
    ranks: list[subprocess.Popen[bytes]] = []
    while len(ranks) < num_ranks and (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            connected, address = server.accept()
        except OSError:  # it took too long, or who came has gone
            continue
        with connected:
            try:
                admit(connected, secret)
            except OSError as error:
                log.warning("refused a connection from %s: %s", address[0], error)
                continue
            ranks.append(start_process(connected))
    return ranks


def main() -> None:
    if os.fork():  # a daemon, as a worker's process is
        os._exit(0)
    os.setsid()
    set_up_process()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    guardian = BlockingChannel(inherited(sys.argv[2]))
    spec: RankHostSpec = guardian.receive()
    guardian.send(ProcessEnds(serve(spec, guardian)))
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
