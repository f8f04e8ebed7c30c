"""Images in prompts, as everybody but the engine that computes them knows them.

A template writes one mark for an image, and the model reads many tokens there. What those are, the
engine says once for a prompt (`SamplingParams.expands`). From then on the prompt has numbers in
their place that no vocabulary has and that follow from the image's bytes: so routers, tiers and
sessions name blocks by their tokens as ever, two images share no block, and one image has the same
names wherever it comes. The engine gets the prompt as the template wrote it, and the images.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, shake_256
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

FIRST_STAND_IN = 1 << 31  # no vocabulary has so many tokens; a token's number is below 1 << 32
DIGEST_BYTES = 32
KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class Image:
    data: bytes  # a file, such as PNG or JPEG, as the client has sent it
    digest: bytes  # names `data`

    @classmethod
    def of(cls, data: bytes) -> Image:
        return cls(data, blake2b(data, digest_size=DIGEST_BYTES).digest())

    def stand_ins(self, count: int) -> Sequence[int]:
        """Numbers for `count` tokens. 31 bits of each follow from the digest: two images that
        differ have a number in common, at the same place, once in two thousand million."""
        numbers = array("I")
        numbers.frombytes(shake_256(self.digest).digest(count * numbers.itemsize))
        return [FIRST_STAND_IN | number for number in numbers]


@dataclass(frozen=True, slots=True)
class Images:
    """Those of a prompt, in its order. `tokens`: the prompt as the template wrote it."""

    tokens: tuple[int, ...]
    each: tuple[Image, ...]

    def placed(self, prompt: Sequence[int]) -> list[PlacedImage]:
        """Where the numbers that stand for them are in `prompt`; empty: it has none of them."""
        begins, start = list[int](), 0
        try:
            for image in self.each:
                begins.append(prompt.index(image.stand_ins(1)[0], start))
                start = begins[-1] + 1
        except ValueError:
            return []
        found = []
        limits = [*begins[1:], len(prompt)]
        for image, end, limit in zip(self.each, begins, limits, strict=True):
            first = end
            while end < limit and prompt[end] >= FIRST_STAND_IN:
                end += 1
            found.append(PlacedImage(image_key(image.digest), end, end - first))
        return found


def image_key(digest: bytes) -> int:
    """The number by which workers and requests are matched."""
    return int.from_bytes(digest[:KEY_BYTES])


class PlacedImage(NamedTuple):
    """An image in a prompt, for those who only compare it with others."""

    key: int  # what `image_key` gives for its digest
    end: int  # index of the token behind its last one
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KeptImages:
    """Images whose embeddings a worker keeps or makes, by their keys, and how long it takes to make
    those of another, for each of its tokens, on average; 0: not known."""

    keys: tuple[int, ...] = ()
    token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SeqImageRows:
    """What one sequence has of images in a step. Arrays, since ranks get them in a message."""

    is_left_out: bool = False  # images are still encoded, or cannot be
    # By how much its tokens have lower positions than their index; None: `turns` has them.
    shift: int | None = None
    turns: np.ndarray | None = None  # [3, n] int64
    rows: np.ndarray | None = None  # [m] int64: tokens of images, counted from the first of the n
    added: np.ndarray | None = None  # float32 [1 + taps, m, hidden_size]; None: no such token


@dataclass(frozen=True, slots=True)
class Expanded:
    """A prompt as the model reads it: `tokens`, of which those at `places`, each (first, count),
    are the images'."""

    tokens: tuple[int, ...]
    places: tuple[tuple[int, int], ...]

    def named(self, images: Sequence[Image]) -> tuple[int, ...]:
        """With numbers that stand for `images` where their tokens are."""
        found = list(self.tokens)
        for image, (first, count) in zip(images, self.places, strict=True):
            found[first : first + count] = image.stand_ins(count)
        return tuple(found)


def with_output(images: Images, output: Sequence[int]) -> tuple[int, ...]:
    """What an engine computes that expands the prompt itself."""
    return (*images.tokens, *output)
