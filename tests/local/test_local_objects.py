"""An object store below the workers: what one has written another one reads, on whatever machine,
and whatever the store does, the tokens are the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvrelay.engine.stats import Role
from kvrelay.kvtransfer.movers import object as objects
from tests.local.test_local import GREEDY, REMOTE
from tests.local.test_local import model_dir as model_dir
from tests.local.test_local_tiers import (
    CACHED,
    ENGINE,
    LENGTH,
    MIB,
    NUM_PROMPTS,
    PROMPTS,
    TIMEOUT_S,
    ask,
    assert_clean,
    counted,
    fill,
    load_all,
    num_cached,
)
from tests.local.test_local_tiers import (
    expected as expected,
)
from tests.support.local import LocalCluster
from tests.support.s3 import ACCESS_KEY, SECRET_KEY, S3StandIn, find_no_credentials, s3_standin

PATIENT = structs.replace(ENGINE, read_floor_s=TIMEOUT_S, read_timeout_s=TIMEOUT_S)
# Prompts' and answers': with some left out, those of the last prompt might not be there yet. The
# last token of an answer is never computed.
NUM_OBJECTS = NUM_PROMPTS * ((LENGTH + GREEDY.max_tokens - 1) // 16)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3StandIn]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setattr(objects, "STALL_S", TIMEOUT_S)
    with s3_standin() as server:
        yield server
        assert not objects._abandoned


def cluster_with(
    server: S3StandIn, model_dir: Path, ranks: int = 1, prefill_ranks: int = 0, **settings: Any
) -> LocalCluster:
    """Its blocks are in the bucket as soon as they are idle. `prefill_ranks`: of workers of that
    role; 0: as others."""
    given = {"prefill": 0, "host_bytes": 4 * MIB, "object_after_s": 0.1} | settings
    sizes = {Role.PREFILL: prefill_ranks or ranks, Role.DECODE: ranks}
    return LocalCluster(
        model_dir,
        engines={
            role: structs.replace(PATIENT, tensor_parallel_size=size, threads=size)
            for role, size in sizes.items()
        },
        object_bucket=server.bucket,
        object_endpoint=server.url,
        **given,
    )


def write(server: S3StandIn, model_dir: Path, expected: list[list[int]]) -> None:
    """A machine has computed the prompts, and is removed."""
    with cluster_with(server, model_dir) as first:
        assert fill(first) == expected
        wait_for_objects(server)
        assert_clean(first)


def wait_for_objects(server: S3StandIn, times: int = 1) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(server.objects) < times * NUM_OBJECTS:
        assert time.monotonic() < deadline, f"{len(server.objects)} of {NUM_OBJECTS} objects"
        time.sleep(0.02)


def source(cluster: LocalCluster, name: str) -> int:
    """Tokens that came from there, of all requests."""
    worker = next(iter(cluster.workers.values())).node
    counters: dict[str, float] = worker.core.counters  # type: ignore[attr-defined]
    return 16 * int(counters.get(f"blocks_from_{name}", 0))


def test_a_machine_that_is_new_reads_what_another_one_has_written(
    server: S3StandIn, model_dir: Path, expected: list[list[int]]
) -> None:
    write(server, model_dir, expected)
    with cluster_with(server, model_dir, host_bytes=0) as second:
        load_all(second)
        wait_for_found(second)
        assert ask(second) == expected
        assert num_cached(second) == NUM_PROMPTS * CACHED == source(second, "object")
        assert_clean(second)


def wait_for_found(cluster: LocalCluster) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not all(
        worker.node.exchange.tiers.counters.get("tier_found_object")  # type: ignore[attr-defined]
        for worker in cluster.workers.values()
    ):
        assert time.monotonic() < deadline, "nothing was listed"
        time.sleep(0.02)


def test_a_router_says_what_another_worker_has_written_since(
    server: S3StandIn, model_dir: Path, expected: list[list[int]]
) -> None:
    with cluster_with(server, model_dir, decode=2) as cluster:
        load_all(cluster)
        answers = [cluster.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
        wait_for_objects(server)
        first, second = cluster.workers
        used = {w: cluster.workers[w].node.core.counters["requests"] for w in (first, second)}  # type: ignore[attr-defined]
        assert all(used.values()), "one worker has computed all prompts"
        wait_for_index(cluster)
        cluster.kill(first)
        assert ask(cluster) == [each.tokens for each in answers] == expected
        assert source(cluster, "object") > 0
        found = sum(source(cluster, name) for name in ("object", "host"))
        assert found + 16 * 24 >= 0.95 * NUM_PROMPTS * CACHED
        assert_clean(cluster)


def wait_for_index(cluster: LocalCluster) -> None:
    """Until the router knows of all objects."""
    index = cluster.router._dispatcher.index
    deadline = time.monotonic() + TIMEOUT_S

    def known() -> int:
        return sum(index.table.held(slot, 15) for slot in index.stores.values())

    while cluster.run(known) < NUM_OBJECTS:
        assert time.monotonic() < deadline, f"{cluster.run(known)} objects are known"
        time.sleep(0.02)


def spoil_short(server: S3StandIn) -> None:
    for key, body in server.objects.items():
        server.objects[key] = body[: len(body) - 100]


def spoil_missing(server: S3StandIn) -> None:
    server.objects.clear()


def spoil_bytes(server: S3StandIn) -> None:
    for key, body in server.objects.items():
        server.objects[key] = body[:-500] + bytes(byte ^ 1 for byte in body[-500:])


def spoil_names(server: S3StandIn) -> None:
    keys = sorted(server.objects)
    bodies = [server.objects[key] for key in keys]
    server.objects = dict(zip(keys, bodies[1:] + bodies[:1], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [spoil_short, spoil_missing, spoil_bytes, spoil_names])
def test_objects_that_are_not_right_are_computed(
    server: S3StandIn, model_dir: Path, expected: list[list[int]], spoil: Any
) -> None:
    write(server, model_dir, expected)
    with cluster_with(server, model_dir, host_bytes=0, object_after_s=3600.0) as second:
        load_all(second)
        wait_for_found(second)
        spoil(server)
        assert ask(second) == expected
        assert source(second, "object") == 0
        assert_clean(second)


def test_half_of_the_objects_are_right(
    server: S3StandIn, model_dir: Path, expected: list[list[int]]
) -> None:
    write(server, model_dir, expected)
    with cluster_with(server, model_dir, host_bytes=0) as second:
        load_all(second)
        wait_for_found(second)
        for key in sorted(server.objects)[::3]:
            del server.objects[key]
        assert ask(second) == expected
        assert 0 < source(second, "object") < NUM_PROMPTS * CACHED
        assert_clean(second)


def test_a_store_that_does_not_answer_costs_time_once(
    server: S3StandIn, model_dir: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "CLOSE_S", TIMEOUT_S)
    monkeypatch.setattr(objects, "RETRY", objects.Backoff(3600.0, 3600.0))
    write(server, model_dir, expected)
    with cluster_with(server, model_dir, host_bytes=0) as second:
        load_all(second)
        wait_for_found(second)
        server.freeze()
        monkeypatch.setattr(objects, "STALL_S", 1.0)
        assert ask(second) == expected
        assert counted(second, "transfers") == 0
        assert_clean(second)
        server.thaw()  # what was given up ends, and the worker can


def test_credentials_that_are_revoked(
    server: S3StandIn, model_dir: Path, expected: list[list[int]]
) -> None:
    write(server, model_dir, expected)
    with cluster_with(server, model_dir, host_bytes=0) as second:
        load_all(second)
        wait_for_found(second)
        server.access_key = "another"
        assert ask(second) == expected
        assert source(second, "object") == 0
        assert_clean(second)


def of_ranks(server: S3StandIn) -> list[list[str]]:
    """The keys that each of two ranks has written."""
    found = [[key for key in server.objects if f"rank-{rank}-of-2/" in key] for rank in range(2)]
    assert sorted([*found[0], *found[1]]) == sorted(server.objects)
    return found


@pytest.mark.slow
def test_ranks_read_what_ranks_have_written_and_others_compute(
    server: S3StandIn, model_dir: Path, expected: list[list[int]]
) -> None:
    """Each rank has objects of its own. A worker of another number of ranks finds none of them, and
    no router says that it would."""
    with cluster_with(server, model_dir, ranks=2) as first:
        assert fill(first) == expected
        wait_for_objects(server, 2)
        assert_clean(first)
    own, others = of_ranks(server)
    assert len(own) == len(others) == NUM_OBJECTS
    with cluster_with(server, model_dir, ranks=2, host_bytes=0) as second:
        load_all(second)
        wait_for_found(second)
        assert ask(second) == expected
        assert num_cached(second) == NUM_PROMPTS * CACHED == source(second, "object")
        assert_clean(second)
    both = {"prefill": 1, "router": REMOTE, "host_bytes": 0, "object_after_s": 3600.0}
    with cluster_with(server, model_dir, ranks=2, prefill_ranks=1, **both) as mixed:
        load_all(mixed)
        assert ask(mixed) == expected
        prefill, decode = (mixed.workers[name].node for name in ("prefill-0", "decode-0"))
        assert not prefill.core.counters.get("blocks_from_object")  # type: ignore[attr-defined]
        assert prefill.core.config.store_kind != decode.core.config.store_kind  # type: ignore[attr-defined]
        assert_clean(mixed)


def spoil_one(server: S3StandIn) -> None:
    for key in of_ranks(server)[1]:
        server.objects[key] = server.objects[key][:-500] + bytes(500)


def lose_one(server: S3StandIn) -> None:
    for key in of_ranks(server)[1]:
        del server.objects[key]


def swap(server: S3StandIn) -> None:
    """What one rank has written has the name of what the other has."""
    for own, other in zip(*map(sorted, of_ranks(server)), strict=True):
        server.objects[own], server.objects[other] = server.objects[other], server.objects[own]


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [spoil_one, lose_one, swap])
def test_blocks_of_which_one_rank_has_no_right_part_are_computed(
    server: S3StandIn, model_dir: Path, expected: list[list[int]], spoil: Any
) -> None:
    with cluster_with(server, model_dir, ranks=2) as first:
        assert fill(first) == expected
        wait_for_objects(server, 2)
    with cluster_with(server, model_dir, ranks=2, host_bytes=0, object_after_s=3600.0) as second:
        load_all(second)
        wait_for_found(second)
        spoil(server)
        assert ask(second) == expected
        assert source(second, "object") == 0
        assert_clean(second)


def test_other_weights_find_nothing(
    server: S3StandIn, model_dir: Path, expected: list[list[int]]
) -> None:
    write(server, model_dir, expected)
    with cluster_with(server, model_dir, dtype="bfloat16") as second:
        load_all(second)
        fill(second)
        wait_for_objects(server, 2)
        assert source(second, "object") == 0


def test_without_credentials_it_is_served_without_the_tier(
    server: S3StandIn,
    model_dir: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_no_credentials(monkeypatch)
    with cluster_with(server, model_dir) as cluster:
        (built,) = cluster.workers.values()
        (notice,) = [each for each in built.notices if "object tier" in each]
        assert "no credentials can be read in the environment" in notice
        assert ask(cluster) == expected
