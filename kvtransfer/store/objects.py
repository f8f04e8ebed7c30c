"""What an object store holds, which all workers share that have the same hashes.

Life of its list: read page by page from the start on, on a thread of its own, so that a store that
does not answer holds up no copies; a page that fails is asked for again, later and later. It ends
where the worker remembers no more names. What requests lack is asked for by name: whether the first
is there, then the second, fourth, eighth and so on at once, then between the last that is and the
first that is not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import FindStored, StoreIndex, StoreListed
from kvrelay.kvtransfer.executor import IDLE_WAIT_S
from kvrelay.kvtransfer.store.bucket import Bucket, BucketError, name_in

RETRY = Backoff(5.0, 300.0)
PAGE_WAIT_S = 0.02  # between two looks while pages of the list come
ASKED_WAIT_S = 0.005  # while requests wait
MAX_ASKED = 4  # searches at a time; what others lack is computed
NUM_LOOKUPS = 8  # objects that are asked for at once

log = logging.getLogger("kvrelay.objects")

Page = tuple[list[str], bool]


class Unlisted:
    """In place of an `ObjectStore` in ranks above 0: what is there, rank 0 says, whose objects are
    written and read with theirs."""

    wait_s = IDLE_WAIT_S

    def update(self, change: StoreIndex | FindStored) -> None:
        pass

    def check(self, busy: bool) -> Sequence[StoreListed]:
        return ()

    def close(self) -> None:
        pass


class ObjectStore:
    """Implements kvtransfer.executor.Store: says what the bucket holds. Owned by the tier's thread.

    Invariant: at most one page is on its way; at most `most` names are listed; at most MAX_ASKED
    searches are on their way."""

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
        self._searches = ThreadPoolExecutor(MAX_ASKED, "kv-object-search")
        self._lookups = ThreadPoolExecutor(NUM_LOOKUPS, "kv-object-lookup")
        self._asked: dict[Future[int], tuple[bytes, ...]] = {}

    @property
    def wait_s(self) -> float:
        if self._asked:
            return ASKED_WAIT_S
        is_listing = self._page is not None or not self.is_listed
        return PAGE_WAIT_S if is_listing and not self._failures else IDLE_WAIT_S

    def update(self, change: StoreIndex | FindStored) -> None:
        """Begins a search; keys are the index themselves."""
        if isinstance(change, FindStored) and len(self._asked) < MAX_ASKED:
            self._asked[self._searches.submit(self._count, change.names)] = change.names

    def check(self, busy: bool) -> Sequence[StoreListed]:
        """The next page, if it has come, and what was asked for."""
        found = []
        for search in [search for search in self._asked if search.done()]:
            names = self._asked.pop(search)
            if search.exception() is None:
                found.append(StoreListed(Tier.OBJECT, names[: search.result()], names[0]))
        if self._page is not None and self._page.done():
            page, self._page = self._page, None
            found += self._take(page)
        if self._page is None and not self.is_listed and self._clock() >= self._ask_at:
            self._page = self._thread.submit(self._bucket.list, self._prefix, self._after)
        return found

    def _count(self, names: Sequence[bytes]) -> int:
        """How many of the first are there, if those before one that is are too. On a thread of its
        own. Raises BucketError."""
        if not self._has(names[0]):
            return 0
        end = len(names)
        doubling = [(1 << i) - 1 for i in range(1, end.bit_length())]
        have, lacks = self._between(0, end, doubling, names)
        while lacks - have > 1:
            step = max(1, (lacks - have) // (NUM_LOOKUPS + 1))
            places = [*range(have + step, lacks, step)][: 2 * NUM_LOOKUPS]
            have, lacks = self._between(have, lacks, places, names)
        return have + 1

    def _between(
        self, have: int, lacks: int, places: Sequence[int], names: Sequence[bytes]
    ) -> tuple[int, int]:
        """The last place that is known to be there before the first that is not."""
        found = self._lookups.map(lambda place: self._has(names[place]), places)
        for place, is_there in zip(places, [*found], strict=True):
            if not is_there:
                return have, place
            have = place
        return have, lacks

    def _has(self, name: bytes) -> bool:
        return self._bucket.has(self._prefix + name.hex())

    def _take(self, page: Future[Page]) -> list[StoreListed]:
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
        for threads in (self._thread, self._searches, self._lookups):
            threads.shutdown(wait=False, cancel_futures=True)
