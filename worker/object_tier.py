"""The object store as a tier of a worker: shared with all workers that have the same hashes.

Life of its list: read page by page from the start on, on a thread of its own, so that a store that
does not answer holds up no copies; a page that fails is asked for again, later and later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.config import TiersSection, WorkerConfig
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.native import NativeBuildError
from kvrelay.kvtransfer.agent import StoreIndex, StoreListed
from kvrelay.kvtransfer.executor import IDLE_WAIT_S
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.worker.disk_tier import MakeCopies, Storage

if TYPE_CHECKING:
    from kvrelay.kvtransfer.store.bucket import Bucket

RETRY = Backoff(5.0, 300.0)

log = logging.getLogger("kvrelay.objects")

Page = tuple[list[str], bool]


class ObjectStore:
    """Implements kvtransfer.executor.Store: says what the bucket holds. Owned by the tier's thread.

    Invariant: at most one request is on its way; at most `most` names are announced."""

    wait_s = IDLE_WAIT_S

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._left = most
        self._clock = clock
        self._after = ""
        self._failures = 0
        self._ask_at = float("-inf")
        self._thread = ThreadPoolExecutor(1, "kv-object-list")
        self._page: Future[Page] | None = None
        self.is_listed = False

    def update(self, change: StoreIndex) -> None:
        """Keys are the index."""

    def check(self, busy: bool) -> Sequence[StoreListed]:
        """The next page, if it has come."""
        if self._page is None:
            if not self.is_listed and self._clock() >= self._ask_at:
                ask = self._bucket.list
                self._page = self._thread.submit(ask, self._prefix, self._after)
            return []
        if not self._page.done():
            return []
        page, self._page = self._page, None
        return self._take(page)

    def _take(self, page: Future[Page]) -> list[StoreListed]:
        from kvrelay.kvtransfer.store.bucket import BucketError, name_in

        try:
            keys, more = page.result()
        except BucketError as error:
            self._failures += 1
            pause_s = RETRY.pause_s(self._failures)
            self._ask_at = self._clock() + pause_s
            log.warning("%s; it is listed again in %g s", error, pause_s)
            return []
        self._failures = 0
        found = (name_in(key, self._prefix) for key in keys)
        names = tuple(name for name in found if name is not None)[: self._left]
        self._after = keys[-1] if keys else ""
        self._left -= len(names)
        self.is_listed = not (more and keys and self._left)
        return [StoreListed(Tier.OBJECT, names)] if names else []

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def bucket_of(tiers: TiersSection) -> Bucket:
    from kvrelay.kvtransfer.store.bucket import Bucket

    where = tiers.object_endpoint, tiers.object_region, tiers.object_credentials
    return Bucket(tiers.object_bucket, *where)


def open_object_tier(
    config: WorkerConfig,
    tiers: TiersSection,
    memory: Mapping[Tier, Any],
    make_copies: MakeCopies,
    share: HeadShare | None = None,
    *,
    num_ranks: int = 1,
) -> tuple[Storage | None, list[str]]:
    """The tier, if there is to be one and it can be had, and what an operator should know.
    Arguments are as those of `open_disk_tier`."""
    from kvrelay.kvtransfer.agent import AgentError
    from kvrelay.kvtransfer.agents.object import ObjectAgent
    from kvrelay.kvtransfer.codec import ExponentCodec
    from kvrelay.kvtransfer.store.bucket import BucketError, key_prefix

    if not tiers.object_bucket:
        return None, []
    if num_ranks > 1:
        why = f"it is for workers of one rank, and there are {num_ranks}"
        return None, [f"serving without an object tier: {why}"]
    bucket, prefix = bucket_of(tiers), key_prefix(tiers.object_prefix, config.fingerprint)
    try:
        agent = ObjectAgent(config.node_id, memory, bucket, prefix, ExponentCodec(), share)
    except (AgentError, BucketError, NativeBuildError) as error:
        return None, [f"serving without an object tier: {error}"]
    copies = make_copies(agent, results=agent.results)
    return Storage(copies, ObjectStore(bucket, prefix, tiers.object_blocks), ()), []
