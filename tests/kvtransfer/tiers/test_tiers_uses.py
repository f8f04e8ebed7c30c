"""The use of a prefix is noted for runs of its blocks, and says of each block what it did."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import pytest

from kvrelay.engine.kv.block_hash import of_groups
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.kv.window import Windows
from kvrelay.kvtransfer.tiers.blocks import TierBlocks
from kvrelay.kvtransfer.tiers.uses import Usage
from tests.engine.configs import worker_config

KEEP = Retention(60.0)


def chain(path: Sequence[int], num_groups: int = 1) -> list[bytes]:
    """Names of the blocks of a prefix, of all groups: each says what is before it."""
    names, parent = [], b""
    for number in path:
        parent = blake2b(parent + number.to_bytes(4), digest_size=16).digest()
        names.append(parent)
    return of_groups(names, num_groups)


class Below:
    """The blocks below a device that has room for all."""

    def __init__(self, sizes: Sequence[int] = (0,)) -> None:
        config = worker_config(num_blocks=1 << 16, block_size=4, num_host_blocks=1 << 16)
        self.kv = KVCacheManager(1 << 16, 4, Windows.of(4, sizes))
        self.blocks = TierBlocks(config, self.kv)

    def seal(self, names: Sequence[bytes], *, on_device: bool = True) -> None:
        new = [name for name in names if not self.kv.pool.is_cached(name)]
        for block, name in zip(self.kv.allocate(len(new)) or [], new, strict=True):
            self.kv.pool.seal(block, name)
            if not on_device:
                self.kv.pool.release([block])
                self.kv.pool.evict([name])

    def order(self) -> list[bytes]:
        """The first to be forgotten first."""
        return sorted(self.blocks.usages, key=lambda name: self.usage(name).recency)

    def usage(self, name: bytes) -> Usage:
        return self.blocks.usages[name].settled()


class Plain:
    """What is said of each block by writing to each block."""

    def __init__(self) -> None:
        self.recency = 0
        self.used: dict[bytes, dict[str, Any]] = {}

    def touch(self, now: float, name: bytes, retention: Retention, *, is_use: bool) -> None:
        is_new = name not in self.used
        fresh = {"last_used": now, "expires_at": 0.0, "to_disk": False, "num_uses": 0}
        used = self.used.setdefault(name, {**fresh, "is_low": True, "parked": False})
        self.recency += 1
        used["recency"], used["last_used"] = self.recency, now
        used["expires_at"] = max(used["expires_at"], now + retention.keep_s)
        used["to_disk"] |= retention.to_disk
        used["is_low"] &= retention.is_low
        if is_use and not is_new:
            used["num_uses"] += 1
            used["parked"] = False

    def order(self) -> list[bytes]:
        return sorted(self.used, key=lambda name: self.used[name]["recency"])


class Sessions:
    """Requests of sessions that share beginnings, part and go on; blocks are lost meanwhile."""

    def __init__(self, seed: int, sizes: Sequence[int], *, loses: bool) -> None:
        self.random, self.sizes, self.loses = random.Random(seed), sizes, loses
        self.below, self.plain = Below(sizes), Plain()
        self.now, self.paths = 0.0, [[0]]

    def request(self) -> None:
        choice = self.random
        path = list(choice.choice(self.paths))
        del path[choice.randint(1, len(path)) :]
        path += [choice.randrange(3) for _ in range(choice.randrange(6))]
        self.paths = [*self.paths[-9:], path]
        names = chain(path, len(self.sizes))
        retention = Retention(
            choice.choice([5.0, 60.0, 600.0]), choice.random() < 0.5, is_low=choice.random() < 0.5
        )
        self.use(names, retention)
        whole = [group for group, size in enumerate(self.sizes) if not size]
        count = len(self.sizes)
        self.below.seal([name for i, name in enumerate(names) if i % count in whole])
        copied = [
            name for i, name in enumerate(names) if i % count in whole or choice.random() < 0.5
        ]
        for name in copied:
            self.below.blocks.want_copy(self.now, name, retention)
            self.plain.touch(self.now, name, retention, is_use=False)
        self.use(names, retention)

    def use(self, names: list[bytes], retention: Retention) -> None:
        self.now += 1.0
        self.below.blocks.use(self.now, names, retention)
        for index in range(len(names) - 1, -1, -1):
            is_offered = not self.sizes[index % len(self.sizes)]
            is_cached = is_offered and self.below.kv.pool.is_cached(names[index])
            if names[index] in self.plain.used or is_cached:
                self.plain.touch(self.now, names[index], retention, is_use=True)

    def park(self) -> None:
        for name in self.random.sample(sorted(self.plain.used), len(self.plain.used) // 3):
            self.below.usage(name).parked = True
            self.plain.used[name]["parked"] = True

    def lose(self) -> None:
        for name in self.random.sample(sorted(self.plain.used), len(self.plain.used) // 4):
            self.below.blocks.drop(name)
            del self.plain.used[name]
            if self.random.random() < 0.5 and (found := self.below.kv.pool.lookup([name])):
                self.below.kv.pool.forget(found[0])

    def compare(self) -> None:
        self.below.blocks.check_integrity()
        assert self.below.order() == self.plain.order()
        for name, said in self.plain.used.items():
            usage = self.below.usage(name)
            assert usage.is_reused == (said["num_uses"] > 1)
            if said["num_uses"] and usage.run is not None:
                assert usage.parked == said["parked"]
            if not self.loses and len(self.sizes) == 1:  # one that joins a run has what that had
                exact = {key: getattr(usage, key) for key in said if key != "recency"}
                assert exact == {key: value for key, value in said.items() if key != "recency"}
            assert usage.last_used >= said["last_used"]
            assert usage.expires_at >= said["expires_at"]
            assert usage.to_disk >= said["to_disk"]


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("sizes", [(0,), (0, 8, 0)])
def test_uses_of_runs_are_uses_of_their_blocks(sizes: tuple[int, ...], loses: bool) -> None:
    for seed in range(6):
        sessions = Sessions(seed, sizes, loses=loses)
        for step in range(20):
            sessions.request()
            if step % 5 == 2:
                sessions.park()
            if loses and step % 4 == 3:
                sessions.lose()
            sessions.compare()


class CountingUsages(dict[bytes, Usage]):
    num_looked_at = 0

    def get(self, name: bytes, default: Any = None) -> Any:
        self.num_looked_at += 1
        return super().get(name, default)


def looked_at(num_rows: int, sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> int:
    """By ten turns of a session that is so long, each of which adds a row."""
    below = Below(sizes)
    counting = below.blocks.usages = CountingUsages()
    settled = Usage.settled

    def counted(usage: Usage) -> Usage:
        counting.num_looked_at += 1
        return settled(usage)

    path = list(range(num_rows))
    for turn in range(13):
        names = chain(path + [7] * turn, len(sizes))
        below.blocks.use(2.0 * turn, names, KEEP)
        below.seal(names)
        below.blocks.use(2.0 * turn + 1, names, KEEP)
        if turn == 2:
            counting.num_looked_at = 0
            monkeypatch.setattr(Usage, "settled", counted)
    monkeypatch.undo()
    below.blocks.check_integrity()
    return counting.num_looked_at


@pytest.mark.parametrize("sizes", [(0,), (0, 8, 0)])
def test_a_turn_looks_at_its_new_blocks(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = looked_at(50, sizes, monkeypatch), looked_at(2000, sizes, monkeypatch)
    assert short == long <= 10 * 12 * len(sizes)


def test_sessions_that_part_divide_what_they_share() -> None:
    below = Below()
    for end in ([1, 2, 3], [1, 2, 9, 9], [5], [1, 2, 3, 4]):
        names = chain([*range(40), *end])
        below.seal(names)
        for _ in range(2):
            below.blocks.use(1.0, names, KEEP)
            below.blocks.check_integrity()
    runs = {id(usage.run) for usage in below.blocks.usages.values()}
    assert len(runs) == 6  # 40 rows, [1, 2], [3], [9, 9], [5], [4]
    shared = below.usage(chain(range(40))[0])
    assert shared.num_uses == 7  # the first of eight has made it
