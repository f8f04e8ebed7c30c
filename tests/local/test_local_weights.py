"""Weights that change while a cluster serves: who goes on with which, and no KV of one version is
used by another."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import quantiles

import psutil
import pytest
from msgspec.structs import replace as msgspec_replace

from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model import versions as in_place
from kvrelay.engine.model.checkpoint.region import REGIONS
from kvrelay.engine.model.checkpoint.version import read_version
from kvrelay.engine.model.parallel.runner import ParallelRunner
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import Refusal, SamplingParams
from kvrelay.engine.step import Step
from kvrelay.engine.weights import UpdateMode
from tests.engine.model.tiny import scheduled
from tests.local.test_local import VOCAB, small
from tests.local.test_local import model_dir as model_dir
from tests.local.test_local_tiers import MIB, assert_clean, load_all, settle
from tests.local.test_migration import unhurried as unhurried
from tests.support.local import Completion, LocalCluster
from tests.support.trainer import training
from tests.support.weights import Operator, Reference, scaled

COUNT = 48
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0)
PROMPTS = [tuple((7 * i + 3 * j * j + j) % VOCAB for j in range(20 + 5 * i)) for i in range(16)]
FEW = PROMPTS[::4]
ENGINE = small(max_num_seqs=32)


@pytest.fixture(scope="module")
def versions(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return model_dir, scaled(model_dir, tmp_path_factory.mktemp("two") / "v2", 2.0)


@pytest.fixture(scope="module")
def references(versions: tuple[Path, Path]) -> tuple[Reference, Reference]:
    return Reference(versions[0]), Reference(versions[1])


def begun(cluster: LocalCluster, least: int = 4) -> list[Future[Completion]]:
    """All prompts, each of which has some tokens by now."""
    futures = [cluster.submit(prompt, GREEDY) for prompt in PROMPTS]
    deadline = time.monotonic() + 60
    while True:
        live = cluster.run(lambda: [r.num_output_tokens for r in cluster.router.live.values()])
        assert len(live) == len(PROMPTS), "some have ended: the steps are too fast for this test"
        if min(live) >= least:
            return futures
        assert time.monotonic() < deadline, live
        time.sleep(0.005)


def ended(cluster: LocalCluster, futures: list[Future[Completion]]) -> list[Completion]:
    answers = [future.result(120) for future in futures]
    cluster.check()
    assert [each.failed for each in answers] == [None] * len(answers)
    return answers


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("mode", list(UpdateMode))
def test_sixteen_streams_go_on_while_the_weights_change(
    versions: tuple[Path, Path], references: tuple[Reference, Reference], mode: UpdateMode
) -> None:
    old, new = (read_version(path).name for path in versions)
    with LocalCluster(versions[0], prefill=0, engine=ENGINE) as cluster:
        operator = Operator(cluster)
        futures = begun(cluster)
        (updated,) = operator.update(versions[1], mode)
        answers = ended(cluster, futures)
        assert updated.pause_s > 0
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            first, *later = answer.weights
            assert first == (0, old)
            assert len(answer.tokens) == COUNT
            assert [name for _, name in later] == ([] if mode is UpdateMode.DRAIN else [new])
            if prompt not in FEW:
                continue
            before = references[0].continued(prompt, COUNT)
            at = later[0][0] if later else COUNT
            assert at >= 4
            assert answer.tokens[:at] == before[:at]
            if mode is UpdateMode.RECOMPUTE:
                context = (*prompt, *answer.tokens[:at])
                assert answer.tokens[at:] == references[1].continued(context, COUNT - at)
        for prompt, answer in zip(FEW, cluster.generate(FEW, GREEDY), strict=True):
            assert answer.tokens == references[1].continued(prompt, COUNT)
            assert answer.weights == ((0, new),)
        cluster.wait_idle()


def test_no_tier_has_kv_of_other_weights_and_the_way_back_finds_what_was_there(
    versions: tuple[Path, Path], references: tuple[Reference, Reference], tmp_path: Path
) -> None:
    kept = {"host_bytes": 8 * MIB, "disk_bytes": 8 * MIB, "disk_after_s": 0.0}
    path = {"disk_path": str(tmp_path)}
    with LocalCluster(versions[0], engine=ENGINE, **kept, **path) as cluster:
        operator = Operator(cluster)
        load_all(cluster)
        for mode, (version, reference) in zip(
            (None, UpdateMode.RECOMPUTE, UpdateMode.KEEP, UpdateMode.DRAIN),
            2 * [*zip(versions, references, strict=True)],
            strict=True,
        ):
            if mode is not None:
                operator.update(version, mode)
            answers = cluster.generate(FEW, GREEDY)
            for prompt, answer in zip(FEW, answers, strict=True):
                assert answer.tokens == reference.continued(prompt, COUNT)
            num_cached = sum(each.num_cached_tokens for each in answers)
            is_new = mode in (None, UpdateMode.RECOMPUTE)
            assert num_cached == 0 if is_new else num_cached > 0
            settle(cluster)
        assert_clean(cluster)


@pytest.mark.usefixtures("unhurried")
def test_a_request_is_served_by_the_weights_that_it_is_pinned_to(
    versions: tuple[Path, Path], references: tuple[Reference, Reference]
) -> None:
    old, new = (read_version(path).name for path in versions)
    with LocalCluster(versions[0], prefill=0, decode=2, engine=ENGINE) as cluster:
        operator = Operator(cluster)
        pinned = [cluster.submit(prompt, GREEDY, weights=old) for prompt in FEW]
        operator.update(versions[1], UpdateMode.RECOMPUTE, ["decode-0"])
        for name, reference in ((old, references[0]), (new, references[1])):
            more = [cluster.submit(prompt, GREEDY, weights=name) for prompt in FEW]
            for prompt, answer in zip(FEW, ended(cluster, more), strict=True):
                assert answer.weights == ((0, name),)
                assert answer.tokens == reference.continued(prompt, COUNT)
        for prompt, answer in zip(FEW, ended(cluster, pinned), strict=True):
            assert answer.tokens == references[0].continued(prompt, COUNT)
        late = cluster.submit(PROMPTS[5], GREEDY, weights=old)
        operator.update(versions[1], UpdateMode.RECOMPUTE, ["decode-1"])
        gone = late.result(60).failed or cluster.submit([1], GREEDY, weights=old).result(60).failed
        assert gone is not None
        assert gone.reason is Refusal.WEIGHTS
        assert new in gone.detail
        cluster.wait_idle()


def test_weights_that_do_not_fit_or_do_not_answer_leave_the_old_ones(
    versions: tuple[Path, Path], references: tuple[Reference, Reference], tmp_path: Path
) -> None:
    broken = scaled(versions[0], tmp_path / "nan", float("nan"), "norm.weight")
    gone = read_version(scaled(versions[0], tmp_path / "gone", 3.0))
    with LocalCluster(versions[0], prefill=0, engine=ENGINE) as cluster:
        operator = Operator(cluster)
        for version, why in (
            (read_version(broken), "do not answer"),
            (replace(gone, path=str(broken)), "other bytes"),
            (replace(gone, path=str(tmp_path / "none")), "is no folder"),
        ):
            answer = operator.begin("decode-0", version, UpdateMode.RECOMPUTE).result(60)
            assert why in answer.why
            assert answer.version.digest == read_version(versions[0]).digest
        for prompt, done in zip(FEW, cluster.generate(FEW, GREEDY), strict=True):
            assert done.tokens == references[0].continued(prompt, COUNT)
        cluster.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [UpdateMode.RECOMPUTE, UpdateMode.KEEP])
def test_ranks_change_between_the_same_two_steps_or_not_at_all(
    versions: tuple[Path, Path],
    references: tuple[Reference, Reference],
    tmp_path: Path,
    mode: UpdateMode,
) -> None:
    """A rank that cannot load them, and logits that are not numbers, leave all as they were."""
    engine = msgspec_replace(ENGINE, tensor_parallel_size=2, threads=2)
    broken = scaled(versions[0], tmp_path / "nan", float("nan"), "norm.weight")
    with LocalCluster(versions[0], prefill=0, engine=engine) as cluster:
        operator = Operator(cluster)
        for path, reference in ((versions[1], references[1]), (versions[0], references[0])):
            futures = begun(cluster, 1)
            version = read_version(broken)
            for why, wrong in (
                ("do not answer", version),
                ("is no folder", replace(version, digest=b"x", path=str(tmp_path / "none"))),
            ):
                answer = operator.begin("decode-0", wrong, mode).result(60)
                assert why in answer.why
            operator.update(path, mode)
            answers = ended(cluster, futures)
            assert all(len(each.tokens) == COUNT for each in answers)
            for prompt, answer in zip(FEW, cluster.generate(FEW, GREEDY), strict=True):
                assert answer.tokens == reference.continued(prompt, COUNT)
                assert answer.weights == ((0, read_version(path).name),)
        cluster.wait_idle()


@pytest.mark.slow
def test_where_the_first_rank_fails_the_others_stay_too(
    versions: tuple[Path, Path],
    references: tuple[Reference, Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it loads, or takes what was loaded; the next update is as if none had been."""
    engine = msgspec_replace(ENGINE, tensor_parallel_size=2, threads=2)

    def fail(*given: object) -> None:
        raise OSError("the disk is gone")

    with LocalCluster(versions[0], prefill=0, engine=engine) as cluster:
        operator = Operator(cluster)
        for target, name in ((in_place, "read_weights"), (ModelRunner, "swap_weights")):
            with monkeypatch.context() as patch:
                patch.setattr(target, name, fail)
                answer = operator.begin("decode-0", read_version(versions[1]), UpdateMode.RECOMPUTE)
                assert answer.result(60).why == "the disk is gone"
            for prompt, done in zip(FEW, cluster.generate(FEW, GREEDY), strict=True):
                assert done.tokens == references[0].continued(prompt, COUNT)
        operator.update(versions[1], UpdateMode.RECOMPUTE)
        for prompt, done in zip(FEW, cluster.generate(FEW, GREEDY), strict=True):
            assert done.tokens == references[1].continued(prompt, COUNT)
        cluster.wait_idle()


