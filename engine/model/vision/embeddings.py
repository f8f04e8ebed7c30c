"""Embeddings of images in a worker's host memory, by digest: made beside the steps when one first
needs them, and dropped when others need the room, what was not used for the longest first.

They stay in the worker that computes prompts: others get KV, which has all that follows from them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from time import perf_counter

import torch

from kvrelay.engine.images import Image, KeptImages, image_key
from kvrelay.engine.model.vision.pictures import ImageError

IDLE_WAIT_S = 0.05  # for one that is encoded, where a step has nothing else to do
MAX_PUBLISHED = 256  # the last that were used
SMOOTHING = 0.3  # share that the last image counts, in the mean of times

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """An image that a sequence has tokens of in this step."""

    index: int  # among those of its prompt
    image: Image
    nbytes: int  # that its embeddings take


@dataclass(slots=True)
class _Entry:
    future: Future[torch.Tensor]
    nbytes: int
    used: int  # the last step that wanted it


class Embeddings:
    """Those of one runner's images. Called from the thread that runs steps; they are made in
    another, one after the other.

    Invariant: after `choose`, what is held or made takes at most `max_bytes`, beside what the
    sequences of the step want that have all of theirs, or were the first to lack some."""

    def __init__(
        self,
        encode: Callable[[int, Image], torch.Tensor],
        max_bytes: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """encode: of an image, by its index in a prompt; may raise ImageError."""
        self._encode, self._max_bytes, self._clock = encode, max_bytes, clock
        self._token_s = 0.0
        self._thread = ThreadPoolExecutor(1, "images")
        self._entries: dict[bytes, _Entry] = {}
        self._step = 0
        self.begun: Counter[int] = Counter()  # in the last call, for each sequence

    def choose(
        self, wanted: Mapping[int, Sequence[Wanted]], *, is_all: bool
    ) -> tuple[set[int], dict[int, str]]:
        """wanted: by the index of each sequence of a step. Returns those whose embeddings are not
        all there yet; and those of which some cannot be made, with the reason. is_all: the step has
        no other sequence."""
        self._step += 1
        self.begun = Counter()
        for each in (each for images in wanted.values() for each in images):
            if (entry := self._entries.get(each.image.digest)) is not None:
                entry.used = self._step
        away, failed = self._look(wanted)
        if is_all and len(away) == len(wanted):
            futures = [entry.future for entry in self._entries.values() if not entry.future.done()]
            wait(futures, IDLE_WAIT_S, FIRST_COMPLETED)
            away, failed = self._look(wanted)
        self._has_room(0)
        return away, failed

    def get(self, digest: bytes) -> torch.Tensor:
        """float32 [1 + taps, tokens, hidden_size], of an image of a sequence that `choose` has left
        in the step."""
        return self._entries[digest].future.result()

    def kept(self) -> KeptImages:
        """What is reported to routers, the last that were used first."""
        recent = sorted(self._entries.items(), key=lambda item: -item[1].used)[:MAX_PUBLISHED]
        return KeptImages(tuple(image_key(digest) for digest, _ in recent), self._token_s)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values())

    def _look(self, wanted: Mapping[int, Sequence[Wanted]]) -> tuple[set[int], dict[int, str]]:
        """Has those made that are not there, as far as there is room: for the first sequence that
        lacks some there is, else those of a large step would wait for each other."""
        away, failed = set[int](), dict[int, str]()
        for seq, images in wanted.items():
            for each in images:
                entry = self._entries.get(each.image.digest)
                if entry is None and (away <= {seq} or self._has_room(each.nbytes)):
                    entry = self._begin(each)
                    self.begun[seq] += 1
                if entry is None or not entry.future.done():
                    away.add(seq)
                elif why := self._fault(each, entry):
                    failed[seq] = why
        return away - failed.keys(), failed

    def _begin(self, wanted: Wanted) -> _Entry:
        self._has_room(wanted.nbytes)
        future = self._thread.submit(self._timed, wanted.index, wanted.image)
        entry = _Entry(future, wanted.nbytes, self._step)
        self._entries[wanted.image.digest] = entry
        return entry

    def _timed(self, index: int, image: Image) -> torch.Tensor:
        began = self._clock()
        made = self._encode(index, image)
        token_s = (self._clock() - began) / max(1, made.shape[1])
        self._token_s += (SMOOTHING if self._token_s else 1.0) * (token_s - self._token_s)
        return made

    def _has_room(self, nbytes: int) -> bool:
        """Drops what this step does not want until there is; False: there is not."""
        while self.nbytes + nbytes > self._max_bytes:
            idle = {
                digest: entry.used
                for digest, entry in self._entries.items()
                if entry.used != self._step and entry.future.done()
            }
            if not idle:
                return False
            del self._entries[min(idle, key=lambda digest: idle[digest])]
        return True

    def _fault(self, wanted: Wanted, entry: _Entry) -> str:
        """Why it could not be made, which is forgotten: the next request has it tried again."""
        error = entry.future.exception()
        if error is None:
            return ""
        self._entries.pop(wanted.image.digest, None)
        if isinstance(error, ImageError):
            return str(error)
        logger.error("image %d cannot be encoded", wanted.index, exc_info=error)
        return f"image {wanted.index} cannot be encoded; the worker's log says why"
