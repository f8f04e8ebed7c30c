"""Ranks whose steps are a GPU's: where there is none, a runner that interprets its kernels, and a
follower's process with one.

    python -m tests.engine.model.gpu.triton_ranks FD    (as parallel.runner starts a follower)
"""

import os
from typing import Any

import pytest

from kvrelay.engine.model.ops import TORCH_DTYPES
from kvrelay.engine.model.parallel import follower, link, runner
from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.kvtransfer.checksum import begin_checksums, checksum_blocks
from kvrelay.kvtransfer.layout import BlockLayout, HeadShare
from kvrelay.kvtransfer.movers.pool import block_bytes


class InterpretedRunner(ModelRunner):
    def _ops(self, num_threads: int) -> Any:
        from kvrelay.engine.model.gpu.ops import TritonOps

        return TritonOps(self._own, self._by_layers(), TORCH_DTYPES[self.dtype], self.max_model_len)


class Checksums:
    """Companion, and what rank 0 has in its place: of the heads of a rank."""

    def __init__(self, made: ModelRunner, shard: Shard, tell: Any = None) -> None:
        spec = made.config.kv_spec(made.kv_spec.block_size, made.dtype)
        self.facts = self.share = BlockLayout(spec).share(shard.rank, shard.size)
        assert isinstance(self.share, HeadShare)
        self.pool = block_bytes(made.kv_pool, self.share)

    def checksums(self, block_ids: Any) -> list[int]:
        return checksum_blocks(self.pool, block_ids, self.share)

    def begin_checksums(self, block_ids: Any) -> Any:
        return begin_checksums(self.pool, block_ids, self.share)

    def close(self) -> None:
        pass


def interpret(patch: pytest.MonkeyPatch) -> None:
    """Workers of several ranks are made of such runners from now on."""
    patch.setattr(runner, "ModelRunner", InterpretedRunner)
    patch.setattr(link, "FOLLOWER", __name__)


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.MonkeyPatch().setattr(follower, "ModelRunner", InterpretedRunner)
    follower.main()
