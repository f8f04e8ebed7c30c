"""Adapters in a cluster: each request has the tokens of its own merged weights, and no KV of
another adapter, wherever it is served and whatever was reloaded under the same name."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from msgspec.structs import replace as msgspec_replace

from kvrelay.engine.adapter_copies import register
from kvrelay.engine.adapters import Adapter, read_adapter
from kvrelay.engine.config import EngineSection
from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.request import Refusal, SamplingParams
from kvrelay.engine.step import Step
from tests.engine.model.runners import model_runner
from tests.engine.model.tiny import scheduled, tokens_of
from tests.local.test_local_tiers import MIB, assert_clean, load_all, settle
from tests.local.test_migration import at_once as at_once
from tests.local.test_migration import chase
from tests.local.test_migration import unhurried as unhurried
from tests.support.adapters import merge, write_adapter
from tests.support.local import Completion, LocalCluster
from tests.support.weights import scaled

PROMPTS = [tokens_of(70, seed=number) for number in range(4)]
COUNT = 24
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0)
FEW = 8  # prompts whose blocks a device and host memory have room for
Servers = tuple[LocalCluster, LocalCluster]
SAME = Adapter(b"", "")  # stands for one that several models have
ENGINE = EngineSection(num_blocks=64, max_num_batched_tokens=64, num_speculative_tokens=2)


def answers_of(model: Path) -> list[tuple[int, ...]]:
    """What a runner of this model alone says to each prompt."""
    runner = model_runner(model, num_blocks=16, dtype="float32", threads=1)
    answers = []
    for prompt in PROMPTS:
        out: list[int] = []
        while len(out) < COUNT:
            context = [*prompt, *out]
            feed, start = ([out[-1]], len(context) - 1) if out else (context, 0)
            share = scheduled(feed, start, [*range(6)], context=context, sampling=GREEDY)
            (sampled,) = runner.execute(Step(0, [share])).sampled
            assert sampled is not None
            out.append(sampled.token)
        answers.append(tuple(out))
    return answers


class World:
    """A model, adapters of it, and what each has to say."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model, self.folder = model, folder
        self.expected = {None: answers_of(model)}
        self._numbers = itertools.count()

    def adapter(self, path: Path | None = None) -> Adapter:
        """A new one, at `path` in place of what was there."""
        number = next(self._numbers)
        path = write_adapter(path or self.folder / f"{number}", self.model, seed=number, rank=4)
        found = Adapter(read_adapter(path).digest, str(path))
        self.expected[found] = answers_of(merge(self.folder / f"m{number}", self.model, path))
        return found

    def ask(
        self, cluster: LocalCluster, adapters: Sequence[Adapter | None]
    ) -> list[tuple[Completion, bool]]:
        """Each prompt with each of `adapters`, all at once; and whether the answer is right."""
        pairs = [(a, i) for i in range(len(PROMPTS)) for a in adapters]
        futures = [cluster.submit(PROMPTS[i], GREEDY, adapter=a) for a, i in pairs]
        found = [future.result(300) for future in futures]
        cluster.check()
        expected = [self.expected[a][i] for a, i in pairs]
        return [(c, tuple(c.tokens) == right) for c, right in zip(found, expected, strict=True)]

    def check(self, cluster: LocalCluster, adapters: Sequence[Adapter | None]) -> int:
        """Returns how many tokens were cached."""
        answers = self.ask(cluster, adapters)
        assert all(right for _, right in answers), [each.failed for each, _ in answers]
        return sum(each.num_cached_tokens for each, _ in answers)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> World:
    return World(tmp_path_factory.mktemp("adapters"), llama)


def test_two_pools_host_and_disk_give_each_request_the_tokens_of_its_adapter(
    world: World, tmp_path: Path
) -> None:
    adapters = [None, world.adapter(), world.adapter()]
    kept: dict[str, Any] = {"host_bytes": 8 * MIB, "disk_bytes": 8 * MIB, "disk_after_s": 0.0}
    kept["disk_path"] = str(tmp_path)
    with LocalCluster(world.model, prefill=1, decode=2, engine=ENGINE, **kept) as cluster:
        load_all(cluster)
        assert world.check(cluster, adapters) == 0, "KV of one was used for another"
        settle(cluster)
        world.check(cluster, adapters)
        settle(cluster)
        assert_clean(cluster)
    with LocalCluster(world.model, prefill=0, engine=ENGINE, **kept) as cluster:
        load_all(cluster)
        assert world.check(cluster, adapters) > 0
        assert world.check(cluster, [world.adapter()]) == 0
        assert_clean(cluster)


