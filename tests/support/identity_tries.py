"""Tries to find KV of one checkpoint with another, which differs in one byte of one tensor:

    python -m tests.support.identity_tries --tries 1000

A try changes a byte of the checkpoint in its folder, with size and mtime as they were, as a model
that was trained on: so each is a restart in the same folder as well. Blocks that the worker before
had are looked for by the worker after, by the same tokens: in device memory, in host memory that
was left behind (its own, and as another worker reads it), on disk, in a bucket, and at a peer. The
worker before is asked again at last, so that what was not found was there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from msgspec import structs

from kvrelay.decode_worker.vllm.build import engine_facts, kv_identity
from kvrelay.decode_worker.vllm.memory import LayerForm
from kvrelay.engine import cache_dir
from kvrelay.engine.config import EngineSection, ModelSection, TiersSection, WorkerConfig
from kvrelay.engine.identity import OWN, VLLM
from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.stats import Role
from kvrelay.kvtransfer.agent import StoreIndex
from kvrelay.kvtransfer.messages import KVConnect
from kvrelay.kvtransfer.movers.disk_tier import open_store
from kvrelay.kvtransfer.movers.left import LeftMover
from kvrelay.kvtransfer.peer.connector import Peers
from kvrelay.kvtransfer.store.arena import open_arena
from kvrelay.kvtransfer.store.bucket import bucket_of, key_prefix
from kvrelay.worker.kv_plan import plan_kv
from kvrelay.worker.spec import WorkerSpec
from kvrelay.worker.transfers import worker_config
from tests.engine.model.tiny import make_checkpoint
from tests.support.s3 import ACCESS_KEY, SECRET_KEY, S3StandIn, s3_standin

NUM_BLOCKS, BLOCK_SIZE = 4, 16
TIERS = ("device", "host memory", "left by another", "disk", "bucket", "peer")


def config_of(path: Path, runs: str) -> WorkerConfig:
    """That of a worker that starts with the checkpoint as it is now."""
    engine = EngineSection(num_blocks=64, max_model_len=256, block_size=BLOCK_SIZE)
    shape = read_config(path)
    digest = shape.digest(path, 256)
    if runs == VLLM:
        layer = LayerForm(["torch.float32", 1, [2, BLOCK_SIZE, 2, 8], [0, 1, 2, 3]], 2048)
        copies = SimpleNamespace(layers=[layer])
        config = SimpleNamespace(model_config=SimpleNamespace(dtype="torch.float32"))
        vllm = SimpleNamespace(version="1", config=config, attention_backends=[], copies=copies)
        digest = kv_identity(path, 256, engine_facts({}, cast(Any, vllm), on_gpu=False))
    plan = plan_kv(shape, engine, "float32")
    section = ModelSection(name=str(path))
    spec = WorkerSpec(
        *("c", "decode-0", Role.DECODE, 1, str(path), section, engine, TiersSection())
    )
    found = worker_config(spec, plan, 256, digest)
    return structs.replace(found, num_disk_blocks=8, disk_bytes=8 << 20, num_object_blocks=8)


def tensor_bytes(file: Path) -> range:
    """Where the numbers of all tensors are."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        json.loads(opened.read(size))
    return range(8 + size, file.stat().st_size)


