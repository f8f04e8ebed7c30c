"""Where the tokens of a prompt's images are, and the positions that tokens turn by.

A token has a position in time, in height and in width (mrope). Those of a text are one number; an
image's tokens have the time at which it begins, and a row and a column from there; what follows
goes on behind the longer side. All of it follows from the prompt as the template wrote it and the
sizes of the images, so it is the same at every worker, and wherever a computation begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.engine.images import Expanded, Images
from kvrelay.engine.model.vision.config import Vision
from kvrelay.engine.model.vision.pictures import ImageError, grid_of, read, size_of, why_no_pillow


@dataclass(frozen=True, slots=True)
class Place:
    """The tokens of an image in a prompt."""

    first: int
    count: int
    width: int  # tokens in a row

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def reach(self) -> int:
        """Positions from its first one to what follows it."""
        return max(self.width, self.count // self.width)


@dataclass(frozen=True, slots=True)
class Layout:
    """Images of a prompt, in its order. `shifts`: by how much the text behind so many of them
    has a lower position than its index, none first."""

    places: tuple[Place, ...]
    shifts: np.ndarray

    @staticmethod
    def of(places: Sequence[Place]) -> Layout:
        steps = [0, *(place.count - place.reach for place in places)]
        return Layout(tuple(places), np.cumsum(steps, dtype=np.int64))

    def overlapping(self, start: int, end: int) -> list[int]:
        """Indices of images with tokens in `[start, end)`."""
        places = enumerate(self.places)
        return [index for index, each in places if each.first < end and start < each.end]

    def shift_from(self, start: int) -> int | None:
        """By how much tokens from there on have lower positions than their index, however many
        follow; None: some of an image follow."""
        return None if self.places and start < self.places[-1].end else int(self.shifts[-1])

    def turns(self, start: int, end: int) -> np.ndarray:
        """Positions in time, height and width of tokens `[start, end)`, int64 [3, n]."""
        at = np.arange(start, end, dtype=np.int64)
        ends = [place.end for place in self.places]
        found: np.ndarray = np.tile(
            at - self.shifts[np.searchsorted(ends, at, side="right")], (3, 1)
        )
        for index in self.overlapping(start, end):
            place = self.places[index]
            first, last = max(start, place.first), min(end, place.end)
            number, begin = np.arange(first, last) - place.first, place.first - self.shifts[index]
            rows, columns = number // place.width, number % place.width
            found[:, first - start : last - start] = begin + np.stack((0 * rows, rows, columns))
        return found


def layout_of(images: Images, vision: Vision) -> Layout:
    """Raises ImageError if the prompt shows another number of images than there are."""
    found, shift = list[Place](), 0
    marks = [at for at, token in enumerate(images.tokens) if token == vision.image_token]
    if len(marks) != len(images.each):
        what = f"the prompt shows {len(marks)} of {len(images.each)} images"
        raise ImageError(f"{what}: each has one {vision.image_token} among its tokens")
    for index, (mark, image) in enumerate(zip(marks, images.each, strict=True)):
        rows, columns = grid_of(index, *size_of(index, image), vision)
        merge = vision.merge_size
        place = Place(mark + shift, rows * columns // merge**2, columns // merge)
        found.append(place)
        shift += place.count - 1
    return Layout.of(found)


def expand(images: Images, vision: Vision) -> Expanded:
    """The prompt as the model reads it. All images are read, so that one that cannot be is refused
    here. Raises ImageError."""
    if why := why_no_pillow():
        raise ImageError(why)
    for index, image in enumerate(images.each):
        read(index, image)
    places = layout_of(images, vision).places
    counts = iter(place.count for place in places)
    tokens = list[int]()
    for token in images.tokens:
        tokens += [token] * (next(counts) if token == vision.image_token else 1)
    return Expanded(tuple(tokens), tuple((place.first, place.count) for place in places))