@pytest.mark.usefixtures("at_once", "unhurried")
def test_a_request_keeps_its_adapter_when_it_moves(world: World) -> None:
    adapters = [None, world.adapter()]
    with LocalCluster(world.model, prefill=0, decode=2, engine=ENGINE) as cluster:
        futures = [cluster.submit(PROMPTS[i], GREEDY, adapter=adapters[i % 2]) for i in range(4)]
        chase(cluster, futures)
        for i, future in enumerate(futures):
            assert tuple(future.result(300).tokens) == world.expected[adapters[i % 2]][i]
        assert_clean(cluster)


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_the_death_of_a_worker_changes_no_token(world: World) -> None:
    adapters = [None, world.adapter(), world.adapter()]
    with LocalCluster(world.model, prefill=1, decode=2, engine=ENGINE) as cluster:
        futures = [(a, cluster.submit(PROMPTS[0], GREEDY, adapter=a)) for a in adapters]
        cluster.kill("decode-0")
        for adapter, future in futures:
            assert tuple(future.result(300).tokens) == world.expected[adapter][0]


def test_an_adapter_that_is_written_again_finds_no_kv_of_the_one_before(world: World) -> None:
    path = world.folder / "again"
    with LocalCluster(
        world.model, prefill=1, decode=1, engine=ENGINE, host_bytes=8 * MIB
    ) as cluster:
        for _ in range(3):
            adapter = world.adapter(path)
            assert world.check(cluster, [adapter]) == 0
            settle(cluster)
            assert world.check(cluster, [adapter]) > 0
        assert_clean(cluster)


