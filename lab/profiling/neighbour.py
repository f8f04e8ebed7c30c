"""The other worker of a profile, as a process of its own.

Life: reads its setup from stdin, builds its runner as a prefill worker has it, answers with where
it can be reached; then, for each number that it reads, computes prompts of so many tokens until the
next line comes, and answers with how long each pass took; ends with stdin.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from dataclasses import dataclass

import msgspec

from kvrelay.cluster.config import Config
from kvrelay.cluster.prepare import prepare_model
from kvrelay.engine.host import LoopThread
from kvrelay.engine.kv.events import KVSnapshotRequest
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.wire.wire import Wire
from kvrelay.kvtransfer.agents.nixl import NixlAgent
from kvrelay.lab.profiling.forward import ForwardPasses, running
from kvrelay.worker.threads import NICENESS

NAME, ASKER = "profile-neighbour", "profile"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Setup:
    config: Config
    threads: int
    on_cpu: bool
    token: bytes
    host: str  # where the wire of whoever asks is
    port: int


@dataclass(frozen=True, slots=True)
class Reachable:
    """What a neighbour answers to its setup."""

    metadata: bytes
    num_blocks: int
    host: str
    port: int


def main() -> None:
    setup = msgspec.json.decode(sys.stdin.readline(), type=Setup)
    if setup.on_cpu:
        os.nice(NICENESS)
    model = prepare_model(setup.config, 0, lambda _: None)
    with running(setup.config, model, setup.threads) as runner:
        _serve(setup, runner)


def _serve(setup: Setup, runner: ModelRunner) -> None:
    engine = setup.config.engine.sized(gpu=not setup.on_cpu)
    passes = ForwardPasses(runner, 0.0, engine.max_num_batched_tokens)
    passes.fill_pool()
    agent = NixlAgent(NAME, runner.kv_pool)
    loop = LoopThread(NAME)
    host, port = loop.submit(_echo(setup)).result(30.0)
    _answer(Reachable(agent.metadata(), passes.num_blocks, host, port))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_into, args=(lines,), daemon=True).start()
    try:
        while line := lines.get():
            _answer(_compute(passes, int(line), lines))
            if not lines.get():
                break
    finally:
        agent.close()
        loop.close()


def _read_into(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put("")  # twice: one may end a computation
    lines.put("")


async def _echo(setup: Setup) -> tuple[str, int]:
    """A wire that sends back what it is asked."""

    def answer(_to: str, message: object) -> None:
        assert isinstance(message, KVSnapshotRequest)
        wire.send(ASKER, message)

    wire = Wire(NAME, setup.token, answer)
    wire.set_address(ASKER, setup.host, setup.port, 1)
    return await wire.listen(LOOPBACK)


def _compute(passes: ForwardPasses, num_tokens: int, lines: queue.SimpleQueue[str]) -> list[float]:
    """Seconds of each pass of so many tokens, until there is a line."""
    found: list[float] = []
    while not found or lines.empty():
        found.append(passes.run(passes.chunk(0, num_tokens)))
    return found


def _answer(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