@pytest.mark.slow
def test_ranks_that_start_read_the_version_that_is_current(
    versions: tuple[Path, Path], references: tuple[Reference, Reference]
) -> None:
    engine = EngineSection(num_blocks=40, threads=2, tensor_parallel_size=2)
    section = ModelSection(name="", dtype="float32", device="cpu")
    read = partial(in_place.read_weights, read_version(versions[1]))
    runner = ParallelRunner(versions[0], section, engine.sized(gpu=False), read=read)
    try:
        tokens = [[each.continued(prompt, 1) for each in references] for prompt in PROMPTS]
        prompt, (_, new) = next(
            each for each in zip(PROMPTS, tokens, strict=True) if each[1][0] != each[1][1]
        )
        share = scheduled([*prompt], 0, [*range(40)], context=[*prompt], sampling=GREEDY)
        (sampled,) = runner.execute(Step(0, [share])).sampled
        assert sampled is not None
        assert [sampled.token] == new
    finally:
        runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_come_from_the_memory_of_another_process(
    versions: tuple[Path, Path], references: tuple[Reference, Reference], num_ranks: int
) -> None:
    """Each rank copies them: they stay as they were when the other process writes over its own, or
    ends. What is not as it was described is not used."""
    engine = msgspec_replace(ENGINE, tensor_parallel_size=num_ranks, threads=num_ranks)
    with LocalCluster(versions[0], prefill=0, engine=engine) as cluster:
        operator = Operator(cluster)
        with training(versions[1], f"kvrelay-trains-{os.getpid()}") as memory:
            futures = begun(cluster, 1)
            operator.use(memory.version("step-1"), UpdateMode.RECOMPUTE)
            answers = ended(cluster, futures)
            assert all(each.weights[-1][1] == "step-1" for each in answers)
            region = REGIONS / memory.region
            with region.open("r+b") as file:
                file.write(bytes(region.stat().st_size))
            for prompt, answer in zip(FEW, cluster.generate(FEW, GREEDY), strict=True):
                assert answer.tokens == references[1].continued(prompt, COUNT)
            operator.update(versions[0], UpdateMode.RECOMPUTE)
            wrong = operator.begin("decode-0", memory.version(), UpdateMode.RECOMPUTE).result(60)
            assert "has other bytes than its digest" in wrong.why
        gone = operator.begin("decode-0", memory.version(), UpdateMode.RECOMPUTE).result(60)
        assert "is no region of shared memory" in gone.why
        for prompt, answer in zip(FEW, cluster.generate(FEW, GREEDY), strict=True):
            assert answer.tokens == references[0].continued(prompt, COUNT)
        cluster.wait_idle()


