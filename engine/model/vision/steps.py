"""What a runner does with sequences that have images, before a step and for its batch.

A sequence has numbers in place of an image's tokens (`engine.images`); a step gets the model's own
token there, whose embedding is replaced. Where images are, and their size, is read once for each
sequence, and kept with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
import torch

from kvrelay.engine.images import FIRST_STAND_IN, Image, KeptImages, SeqImageRows
from kvrelay.engine.model.vision.config import Vision
from kvrelay.engine.model.vision.embeddings import Embeddings, Wanted
from kvrelay.engine.model.vision.layout import Layout, layout_of
from kvrelay.engine.model.vision.pictures import ImageError, patches_of
from kvrelay.engine.model.vision.rows import ImageRows
from kvrelay.engine.model.vision.tower import Tower
from kvrelay.engine.step import ScheduledSeq, Step

KEY = "images"


@dataclass(slots=True)
class _Known:
    """What is kept with a sequence, from step to step."""

    layout: Layout
    context: list[int] = field(default_factory=list)  # the model's tokens
    seen: set[bytes] = field(default_factory=set)  # digests that some step wanted


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step without what no vocabulary has, whose sequences have their `image_rows`. By index of
    these: those that are to come again, as images are still encoded, and why others cannot go
    on."""

    step: Step
    waiting: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)  # as in StepDone
    kept: KeptImages | None = None  # likewise


class StepImages:
    """Owned by a runner, and called from the thread that runs its steps."""

    def __init__(self, vision: Vision, tower: Tower, max_bytes: int) -> None:
        """max_bytes: of embeddings that are kept."""
        self._vision = vision

        def encode(index: int, image: Image) -> torch.Tensor:
            return tower.encode(*patches_of(index, image, vision))

        self.embeddings = Embeddings(encode, max_bytes)

    def prepare(self, step: Step) -> Prepared:
        if all(seq.images is None for seq in step.seqs):
            return Prepared(step)
        seqs, failed = [*step.seqs], dict[int, str]()
        wanted, found = dict[int, list[Wanted]](), Counter[int]()
        for index, seq in enumerate(step.seqs):
            if seq.images is None:
                continue
            try:
                known = self._known(seq)
            except ImageError as error:
                failed[index] = f"request {seq.request_id}: {error}"
                seqs[index] = replace(seq, tokens=[0] * len(seq.tokens), draft_tokens=[])
                continue
            overlapping = known.layout.overlapping(seq.start, seq.start + len(seq.tokens))
            each = [self._wanted(seq, known, number) for number in overlapping]
            if each:
                wanted[index] = each
            new = {each.image.digest for each in wanted.get(index, ())} - known.seen
            found[index] = sum(digest in self.embeddings for digest in new)
            known.seen |= new
            seqs[index] = self._shown(seq, known)
        waiting = set[int]()
        if wanted:
            waiting, why = self.embeddings.choose(wanted, is_all=len(wanted) == len(seqs))
            failed |= {at: f"request {seqs[at].request_id}: {text}" for at, text in why.items()}
        for index, seq in enumerate(seqs):
            if seq.images is not None:
                is_out = index in failed or index in waiting
                rows = SeqImageRows(True) if is_out else self._rows(seq, self._known(seq))
                seqs[index] = replace(seq, image_rows=rows)
        begun = self.embeddings.begun if wanted else found
        counts = {at: (begun[at], found[at]) for at in wanted if begun[at] or found[at]}
        kept = self.embeddings.kept() if wanted else None  # nothing else changes them
        return Prepared(replace(step, seqs=seqs), waiting, failed, counts, kept)

    def _rows(self, seq: ScheduledSeq, known: _Known) -> SeqImageRows:
        """What it has in the step, where its embeddings are there."""
        start, end, layout = seq.start, seq.start + len(seq.tokens), known.layout
        if (shift := layout.shift_from(start)) is not None:
            return SeqImageRows(shift=shift)
        rows, added = list[np.ndarray](), list[np.ndarray]()
        assert seq.images is not None
        for number in layout.overlapping(start, end):
            place = layout.places[number]
            a, b = max(start, place.first), min(end, place.end)
            rows.append(np.arange(a, b) - start)
            own = self.embeddings.get(seq.images.each[number].digest)
            added.append(own[:, a - place.first : b - place.first].numpy())
        turns = layout.turns(start, end)
        if not rows:
            return SeqImageRows(turns=turns)
        whole = np.concatenate(added, axis=1)
        return SeqImageRows(turns=turns, rows=np.concatenate(rows), added=whole)

    def _known(self, seq: ScheduledSeq) -> _Known:
        """Raises ImageError if the prompt's numbers are not those of its images."""
        known: _Known | None = seq.kept.get(KEY)
        if known is not None:
            return known
        assert seq.images is not None
        known = seq.kept[KEY] = _Known(layout_of(seq.images, self._vision))
        prompt = seq.context[: seq.num_prompt_tokens]
        stands = [at for at, token in enumerate(prompt) if token >= FIRST_STAND_IN]
        needed = [at for place in known.layout.places for at in range(place.first, place.end)]
        if stands != needed:
            del seq.kept[KEY]
            raise ImageError(
                f"{len(stands)} tokens of its prompt stand for images, this model makes"
                f" {len(needed)} of them: the API and its workers read other files"
            )
        return known

    def _wanted(self, seq: ScheduledSeq, known: _Known, number: int) -> Wanted:
        assert seq.images is not None
        count = known.layout.places[number].count
        return Wanted(number, seq.images.each[number], count * self._vision.bytes_per_token)

    def _shown(self, seq: ScheduledSeq, known: _Known) -> ScheduledSeq:
        """As the model reads it. A draft ends where the prompt that it is taken from has an
        image: what is generated has none."""
        mark, context = self._vision.image_token, known.context
        del context[len(seq.context) :]
        context += [_shown(token, mark) for token in seq.context[len(context) :]]
        tokens = [_shown(token, mark) for token in seq.tokens]
        drafts = [*takewhile(lambda token: token < FIRST_STAND_IN, seq.draft_tokens)]
        return replace(seq, tokens=tokens, context=context, draft_tokens=drafts)