def change_byte(file: Path, offset: int) -> None:
    stat = file.stat()
    with file.open("r+b") as target:
        target.seek(offset)
        (byte,) = target.read(1)
        target.seek(offset)
        target.write(bytes([byte ^ 1 << offset % 8]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


class Machine:
    """One folder with a checkpoint, and everything that outlives a worker."""

    def __init__(self, folder: Path, runs: str, store: S3StandIn) -> None:
        self.runs, self.rng = runs, random.Random(7)
        self.model = folder / "model"
        if not self.model.exists():
            make_checkpoint("llama", self.model)
        self.file = self.model / "model.safetensors"
        self.places = tensor_bytes(self.file)
        self.arenas, self.disk = folder / "shm", folder / "disk"
        keys = folder / "keys"
        keys.write_text(
            f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        )
        self.store = store
        self.bucket = bucket_of(
            TiersSection(
                object_bucket="kv", object_endpoint=store.url, object_credentials=str(keys)
            )
        )

    def trial(self) -> tuple[Counter[str], Counter[str]]:
        """How many blocks were found, by tier: by the worker after, and by the one before."""
        before = config_of(self.model, self.runs)
        change_byte(self.file, self.rng.choice(self.places))
        after = config_of(self.model, self.runs)
        tokens = [self.rng.randrange(200) for _ in range(NUM_BLOCKS * BLOCK_SIZE)]
        cache = KVCacheManager(64, BLOCK_SIZE)
        self._leave(before, tokens, cache)
        wrong = Counter({each: self._found(each, after, before, tokens, cache) for each in TIERS})
        right = Counter({each: self._found(each, before, before, tokens, cache) for each in TIERS})
        return wrong, right

    def _leave(self, config: WorkerConfig, tokens: list[int], cache: KVCacheManager) -> None:
        names = hash_blocks(config.fingerprint, UNSALTED, tokens, BLOCK_SIZE)
        blocks = cache.pool.allocate(len(names))
        assert blocks is not None
        for block, name in zip(blocks, names, strict=True):
            cache.pool.seal(block, name)
        cache.pool.release(blocks)
        records = tuple(DiskRecord(slot, name, slot, 600.0) for slot, name in enumerate(names))
        two = [structs.replace(config, node_id=each) for each in ("decode-0", "decode-1")]
        arenas = [open_arena(self.arenas, each, 8) for each in two]  # side by side
        for arena in arenas:
            arena.reserve([7])
            arena.update(StoreIndex(put=records, tier=Tier.HOST))
            arena.close()
        disk = open_store(self.disk, config, None)
        disk.update(StoreIndex(put=records))
        disk.close()
        prefix = key_prefix("kvrelay", config.fingerprint)
        self.store.objects.update((prefix + name.hex(), b"kv") for name in names)

    def _found(
        self,
        tier: str,
        config: WorkerConfig,
        other: WorkerConfig,
        tokens: list[int],
        cache: KVCacheManager,
    ) -> int:
        """Blocks of `other` that a worker with `config` would take for its own."""
        names = {*hash_blocks(config.fingerprint, UNSALTED, tokens, BLOCK_SIZE)}
        if tier == "device":
            return len(cache.pool.lookup([*names]))
        if tier == "host memory":
            arena = open_arena(self.arenas, config, 8)
            found = [each.block_hash for each in arena.records]
            arena.close(remove=config is not other)
            return len(found)
        if tier == "left by another":
            now = [0.0]
            pools = {Tier.DEVICE: np.zeros((8, config.bytes_per_block), np.uint8)}
            place = self.arenas / config.fingerprint.hex()
            agent = LeftMover("decode-0", place, place / "decode-0", pools, lambda: now[0])
            changes = agent.check(True)
            agent.close()
            return sum(len(change.records) for change in changes if hasattr(change, "records"))
        if tier == "disk":
            disk = open_store(self.disk, config, None)
            found = [each.block_hash for each in disk.records]
            disk.close()
            return len(found)
        if tier == "bucket":
            keys, _ = self.bucket.list(key_prefix("kvrelay", config.fingerprint))
            return len(keys)
        asked, reader = Peers(other), Peers(structs.replace(config, node_id="decode-1"))
        ask = KVConnect("decode-1", config.fingerprint, config.compatibility)
        [answer] = asked.on_connect(ask)
        fits, effects = reader.on_connected(answer.message)
        return NUM_BLOCKS if fits or any(hasattr(each, "metadata") for each in effects) else 0


@contextmanager
def machine(folder: Path, runs: str) -> Iterator[Machine]:
    with s3_standin() as store:
        yield Machine(folder, runs, store)


def run(folder: Path, runs: str, tries: int, say: Callable[[str], None] = print) -> Counter[str]:
    """Blocks that were found across, by tier; raises where what was left is not found again."""
    wrong: Counter[str] = Counter()
    with machine(folder, runs) as found:
        for number in range(tries):
            across, again = found.trial()
            wrong += across
            assert all(again[tier] == NUM_BLOCKS for tier in TIERS), again
            if number % 100 == 99:
                say(f"{runs}: {number + 1} tries, {sum(wrong.values())} blocks found across")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=1000)
    tries = parser.parse_args().tries
    cache_dir.LEAST_KEPT_BYTES = 0  # digests of small files are kept, too
    for runs in (OWN, VLLM):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["KVRELAY_CACHE"] = folder
            found = run(Path(folder), runs, tries)
            print(f"{runs}: {tries} tries, found across: {dict(found) or 'nothing'}")


if __name__ == "__main__":
    main()
