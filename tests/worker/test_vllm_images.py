"""Images in prompts of vLLM workers: the real node and threads over a stand-in for vLLM.
`tests/e2e/test_vllm.py` has the real one."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.roles import ROLES
from kvrelay.decode_worker.vllm import images as reading
from kvrelay.decode_worker.vllm.build import build
from kvrelay.engine.images import FIRST_STAND_IN, Expanded, Image, Images
from kvrelay.engine.kv.scope import UNSALTED, CacheScope
from kvrelay.engine.model.vision.pictures import MAX_PIXELS
from kvrelay.engine.request import Refusal
from tests.local.test_local import model_dir as model_dir
from tests.support import vllm_stand_in
from tests.support.local import Completion, LocalCluster
from tests.support.vllm_stand_in import IMAGE_MARK, IMAGE_TOKEN, ImageToken, LLMEngine
from tests.worker.test_vllm_worker import GREEDY, HANDS_OVER, VLLM, assert_clean, greedy
from tests.worker.test_vllm_worker import cluster as cluster

EXPANDS = replace(GREEDY, max_tokens=1, expands=True)
BEFORE, AFTER = [*range(40)], [*range(100, 160)]
PROMPT = [*BEFORE, IMAGE_MARK, *AFTER]


def png(number: int, height: int = 300, width: int = 8) -> bytes:
    """Makes a picture that has one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    row = b"\0" + bytes([number % 256, number // 256 % 256, 7]) * width
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(row * height)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def expand(cluster: LocalCluster, *images: bytes, prompt: list[int] = PROMPT) -> Completion:
    given = Images(tuple(prompt), tuple(map(Image.of, images)))
    return cluster.submit(prompt, EXPANDS, images=given).result(30.0)


def asked(cluster: LocalCluster, image: bytes, **fields: Any) -> Any:
    """The future answer to PROMPT with this image."""
    given = Images(tuple(PROMPT), (Image.of(image),))
    expanded = expand(cluster, image).prompt.expanded
    assert expanded is not None
    return cluster.submit(expanded.named(given.each), GREEDY, images=given, **fields)


def expected(image: bytes, height: int = 300) -> list[int]:
    token = ImageToken.of(Image.of(image).digest.hex())
    return greedy([*BEFORE, *[token] * (2 + height // 10), *AFTER], GREEDY.max_tokens)


@pytest.fixture
def alone(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """One worker: which of several a request goes to depends on times that are measured."""
    vllm_stand_in.install(monkeypatch)
    monkeypatch.setattr("tests.support.local.build_worker", built)
    with LocalCluster(model_dir, prefill=0, decode=1, engine=VLLM) as cluster:
        yield cluster


def built(spec: Any, options: Any) -> Any:
    return build(spec, ROLES, options.make_agent)


def test_stand_ins_are_no_tokens_and_follow_from_all_of_an_image() -> None:
    found = [Image.of(png(number)).stand_ins(100) for number in range(300)]
    assert all(FIRST_STAND_IN <= each < 1 << 32 for numbers in found for each in numbers)
    for numbers, others in pairwise(found):
        assert not {*zip(range(100), numbers, strict=True)} & {*enumerate(others)}
    again = Image.of(png(0)).stand_ins(7)
    assert again == found[0][:7]  # however many are wanted


def test_what_images_are_to_the_model_is_asked_of_it(cluster: LocalCluster) -> None:
    first, second = png(1, 100), png(2, 250)
    prompt = [*BEFORE, IMAGE_MARK, 5, IMAGE_MARK, *AFTER]
    told = expand(cluster, first, second, prompt=prompt).prompt.expanded
    tokens = (*BEFORE, *[IMAGE_TOKEN] * 12, 5, *[IMAGE_TOKEN] * 27, *AFTER)
    assert told == Expanded(tokens, ((40, 12), (53, 27)))
    named = told.named([Image.of(first), Image.of(second)])
    assert [*named[:40], named[52], *named[80:]] == [*BEFORE, 5, *AFTER]
    assert named[40:52] == (*Image.of(first).stand_ins(12),)
    assert_clean(cluster)


def test_two_images_never_share_a_block_and_one_image_hits(alone: LocalCluster) -> None:
    images = [png(number) for number in range(4)]
    for number, image in enumerate(images):
        answer = asked(alone, image).result(30.0)
        assert answer.tokens == expected(image)
        assert answer.num_cached_tokens == (32 if number else 0)  # what comes before the image
        again = asked(alone, image).result(30.0)
        assert again.tokens == expected(image)
        assert again.num_cached_tokens == 128  # all full blocks
    assert_clean(alone)


def test_an_image_is_read_once_as_long_as_vllm_has_what_it_made_of_it(
    alone: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_read: list[bytes] = []
    read = reading.read

    def count(index: int, image: Image) -> Any:
        was_read.append(image.digest)
        return read(index, image)

    monkeypatch.setattr(reading, "read", count)
    image = png(1)
    for _ in range(3):
        assert asked(alone, image).result(30.0).tokens == expected(image)
    assert len(was_read) == 2, "for its tokens, and to compute it"
    [engine] = LLMEngine.made
    for each in engine.renderer.cached.values():
        each.clear()  # it has room for so many
    assert asked(alone, image).result(30.0).tokens == expected(image)
    assert len(was_read) == 4
    assert_clean(alone)


@pytest.mark.parametrize("scope", [UNSALTED, CacheScope(b"tenant")])
def test_an_image_may_come_first(alone: LocalCluster, scope: CacheScope) -> None:
    image = Image.of(png(9))
    prompt = [IMAGE_MARK, *AFTER]
    expanded = expand(alone, image.data, prompt=prompt).prompt.expanded
    assert expanded is not None
    given, named = Images(tuple(prompt), (image,)), expanded.named([image])
    first, again = (
        alone.submit(named, GREEDY, images=given, scope=scope).result(30.0) for _ in range(2)
    )
    assert (first.failed, first.num_cached_tokens) == (None, 0)
    assert again.tokens == first.tokens
    assert again.num_cached_tokens == 64
    assert_clean(alone)


@pytest.mark.parametrize("killed", ["", "prefill-0", "decode-0"])
def test_images_are_computed_by_one_worker_and_decoded_by_another(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    vllm_stand_in.install(monkeypatch)
    monkeypatch.setattr("tests.support.local.build_worker", built)
    with LocalCluster(
        model_dir, prefill=1, decode=2, engine=VLLM, host_bytes=1 << 20, router=HANDS_OVER
    ) as cluster:
        images = [png(number) for number in range(6)]
        turns = vllm_stand_in.turns(100)
        futures = [asked(cluster, image) for image in images]
        if killed:
            cluster.kill(killed)
        turns.release(100_000)
        answers = [future.result(60.0) for future in futures]
        assert [each.failed for each in answers] == [None] * 6
        assert [each.tokens for each in answers] == [*map(expected, images)]
        assert_clean(cluster)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GIF90", "image 0, of 5 bytes, cannot be read; PNG, JPEG, WebP and GIF can"),
        (png(1)[:60], "image 0, of 60 bytes, cannot be read"),
        (png(1, 9000, 9000), f"image 0 has 9000 x 9000 pixels, more than {MAX_PIXELS:,}"),
    ],
    ids=["no picture", "half of one", "too large"],
)
def test_what_cannot_be_read_is_refused_in_words(
    cluster: LocalCluster, data: bytes, why: str
) -> None:
    failed = expand(cluster, data).failed
    assert failed is not None
    assert (failed.reason, failed.detail[: len(why)]) == (Refusal.UNSUPPORTED, why)
    assert_clean(cluster)


def test_a_prompt_without_a_place_for_its_image_is_refused(cluster: LocalCluster) -> None:
    failed = expand(cluster, png(1), prompt=BEFORE).failed
    assert failed is not None
    assert "the model does not take these images: Expected 1 more placeholders" in failed.detail


def test_our_own_workers_refuse_images_of_other_models(model_dir: Path) -> None:
    with LocalCluster(model_dir) as own:
        failed = expand(own, png(1)).failed
        assert failed is not None
        assert failed.reason is Refusal.UNSUPPORTED
        assert failed.detail.startswith("images of Qwen3-VL and Qwen3.5 are read, this model's")
