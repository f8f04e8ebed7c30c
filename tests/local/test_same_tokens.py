"""Models with windows, states, sparse attention or images answer with the same tokens whichever way
they are served: tiny and random, greedy and drawn, from one pool and two, after preemption, the
death of a worker, migration and a change of roles, from host memory, from disk and after a restart.

`pytest -m long tests/local/test_same_tokens.py` asks each of eleven families 20 prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.config import EngineSection
from kvrelay.engine.images import Images
from kvrelay.engine.kv.spec import KVSpec
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.vision.layout import expand
from kvrelay.engine.request import SamplingParams
from kvrelay.router.config import RouterConfig
from tests.engine.model.runners import model_runner
from tests.engine.model.tiny import tokens_of
from tests.local.test_local import REMOTE
from tests.local.test_local_kv import answer_of
from tests.local.test_local_tiers import MIB, assert_clean, load_all, settle
from tests.local.test_migration import appoint, chase
from tests.local.test_migration import at_once as at_once
from tests.local.test_migration import unhurried as unhurried
from tests.support import tiny_qwen_vl
from tests.support.local import Completion, LocalCluster
from tests.support.tiny_qwen_vl import picture, prompt_of

FEW, MANY = 3, 20
FAMILIES = (
    *("deepseek32", "falcon-h1", "gemma3", "glm5-shared", "gpt-oss", "kimi-linear", "lfm2"),
    *("qwen3-next", "qwen3.5-moe"),
)
SEEING = ("qwen3-vl-images", "qwen3.5-images")
HEATS, COUNT, LONGEST = (0.0, 0.8), 40, 170
CHUNK, DEADLINE_S = 64, 240.0


@dataclass(frozen=True)
class Asked:
    """Two requests for each seed, and what a runner answers that keeps every block."""

    model: Path
    prompts: list[list[int]]
    samplings: list[SamplingParams]
    images: list[Images | None]
    expected: list[list[int]]

    def requests(self) -> Iterator[tuple[list[int], SamplingParams, Images | None, list[int]]]:
        return zip(self.prompts, self.samplings, self.images, self.expected, strict=True)

    @property
    def spec(self) -> KVSpec:
        return read_config(self.model).kv_spec(16, "float32")

    def most_blocks(self, count: int = COUNT) -> int:
        """That a sequence holds whose answer has so many tokens."""
        size, chunk = self.spec.block_size, -(-CHUNK // self.spec.block_size)
        return Windows.of(size, self.spec.windows, 0, chunk).max_blocks(LONGEST + count)

    @contextmanager
    def cluster(
        self,
        prefill: int = 0,
        decode: int = 1,
        num_blocks: int = 0,
        router: RouterConfig | None = None,
        **tiers: Any,
    ) -> Iterator[LocalCluster]:
        """Nothing may be left over at its end. `num_blocks`: 0: more than enough."""
        num_blocks = num_blocks or self.most_blocks() * (len(self.prompts) + 1)
        engine = EngineSection(num_blocks=num_blocks, max_num_batched_tokens=CHUNK)
        with LocalCluster(
            self.model, prefill=prefill, decode=decode, engine=engine, router=router, **tiers
        ) as cluster:
            yield cluster
            cluster.check()
            assert_clean(cluster)

    def submit(self, cluster: LocalCluster) -> list[Future[Completion]]:
        each = self.requests()
        return [cluster.submit(prompt, s, images=images) for prompt, s, images, _ in each]

    def check(self, futures: list[Future[Completion]]) -> list[Completion]:
        answers = [future.result(DEADLINE_S) for future in futures]
        assert [answer.failed for answer in answers] == [None] * len(futures)
        assert [answer.tokens for answer in answers] == self.expected
        return answers

    def fill(self, cluster: LocalCluster) -> None:
        """One after the other; nothing is evicted before it is in the lower tiers."""
        for prompt, sampling, images, expected in self.requests():
            assert cluster.generate([prompt], sampling, images=images)[0].tokens == expected
            settle(cluster)

    def ask_again(self, cluster: LocalCluster, source: str, *cuts: int) -> None:
        """From this tier; `cuts`: in turn, how much of the answer is in the prompt."""
        load_all(cluster)
        pool = cluster.workers["decode-0"].node.core.kv.pool  # type: ignore[attr-defined]
        size = cluster.workers["decode-0"].info.block_size
        for request, cut in zip(self.requests(), cycle(cuts), strict=False):
            prompt, sampling, images, expected = request
            cluster.run(lambda: pool.evict(pool.block_hashes()))
            rest = replace(sampling, max_tokens=len(expected) - cut)
            (answer,) = cluster.generate([[*prompt, *expected[:cut]]], rest, images=images)
            assert answer.tokens == expected[cut:]
            assert answer.cached_by_source.get(source, 0) >= (len(prompt) - 1) // size * size


def asked_of(
    model: Path,
    prompts: list[list[int]],
    samplings: list[SamplingParams],
    count: int,
    images: list[Images | None] | None = None,
) -> Asked:
    samplings = [replace(each, max_tokens=count) for each in samplings]
    images = images or [None] * len(prompts)
    asked = Asked(model, prompts, samplings, images, [])
    blocks = list(range(-(-(LONGEST + count) // asked.spec.block_size) * asked.spec.num_groups))
    runner = model_runner(model, dtype="float32", device="cpu", num_blocks=len(blocks))
    for prompt, sampling, own in zip(prompts, samplings, images, strict=True):
        asked.expected.append(answer_of(runner, prompt, blocks, count, sampling, own))
    assert len(set(map(tuple, asked.expected))) == len(asked.expected)
    return asked


def seeing(folder: Path, seeds: range, *, hybrid: bool) -> Asked:
    """Prompts with two images each, of sizes that differ."""
    tiny_qwen_vl.make(folder, hybrid=hybrid)
    vision = read_config(folder).vision
    assert vision is not None
    given = [
        prompt_of(vision, 84 + seed % 7, picture(seed), 40, picture(seed, 70 + seed, 200), 12)
        for seed in seeds
        for _ in HEATS
    ]
    prompts = [[*expand(images, vision).named(images.each)] for images in given]
    assert max(map(len, prompts)) <= LONGEST
    samplings = [SamplingParams(temperature=heat, seed=seed) for seed in seeds for heat in HEATS]
    return asked_of(folder, prompts, samplings, COUNT, [*given])


@pytest.fixture(
    scope="module",
    params=[
        *((family, FEW) for family in ("deepseek32", "gemma3", "qwen3-next", *SEEING)),
        *(pytest.param((family, MANY), marks=pytest.mark.long) for family in (*FAMILIES, *SEEING)),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def asked(
    request: pytest.FixtureRequest,
    checkpoint_of: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Asked:
    family, num_seeds = request.param
    if family in SEEING:
        folder = tmp_path_factory.mktemp(family)
        return seeing(folder, range(num_seeds), hybrid=family == "qwen3.5-images")
    untied = {"tie_word_embeddings": False} if family == "gemma3" else {}  # else it repeats itself
    model, seeds = checkpoint_of(family, **untied), range(num_seeds)
    prompts = [tokens_of(LONGEST - 7 * seed % 40, seed) for seed in seeds for _ in HEATS]
    samplings = [SamplingParams(temperature=heat, seed=seed) for seed in seeds for heat in HEATS]
    asked = asked_of(model, prompts, samplings, COUNT)
    config = read_config(model)
    assert asked.spec.num_groups > 1 or config.indexer is not None
    return asked


def totals_of(cluster: LocalCluster, name: str) -> list[float]:
    nodes: list[Any] = [worker.node for worker in cluster.workers.values()]
    return cluster.run(lambda: [node.core.counters.get(name, 0) for node in nodes])


def test_one_pool(asked: Asked) -> None:
    with asked.cluster() as cluster:
        asked.check(asked.submit(cluster))


def test_two_pools(asked: Asked) -> None:
    with asked.cluster(prefill=1, router=REMOTE) as cluster:
        asked.check(asked.submit(cluster))
        assert cluster.status().totals.handoffs == len(asked.prompts)
        assert totals_of(cluster, "handoffs_done") == [0, len(asked.prompts)]


def test_preempted(asked: Asked) -> None:
    """Each grows by two rows, of which one is reserved."""
    count = 2 * asked.spec.block_size + 8
    longer = asked_of(asked.model, asked.prompts, asked.samplings, count, asked.images)
    most = asked.most_blocks(count)
    for num_blocks in (2 * most, 3 * most // 2, most + 1):
        with longer.cluster(num_blocks=num_blocks) as cluster:
            longer.check(longer.submit(cluster))
            node: Any = cluster.workers["decode-0"].node
            if cluster.run(lambda scheduler=node.core.scheduler: scheduler.num_preemptions):
                return
    pytest.fail("no pool is too small for what it admits")


def test_a_worker_is_killed(asked: Asked) -> None:
    """First one that decodes, then the one that prompts are handed over from."""
    with asked.cluster(prefill=1, decode=2, router=REMOTE) as cluster:
        for worker in ("decode-0", "prefill-0"):
            totals, futures = cluster.status().totals, asked.submit(cluster)
            begun = totals.output_tokens + (len(futures) if worker == "decode-0" else 1)
            while cluster.status().totals.output_tokens < begun:
                cluster.check()
            cluster.kill(worker)
            asked.check(futures)
            if worker == "decode-0":
                assert cluster.status().totals.retries


def test_the_worker_that_took_them_over_is_killed_too(asked: Asked) -> None:
    with asked.cluster(decode=3) as cluster:
        futures = asked.submit(cluster)
        for worker in ("decode-0", "decode-1"):
            begun = cluster.status().totals.output_tokens + len(futures)
            while cluster.status().totals.output_tokens < begun and not all(
                future.done() for future in futures
            ):
                cluster.check()
            cluster.kill(worker)
        asked.check(futures)
        assert sum(cluster.status().totals.retries.values()) > 0


def test_migrated(asked: Asked, at_once: None, unhurried: None) -> None:
    with asked.cluster(decode=2) as cluster:
        futures = asked.submit(cluster)
        chase(cluster, futures, DEADLINE_S)
        asked.check(futures)
        assert cluster.status().totals.migrations >= len(futures)


def test_roles_change(asked: Asked, at_once: None, unhurried: None) -> None:
    """What was computed where others decoded is now decoded where they were computed."""
    with asked.cluster(prefill=1, router=REMOTE) as cluster:
        for only in ("decode-0", "prefill-0"):
            cluster.run(partial(appoint, cluster, only, sorted(cluster.workers)))
            futures = asked.submit(cluster)
            chase(cluster, futures, DEADLINE_S)
            asked.check(futures)
        assert min(totals_of(cluster, "handoffs_done")) > 0


def test_from_host_memory_from_disk_and_after_a_restart(asked: Asked, tmp_path: Path) -> None:
    tiers: dict[str, Any] = {
        "disk_bytes": 256 * MIB,
        "disk_path": str(tmp_path),
        "disk_after_s": 0.0,
    }
    num_blocks = asked.most_blocks() * 3
    with asked.cluster(num_blocks=num_blocks, host_bytes=256 * MIB) as cluster:
        asked.fill(cluster)
        asked.ask_again(cluster, "host", 0, COUNT - 4)
    with asked.cluster(num_blocks=num_blocks, **tiers) as cluster:
        asked.fill(cluster)
        asked.ask_again(cluster, "disk", 0, COUNT - 4)
    with asked.cluster(num_blocks=num_blocks, **tiers) as cluster:
        asked.ask_again(cluster, "disk", COUNT - 4, 0)