def test_more_adapters_than_there_is_memory_for_are_all_served(world: World) -> None:
    adapters = [world.adapter() for _ in range(5)]
    size = 250_000  # as large as each is, about
    engine = EngineSection(num_blocks=256, max_num_batched_tokens=64, adapter_bytes=2 * size)
    with LocalCluster(world.model, prefill=1, decode=1, engine=engine) as cluster:
        world.check(cluster, [None, *adapters])
        assert_clean(cluster)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_sixteen_adapters_of_which_four_fit_outlive_kills_one_after_the_other(
    world: World, tmp_path: Path
) -> None:
    adapters = [world.adapter() for _ in range(16)]
    size, num_right = 250_000, 0
    engine = EngineSection(num_blocks=256, max_num_batched_tokens=64, adapter_bytes=4 * size)
    kept = {"host_bytes": 8 * MIB, "disk_bytes": 8 * MIB, "disk_path": str(tmp_path)}
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    with (
        LocalCluster(world.model, prefill=2, decode=2, engine=engine, **kept) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        kills = pool.submit(kill_by_turns, cluster, names, 12)
        while not kills.done():
            answers = world.ask(cluster, adapters)
            wrong = [(each.failed, each.tokens) for each, right in answers if not right]
            assert not wrong
            num_right += len(answers)
        kills.result()
        world.check(cluster, [None, *adapters])
    print(f"{num_right} answers, all right, none failed, beside 12 kills")


def kill_by_turns(cluster: LocalCluster, names: Sequence[str], count: int) -> None:
    for name in itertools.islice(itertools.cycle(names), count):
        sleep(5.0)
        cluster.kill(name)
        cluster.revive(name)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_thousand_requests_find_no_kv_of_an_adapter_that_differs_by_a_byte(
    world: World, tmp_path: Path
) -> None:
    """KV that other versions have left of each prompt lies in devices, host memory, on disk and at
    peers."""
    path = world.folder / "byte"
    write_adapter(path, world.model, rank=4)
    file = path / "adapter_model.safetensors"
    one = SamplingParams(max_tokens=1, temperature=0.0)
    prompts = [tokens_of(40, seed=number) for number in range(100)]
    engine = EngineSection(num_blocks=48, max_num_batched_tokens=256)
    kept: dict[str, Any] = {"host_bytes": MIB // 2, "disk_bytes": 64 * MIB, "disk_after_s": 0.0}
    num_tries = num_hits = 0
    with LocalCluster(
        world.model, prefill=1, decode=2, engine=engine, disk_path=str(tmp_path), **kept
    ) as cluster:
        while num_tries < 10_000:
            whole = bytearray(file.read_bytes())
            whole[-2 * (1 + num_tries // 100)] ^= 1
            file.write_bytes(whole)
            adapter = Adapter(read_adapter(path).digest, str(path))
            for again in (False, True):
                futures = [cluster.submit(prompt, one, adapter=adapter) for prompt in prompts]
                found = [future.result(300) for future in futures]
                cluster.check()
                assert all(each.failed is None for each in found)
                cached = sum(each.num_cached_tokens > 0 for each in found)
                if again:
                    num_hits += cached
                else:
                    assert cached == 0, "KV of another adapter"
                    num_tries += len(found)
        sources = cluster.status().totals.cached_tokens_by_source
    assert {"device", "host", "disk", "peer"} <= sources.keys(), sources
    print(f"{num_tries} first requests found nothing, {num_hits} second ones: {sources}")


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_models_with_an_adapter_each_answer_as_their_own_merged_weights(
    world: World, tmp_path: Path, num_ranks: int
) -> None:
    """The adapters are of the same bytes. All four kinds of requests are served at once."""
    other = World(tmp_path, scaled(world.model, tmp_path / "other", 3.0))
    adapters = world.adapter(), other.adapter()
    same = write_adapter(tmp_path / "same", world.model, seed=7, rank=4)
    for number, each in enumerate((world, other)):
        each.expected[SAME] = answers_of(merge(tmp_path / f"same{number}", each.model, same))
    bytes_of = Adapter(read_adapter(same).digest, str(same))
    engine = msgspec_replace(ENGINE, tensor_parallel_size=num_ranks, threads=num_ranks)
    engine = msgspec_replace(engine, num_speculative_tokens=2 if num_ranks == 1 else 0)
    further = {"other": other.model}
    with LocalCluster(world.model, prefill=0, engine=engine, further=further) as cluster:
        kinds = [
            (name, each, adapter)
            for name, each, own in (("", world, adapters[0]), ("other", other, adapters[1]))
            for adapter in (None, own, bytes_of)
        ]
        for again in (False, True):
            asked = [
                (each.expected[SAME if adapter is bytes_of else adapter][i], future)
                for name, each, adapter in kinds
                for i, prompt in enumerate(PROMPTS)
                for future in [cluster.submit(prompt, GREEDY, model=name, adapter=adapter)]
            ]
            for expected, future in asked:
                answer = future.result(300)
                assert tuple(answer.tokens) == expected
                assert again or not answer.num_cached_tokens
        assert_clean(cluster)


@pytest.mark.long  # pytest -m long -s -k ranks_and_servers tests/local/test_local_adapters.py
@pytest.mark.timeout(1500)
def test_ten_thousand_requests_over_models_ranks_and_servers_find_no_kv_of_others(
    world: World, tmp_path: Path
) -> None:
    """Two servers, one of two ranks, have the same two models and one disk, and are started again
    and again. Each round has an adapter that differs by a byte from the one before, and both models
    compute with it: what is asked first of a model finds nothing. The other server gives the same
    token, and so does the one that is started next, whatever of it is on disk still."""
    path, other = world.folder / "byte-2", scaled(world.model, tmp_path / "other", 3.0)
    write_adapter(path, world.model, rank=4)
    file = path / "adapter_model.safetensors"
    first = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2)
    prompts = [tokens_of(40, seed=number) for number in range(100)]
    engine = EngineSection(num_blocks=48, max_num_batched_tokens=256)
    ranks = msgspec_replace(engine, tensor_parallel_size=2, threads=2)
    kept: dict[str, Any] = {"host_bytes": MIB // 2, "disk_bytes": 64 * MIB, "disk_after_s": 0.0}
    kept |= {"further": {"other": other}, "disk_path": str(tmp_path), "prefill": 0}

    def asked(
        servers: Servers, models: tuple[str, str], adapter: Adapter, count: int = 100
    ) -> list[Completion]:
        """Asks each of the servers of the model that is given for it."""
        futures = [
            server.submit(prompt, first, model=model, adapter=adapter)
            for server, model in zip(servers, models, strict=True)
            for prompt in prompts[:count]
        ]
        found = [future.result(300) for future in futures]
        assert [each.failed for each in found] == [None] * len(found)
        return found

    num_tries, num_hits, left, adapter = 0, 0, list[Completion](), Adapter(b"", "")
    for _ in range(5):
        with (
            LocalCluster(world.model, engine=engine, **kept) as alone,
            LocalCluster(world.model, engine=ranks, **kept) as pair,
        ):
            servers = alone, pair
            for server in servers:
                load_all(server)
            if left:
                again = asked(servers, ("", "other"), adapter, FEW)
                num_hits += sum(each.num_cached_tokens > 0 for each in again)
                assert_alike(again, left)
            for _ in range(10):
                whole = bytearray(file.read_bytes())
                whole[-2 * (1 + num_tries // 200)] ^= 1
                file.write_bytes(whole)
                adapter = Adapter(read_adapter(path).digest, str(path))
                firsts = asked(servers, ("", "other"), adapter)
                assert not any(each.num_cached_tokens for each in firsts), "KV of another"
                num_tries += len(firsts)
                seconds = asked(servers, ("other", ""), adapter)
                assert_alike([*seconds[100:], *seconds[:100]], firsts)
            left = asked(servers, ("", "other"), adapter, FEW)
            for server in servers:
                settle(server)
                server.check()
    print(f"{num_tries} first requests found nothing; after starts {num_hits} of {8 * FEW} did")


def assert_alike(ones: Sequence[Completion], others: Sequence[Completion]) -> None:
    """The sums of ranks have another order, so they may differ where two tokens are as good."""
    for one, other in zip(ones, others, strict=True):
        assert one.tokens == other.tokens or is_near(one, other), (one, other)


def is_near(one: Completion, two: Completion) -> bool:
    """Whether both have found the same two tokens best, and hardly one better than the other."""
    found = [dict(each.logprobs[0].top) for each in (one, two)]
    spread = [max(each.values()) - min(each.values()) for each in found]
    return found[0].keys() == found[1].keys() and max(spread) < 1e-5


def test_an_adapter_that_has_changed_fails_its_own_requests_with_the_reason(world: World) -> None:
    path = world.folder / "changed"
    old, good = world.adapter(path), world.adapter()
    write_adapter(path, world.model, seed=99)
    with LocalCluster(world.model, prefill=1, decode=1, engine=ENGINE) as cluster:
        answers = world.ask(cluster, [None, old, good])
        for number, (answer, is_right) in enumerate(answers):
            if number % 3 != 1:
                assert is_right
                continue
            assert answer.failed is not None
            assert answer.failed.reason is Refusal.NEED
            assert "have changed since it was registered" in answer.failed.detail
        assert_clean(cluster)


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_what_runs_ends_with_the_bytes_that_were_registered(world: World) -> None:
    path = world.folder / "replaced"
    old = world.adapter(path)
    assert register(path) == old
    with LocalCluster(world.model, prefill=1, decode=2, engine=ENGINE) as cluster:
        futures = [cluster.submit(PROMPTS[0], GREEDY, adapter=old)]
        world.check(cluster, [world.adapter(path)])  # in place of the one that runs
        cluster.kill("decode-0")
        futures += [cluster.submit(PROMPTS[0], GREEDY, adapter=old) for _ in range(2)]
        for future in futures:
            assert tuple(future.result(300).tokens) == world.expected[old][0]


def test_ten_thousand_adapters_and_salts_share_no_hash() -> None:
    draw, names = random.Random(1), set()
    tokens = [1] * 16
    for number in range(10_000):
        adapter = Adapter(draw.randbytes(32) if number % 2 else bytes([number % 251]) * 32, "")
        scope = CacheScope(draw.choice((b"", draw.randbytes(16))), draw.choice((0, 16)))
        own = (*hash_blocks(b"model", adapter.scoped(scope), tokens, 16),)
        names |= {(scope.salt, adapter.digest, own)}
        assert own != (*hash_blocks(b"model", scope, tokens, 16),)
    by_hash = {own: (salt, digest) for salt, digest, own in names}
    assert len(by_hash) == len({(salt, digest) for salt, digest, _ in names})