@pytest.mark.long  # pytest -m long -s -k under_load tests/local/test_local_weights.py
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_hundred_updates_under_load_fail_nothing_and_find_nothing_of_before(
    model_dir: Path, tmp_path: Path, num_ranks: int
) -> None:
    """Each of the hundred has weights of its own. The pauses are printed."""
    engine = msgspec_replace(ENGINE, tensor_parallel_size=num_ranks, threads=num_ranks)
    pauses, answers, probe = list[float](), list[Completion](), PROMPTS[1]
    with LocalCluster(model_dir, prefill=0, engine=engine) as cluster:
        operator = Operator(cluster)
        load = [cluster.submit(prompt, GREEDY) for prompt in FEW]
        for number in range(100):
            folder = scaled(model_dir, tmp_path / f"v{number}", 1.0 + (number + 1) / 50)
            (updated,) = operator.update(folder, UpdateMode.RECOMPUTE)
            pauses.append(updated.pause_s)
            (answer,) = cluster.generate([probe], replace(GREEDY, max_tokens=4))
            assert answer.num_cached_tokens == 0
            assert answer.weights == ((0, read_version(folder).name),)
            if number % 10 == 9:
                assert answer.tokens == Reference(folder).continued(probe, 4)
            shutil.rmtree(folder)
            answers += [future.result() for future in load if future.done()]
            load = [
                cluster.submit(prompt, GREEDY) if future.done() else future
                for prompt, future in zip(FEW, load, strict=True)
            ]
        answers += ended(cluster, load)
        cluster.wait_idle()
    failed = [each.failed for each in answers if each.failed is not None]
    changed = sum(len(each.weights) > 1 for each in answers)
    ms = [f"{1e3 * each:.1f}" for each in quantiles(pauses, n=100)]
    print(f"{num_ranks} ranks: {len(answers)} streams, {changed} through an update, {len(failed)}")
    print(f"failed; pause p50 {ms[49]} ms, p99 {ms[98]} ms")
    assert not failed
    assert changed > 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_hundred_updates_in_a_row_leave_memory_as_it_was(versions: tuple[Path, Path]) -> None:
    """There is a request after each; memory and pauses are printed."""
    process, resident, pauses = psutil.Process(), [], []
    with LocalCluster(versions[0], prefill=0, engine=ENGINE) as cluster:
        operator = Operator(cluster)
        for number in range(100):
            (updated,) = operator.update(versions[(number + 1) % 2], UpdateMode.RECOMPUTE)
            pauses.append(updated.pause_s)
            (answer,) = cluster.generate([PROMPTS[0]], SamplingParams(max_tokens=2))
            assert answer.num_cached_tokens == (0 if number < 2 else 16)
            resident.append(process.memory_info().rss >> 20)
        cluster.wait_idle()
    print(f"MiB: {resident[9]} after 10, {resident[-1]} after 100, at most {max(resident[9:])}")
    print(f"pause: median {1e3 * sorted(pauses)[50]:.1f} ms, longest {1e3 * max(pauses):.1f} ms")
    assert resident[-1] < resident[9] + 16
