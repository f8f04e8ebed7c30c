"""Embeddings that are kept: which, how many bytes, and what becomes of those that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from kvrelay.engine.images import Image, KeptImages, image_key
from kvrelay.engine.model.vision.embeddings import MAX_PUBLISHED, Embeddings, Wanted
from kvrelay.engine.model.vision.pictures import ImageError

SIZE = 100
DEADLINE_S = 20.0


class Encoder:
    """Encodes what it is let, and notes the order."""

    def __init__(self) -> None:
        self.encoded: list[bytes] = []
        self.may = threading.Event()
        self.may.set()

    def __call__(self, index: int, image: Image) -> torch.Tensor:
        assert self.may.wait(DEADLINE_S)
        self.encoded.append(image.data)
        if image.data == b"damaged":
            raise ImageError(f"image {index} is damaged")
        if image.data == b"huge":
            raise MemoryError
        return torch.full((1, 2, 3), float(len(self.encoded)))


@pytest.fixture
def encoder() -> Iterator[Encoder]:
    made = Encoder()
    yield made
    made.may.set()


def wanted(*data: bytes) -> list[Wanted]:
    return [Wanted(index, Image.of(each), SIZE) for index, each in enumerate(data)]


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.001)


def settled(kept: Embeddings, asked: dict[int, list[Wanted]]) -> dict[int, str]:
    """Asks as a runner does, step after step, and returns who failed."""
    failed: dict[int, str] = {}

    def is_done() -> bool:
        rest = {seq: images for seq, images in asked.items() if seq not in failed}
        away, why = kept.choose(rest, is_all=True)
        failed.update(why)
        return not away

    until(is_done)
    return failed


def test_what_is_there_is_used_again_and_what_was_used_least_goes_first(encoder: Encoder) -> None:
    kept = Embeddings(encoder, 3 * SIZE)
    for data in (b"a", b"b", b"c", b"a", b"d", b"a", b"b"):
        settled(kept, {0: wanted(data)})
        assert kept.nbytes <= 3 * SIZE
    assert encoder.encoded == [b"a", b"b", b"c", b"d", b"b"]
    assert Image.of(b"c").digest not in kept


def test_the_first_that_lacks_some_gets_room_and_others_wait_for_it(encoder: Encoder) -> None:
    kept = Embeddings(encoder, 2 * SIZE)
    encoder.may.clear()
    many = {0: wanted(b"a", b"b", b"c"), 1: wanted(b"d", b"e")}
    assert kept.choose(many, is_all=False) == ({0, 1}, {})
    assert kept.begun == {0: 3}
    assert kept.nbytes == 3 * SIZE, "those of one sequence may take more"
    encoder.may.set()
    until(lambda: 0 not in kept.choose(many, is_all=True)[0])
    settled(kept, {1: many[1]})
    assert encoder.encoded == [b"a", b"b", b"c", b"d", b"e"]
    assert kept.nbytes == 2 * SIZE


def test_two_that_want_one_image_have_it_encoded_once(encoder: Encoder) -> None:
    kept = Embeddings(encoder, SIZE)
    assert settled(kept, {0: wanted(b"a"), 1: wanted(b"a", b"a")}) == {}
    assert encoder.encoded == [b"a"]
    assert torch.equal(kept.get(Image.of(b"a").digest), torch.ones(1, 2, 3))


def test_a_failure_is_the_requests_and_is_tried_again(encoder: Encoder) -> None:
    kept = Embeddings(encoder, 4 * SIZE)
    asked = {0: wanted(b"a", b"damaged"), 1: wanted(b"a"), 2: wanted(b"huge")}
    failed = settled(kept, asked)
    assert failed[0] == "image 1 is damaged"
    assert failed[2] == "image 0 cannot be encoded; the worker's log says why"
    assert 1 not in failed
    settled(kept, {0: asked[0]})
    assert encoder.encoded.count(b"damaged") >= 2
    assert kept.nbytes == SIZE


def test_routers_hear_of_the_last_ones_and_of_the_time_that_a_token_takes() -> None:
    times = iter([0.0, 4.0, 10.0, 11.0])
    kept = Embeddings(Encoder(), 1 << 20, lambda: next(times))
    assert kept.kept() == KeptImages()
    keys = {name: image_key(Image.of(name).digest) for name in (b"a", b"b")}
    settled(kept, {0: wanted(b"a")})
    assert kept.kept() == KeptImages((keys[b"a"],), 2.0), "two tokens took four seconds"
    settled(kept, {0: wanted(b"b")})
    assert kept.kept() == KeptImages((keys[b"b"], keys[b"a"]), 2.0 + 0.3 * (0.5 - 2.0))
    full = Embeddings(Encoder(), 1 << 20)
    settled(full, {0: wanted(*(bytes([n, 1]) for n in range(200)))})
    settled(full, {0: wanted(*(bytes([n, 2]) for n in range(200)))})
    found = full.kept().keys
    assert len(found) == MAX_PUBLISHED
    assert {image_key(Image.of(bytes([n, 2])).digest) for n in range(200)} <= {*found}
