"""A process that fills a disk store until it is killed, and says what it has done.

`python -m tests.kvtransfer.store.store_writer FOLDER SEED`. On stdout, a line each:
`begin SLOT=NAME ...`
before it takes the slots out of the index, `removed` after that, `put` after the new blocks are in.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from kvrelay.kvtransfer.agent import StoreIndex
from tests.kvtransfer.store.stores import MAX_BLOCKS, open_store, record, write


def main() -> None:
    store = open_store(Path(sys.argv[1]), lock_timeout_s=5.0)
    rng = random.Random(sys.argv[2])
    while True:
        slots = rng.sample(range(MAX_BLOCKS), rng.randint(1, 4))
        blocks = {slot: rng.randbytes(16) for slot in slots}
        say("begin " + " ".join(f"{slot}={name.hex()}" for slot, name in blocks.items()))
        store.update(StoreIndex(remove=tuple(slots)))
        say("removed")
        for slot, name in blocks.items():
            write(store, slot, name)
        store.update(StoreIndex(put=tuple(record(slot, name) for slot, name in blocks.items())))
        say("put")


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