def _shown(token: int, mark: int) -> int:
    return mark if token >= FIRST_STAND_IN else token


def has_images(seqs: Sequence[ScheduledSeq]) -> bool:
    return any(seq.image_rows is not None for seq in seqs)


def images_left_out(seqs: Sequence[ScheduledSeq]) -> set[int]:
    """Indices of those whose images are still encoded, or cannot be."""
    rows = enumerate(seq.image_rows for seq in seqs)
    return {index for index, each in rows if each is not None and each.is_left_out}


def shifts_of(seqs: Sequence[ScheduledSeq]) -> list[int] | None:
    """By how much the tokens of each have lower positions than their index; None: some have no such
    number, as tokens of images are among theirs or follow."""
    found = [0 if seq.image_rows is None else seq.image_rows.shift for seq in seqs]
    known = [shift for shift in found if shift is not None]
    return known if len(known) == len(found) else None


def image_rows(seqs: Sequence[ScheduledSeq], vision: Vision, device: torch.device) -> ImageRows:
    """What a batch of `seqs` has of their images."""
    turns, rows, first = list[np.ndarray](), [np.empty(0, np.int64)], 0
    added = list[np.ndarray]()
    for seq in seqs:
        start, end = seq.start, seq.start + len(seq.tokens)
        own = seq.image_rows or SeqImageRows(shift=0)
        if own.turns is None:
            assert own.shift is not None
            turns.append(np.tile(np.arange(start, end) - own.shift, (3, 1)))
        else:
            turns.append(own.turns)
        if own.rows is not None and own.added is not None:
            rows.append(own.rows + first)
            added.append(own.added)
        first += end - start
    put = np.concatenate(added, axis=1) if added else np.empty((1, 0, vision.out_size), np.float32)
    return ImageRows(
        torch.from_numpy(np.concatenate(turns, axis=1)).to(device),
        vision.section,
        torch.from_numpy(np.concatenate(rows)).to(device),
        torch.from_numpy(put).to(device),
    )
