"""Two versions in one cluster: real nodes over a real (tiny, random) model. Every message is cut
down to what the last release sends, and some workers have KV of an older layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.service_class import ServiceClass
from kvrelay.engine.wire import codec
from kvrelay.kvtransfer import layout
from kvrelay.lab.sim import inversion
from kvrelay.lab.sim.run import run_seed
from kvrelay.lab.sim.runtime import SimRuntime
from kvrelay.worker import transfers
from kvrelay.worker.spec import WorkerSpec
from tests.local.test_local import PROMPTS, REMOTE, small
from tests.local.test_local import model_dir as model_dir
from tests.local.test_migration import KINDS, assert_clean, assert_same, chase, num_taken_over
from tests.support.local import Completion, LocalCluster
from tests.versions.test_versions import LAST, THEN

DEADLINE_S = 60.0
REQUESTS = [(prompt, KINDS[kind]) for kind in ("seeded", "logprobs") for prompt in PROMPTS]


def cut_down(message: Any) -> Any:
    name = type(message).__name__
    if name not in LAST["codec"]:
        return message  # it stays within a process
    _, fields = msgspec.msgpack.decode(codec.encode(message), type=tuple[str, msgspec.Raw])
    known = THEN.only_known(name, bytes(fields))
    return codec.decode_message(msgspec.msgpack.encode((name, msgspec.Raw(known))))


def cluster_of(model: Path, **options: Any) -> LocalCluster:
    cluster = LocalCluster(model, engine=small(), **options)
    deliver = cluster.host.deliver
    cluster.host.deliver = lambda to, message: deliver(to, cut_down(message))  # type: ignore[method-assign]
    return cluster


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of workers that are to be of an older layout."""
    names: set[str] = set()
    made = transfers.worker_config

    def config(spec: WorkerSpec, plan: Any, length: int, model: bytes) -> WorkerConfig:
        new = made(spec, plan, length, model)
        if spec.worker not in names:
            return new
        version = layout.LAYOUT_VERSION - 1
        facts = tuple({**dict(new.compatibility), "layout": str(version)}.items())
        fingerprint = layout.fingerprint(model, plan.spec, version)
        return replace(new, fingerprint=fingerprint, compatibility=facts)

    monkeypatch.setattr(transfers, "worker_config", config)
    return names


@pytest.fixture(scope="module")
def at_rest(model_dir: Path) -> Iterator[list[Completion]]:
    with LocalCluster(model_dir, prefill=0, decode=1, engine=small()) as cluster:
        futures = [cluster.submit(*request) for request in REQUESTS]
        yield [future.result(DEADLINE_S) for future in futures]


def num_read(cluster: LocalCluster) -> float:
    """Blocks that workers have read from each other."""
    nodes: list[Any] = [built.node for built in cluster.workers.values()]
    return cluster.run(lambda: sum(n.core.counters.get("blocks_from_peer", 0) for n in nodes))


@pytest.mark.parametrize("is_mixed", [True, False])
def test_streams_move_between_layouts_by_tokens_and_else_with_their_kv(
    model_dir: Path,
    at_rest: list[Completion],
    older: set[str],
    is_mixed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.router.router.PAUSE", Backoff(0.0, 0.0))
    older |= {"decode-1"} if is_mixed else set()
    with cluster_of(model_dir, prefill=0, decode=2) as cluster:
        for _ in range(5):  # on a busy machine, computing may look shorter than reading for once
            answers = chase(cluster, [cluster.submit(*request) for request in REQUESTS])
            if is_mixed or num_read(cluster):
                break
        assert_clean(cluster)
        assert num_taken_over(cluster) >= len(REQUESTS)
        assert (num_read(cluster) > 0) is not is_mixed
    assert_same(answers, at_rest)


@pytest.mark.parametrize("is_mixed", [True, False])
def test_a_prompt_is_handed_over_within_a_layout_only(
    model_dir: Path, at_rest: list[Completion], older: set[str], is_mixed: bool
) -> None:
    older |= {"prefill-0"} if is_mixed else set()
    with cluster_of(model_dir, router=REMOTE) as cluster:
        answers = [each.result(DEADLINE_S) for each in [cluster.submit(*r) for r in REQUESTS]]
        assert_clean(cluster)
        assert (cluster.status().totals.handoffs > 0) is not is_mixed
    assert_same(answers, at_rest)


@pytest.mark.slow
def test_nothing_breaks_under_faults_with_what_the_last_release_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deliver = SimRuntime._deliver
    num_cut = 0

    def cut(self: SimRuntime, source: str, life: Any, message: Any) -> None:
        nonlocal num_cut
        num_cut += type(message).__name__ in LAST["codec"]
        deliver(self, source, life, cut_down(message))

    monkeypatch.setattr(SimRuntime, "_deliver", cut)
    # Workers hear nothing of classes from routers of that release: all are alike to them.
    assert "service_class" not in LAST["named"]["Decode"]["fields"]
    monkeypatch.setattr(inversion, "class_of", lambda job: ServiceClass.DEFAULT)
    for seed in range(5):
        report = run_seed(seed)
        assert not report.violations, (seed, report.violations[:3])
    assert num_cut > 1000
