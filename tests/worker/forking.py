"""A process that workers are forked from, where a worker says what it sees and waits: `python -m
tests.worker.forking KEY LINGER_S UNUSED_S`, until whatever is at its standard input ends."""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

from kvrelay.cluster.processes import fork_server
from kvrelay.engine.model.parallel import link
from kvrelay.engine.wire.channel import BlockingChannel, inherited
from kvrelay.worker.messages import ProcessEnds


def run(fd: int) -> NoReturn:
    channel = BlockingChannel(inherited(fd))
    channel.send(
        ProcessEnds(repr((dict(os.environ), os.getcwd(), len(os.listdir("/proc/self/fd")))))
    )
    ranks = [Connection(os.dup(rank.connected.fileno())) for rank in link.forked]
    for number, rank in enumerate(ranks):
        rank.send({"RANK": str(number)})
    if ranks:
        channel.send(ProcessEnds(repr([rank.recv() for rank in ranks])))
    channel.receive()
    os._exit(0)


def follow() -> None:
    leader = Connection(int(sys.argv[1]))
    given, files = leader.recv(), len(os.listdir("/proc/self/fd"))
    leader.send((os.getpid(), os.getppid(), dict(os.environ) | given, files))
    leader.recv()


def main() -> None:
    fork_server.run, fork_server.follow = run, follow
    fork_server.LINGER_S, fork_server.UNUSED_S = map(float, sys.argv[2:4])
    listening = fork_server.listen(sys.argv[1])
    print("another listens" if listening is None else "listens", flush=True)
    if listening is not None:
        fork_server.ForkServer(socket.socket(fileno=os.dup(0))).serve(listening)


if __name__ == "__main__":
    main()
