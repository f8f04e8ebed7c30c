"""The disk tier of a worker: a folder of KV blocks that outlives the process.

Life of a store: opened and locked; what its index lists is loaded; slots are written by the disk
agent and entered by `DiskStore.update`; looked after by `DiskStore.check`; closed, or left behind
by a process that was killed, which is the same to the next one that opens it.
"""

from kvrelay.kvtransfer.store.disk import DiskStore
from kvrelay.kvtransfer.store.errors import StoreError, StoreInUse
from kvrelay.kvtransfer.store.folder import (
    StaleStore,
    first_free,
    places,
    slot_bytes,
    stale_stores,
    store_folder,
)

__all__ = [
    "DiskStore",
    "StaleStore",
    "StoreError",
    "StoreInUse",
    "first_free",
    "places",
    "slot_bytes",
    "stale_stores",
    "store_folder",
]
