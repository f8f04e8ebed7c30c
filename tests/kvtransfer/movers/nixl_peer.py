"""A second process with a NIXL agent: prints its metadata (hex), then waits to be told to end.

`python -m tests.kvtransfer.movers.nixl_peer NUM_BLOCKS BYTES_PER_BLOCK SEED NUM_HOST_BLOCKS`
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def content(num_blocks: int, bytes_per_block: int, seed: int) -> np.ndarray:
    """`[num_blocks, bytes_per_block]`: every block its own bytes."""
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, bytes_per_block), np.uint8)


@contextmanager
def peer_process(
    num_blocks: int, bytes_per_block: int, seed: int, num_host_blocks: int = 0
) -> Iterator[tuple[subprocess.Popen[str], bytes]]:
    """The process and its agent's metadata; it is killed at the end. Its host arena, if there are
    `num_host_blocks`, has the content of `seed + 1`."""
    args = [str(n) for n in (num_blocks, bytes_per_block, seed, num_host_blocks)]
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert process.stdout is not None
    try:
        yield process, bytes.fromhex(process.stdout.readline())
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
        assert process.stdin is not None
        process.stdin.close()


def main() -> None:
    import torch

    from kvrelay.kvtransfer.movers.nixl import NixlAgent

    num_blocks, bytes_per_block, seed, num_host_blocks = (int(arg) for arg in sys.argv[1:])
    pool = torch.from_numpy(content(num_blocks, bytes_per_block, seed))
    host = content(num_host_blocks, bytes_per_block, seed + 1) if num_host_blocks else None
    agent = NixlAgent("peer", pool, host=host)
    sys.stdout.write(agent.metadata().hex() + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    agent.close()


if __name__ == "__main__":
    main()
