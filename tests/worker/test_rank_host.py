"""Ranks on another machine: a process there starts them for whoever knows its secret."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.link import RankHost, reach
from kvrelay.engine.model.parallel.runner import RanksLost
from kvrelay.engine.step import Step
from kvrelay.engine.wire.channel import BlockingChannel, command
from kvrelay.worker.messages import ProcessEnds, StartFailed
from kvrelay.worker.processes import (
    RANKS_MODULE,
    kill_workers,
    name_of,
    worker_processes,
)
from kvrelay.worker.rank_host import MAX_PENDING, RankHostSpec
from tests.engine.model.runners import model_runner, parallel_runner
from tests.engine.model.test_runner import generate
from tests.engine.model.tiny import make_checkpoint, scheduled, tokens_of

HERE, THERE = "127.0.0.1", "127.0.0.2"  # two addresses of one machine
OPTIONS = {"num_blocks": 24, "dtype": "float32", "device": "cpu", "threads": 2}
PROMPT, BLOCKS = tokens_of(40, seed=1), [5, 3, 1, 7]
CLUSTER = f"test-ranks-{os.getpid()}"
SPEC = RankHostSpec(CLUSTER, "decode-0", 1, THERE, 1, 60.0)


@contextmanager
def rank_host(spec: RankHostSpec) -> Iterator[tuple[int, Any, BlockingChannel]]:
    """A process of it: its id, its answer, and the channel to it."""
    mine, its = socket.socketpair()
    name = name_of(spec.cluster, spec.worker, spec.epoch)
    with mine:
        with its:
            run = command(RANKS_MODULE, name, end=its)
            subprocess.run(run, pass_fds=(its.fileno(),), check=True, timeout=60)
        channel = BlockingChannel(mine)
        channel.send(spec)
        try:
            yield channel.hello().pid, channel.receive(), channel
        finally:
            kill_workers(spec.cluster)


@pytest.mark.slow
def test_the_life_of_a_worker_with_a_rank_elsewhere(tmp_path: Path) -> None:
    """One start for all, because it takes seconds."""
    make_checkpoint("qwen2", tmp_path)
    expected = generate(model_runner(tmp_path, **OPTIONS), PROMPT, BLOCKS, 8, temperature=0.0)
    before = psutil.Process().children()  # other tests have left some
    with rank_host(SPEC) as (pid, place, channel):
        assert isinstance(place, RankHost)
        assert (place.host, place.num_ranks) == (THERE, 1)
        # A connection without the secret is refused, and counts for no rank.
        with pytest.raises(ConnectionError, match="did not prove itself"):
            reach(replace(place, secret=b"guessed"))
        with socket.create_connection((place.host, place.port)) as silent:
            silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert silent.recv(1000)
        older = replace(place, package="9.9")
        with pytest.raises(ModelError, match=r"has kvrelay 9.9, and its leader .*: install one"):
            parallel_runner(tmp_path, 2, host=HERE, further=(older,), **OPTIONS)
        runner = parallel_runner(tmp_path, 2, host=HERE, further=(place,), **OPTIONS)
        assert generate(runner, PROMPT, BLOCKS, 8, temperature=0.0) == expected
        assert psutil.Process().children() == before
        (rank,) = psutil.Process(pid).children()
        ends = {end.laddr.ip for end in rank.net_connections() if end.status == "ESTABLISHED"}
        assert THERE in ends
        assert [found for _, *found in worker_processes(CLUSTER, RANKS_MODULE)] == [["decode-0", 1]]

        rank.kill()  # as if its machine were gone: the worker is
        lost: list[Exception] = []
        runner.when_lost(lost.append)
        assert channel.receive() == ProcessEnds("its ranks have ended")
        with pytest.raises((RanksLost, RuntimeError, OSError)):
            runner.execute(Step(1, [scheduled(PROMPT, 0, BLOCKS)]))
        runner.close()
        assert isinstance(lost[0], RanksLost)

    with rank_host(SPEC) as (pid, place, channel):  # and the other way round: they end with it
        runner = parallel_runner(tmp_path, 2, host=HERE, further=(place,), **OPTIONS)
        runner.close()
        assert channel.receive() == ProcessEnds("its ranks have ended")
    with pytest.raises(ModelError, match=rf"rank 1 of this worker is not at {THERE}:{place.port}"):
        parallel_runner(tmp_path, 2, host=HERE, further=(place,), **OPTIONS)


def test_a_worker_reaches_its_rank_at_once_whoever_else_connects() -> None:
    with rank_host(SPEC) as (pid, place, _), contextlib.ExitStack() as closing:
        for number in range(MAX_PENDING + 20):
            where = (f"127.0.0.{3 + number % 4}", 0)
            silent = socket.create_connection((place.host, place.port), source_address=where)
            closing.enter_context(silent)
            if number % 2:
                silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
        began = time.monotonic()
        with reach(place):
            assert time.monotonic() - began < 1.0
            assert len(wait_for_children(psutil.Process(pid))) == 1


def test_a_rank_host_without_connections_ends() -> None:
    with rank_host(replace(SPEC, start_timeout_s=0.2)) as (_, place, channel):
        assert isinstance(place, RankHost)
        assert channel.receive() == ProcessEnds("the worker did not connect within 0.2 s")


def test_an_address_that_is_not_of_this_machine_is_told() -> None:
    with rank_host(replace(SPEC, host="192.0.2.7")) as (_, answer, _):
        assert isinstance(answer, StartFailed)
        assert answer.reason.startswith("no rank can listen at 192.0.2.7: ")
        assert not answer.permanent


def test_one_of_an_older_epoch_ends_with_its_ranks(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path)
    with rank_host(SPEC) as (pid, place, _), reach(place) as connected:
        process = psutil.Process(pid)
        (rank,) = wait_for_children(process)
        kill_workers(CLUSTER, "decode-0", up_to=0)
        assert process.is_running()
        kill_workers(CLUSTER, "decode-0", up_to=1)
        assert psutil.wait_procs([process, rank], timeout=10)[1] == []
        assert connected.recv(1) == b""


def wait_for_children(process: psutil.Process) -> list[psutil.Process]:
    for _ in range(100):
        if found := process.children():
            return found
        time.sleep(0.05)
    return []
