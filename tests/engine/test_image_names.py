"""10,000 prompts with two images each, of few pictures and texts: what a place finds by the names
of blocks was computed from the same images."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from kvrelay.engine.images import Expanded, Image
from kvrelay.engine.kv.block_hash import BlockChain
from kvrelay.engine.kv.scope import UNSALTED

NUM_TRIES = 10_000
NUM_KEPT = 300  # prompts whose blocks a place holds, at most
SIZE = 8
IMAGE_TOKEN = 250
PLACES = ("device", "host", "disk", "peer")
PICTURES = [Image.of(bytes([number])) for number in range(12)]
TEXTS = [[*range(first, first + 5 + 3 * first)] for first in range(4)]


def prompt_of(rng: Random) -> tuple[Expanded, list[Image], tuple[object, ...]]:
    """A prompt, its images, and what the model reads at each position."""
    images, tokens, places = rng.choices(PICTURES, k=2), list[int](), []
    seen: list[object] = []
    for image in images:
        text, count = rng.choice(TEXTS), rng.choice((1, 4, 16))
        tokens += text
        places.append((len(tokens), count))
        tokens += [IMAGE_TOKEN] * count
        seen += [*text, *((image.digest, part) for part in range(count))]
    tail = rng.choice(TEXTS)
    return Expanded((*tokens, *tail), tuple(places)), images, (*seen, *tail)


def names_of(tokens: Sequence[int]) -> list[bytes]:
    chain = BlockChain(b"fingerprint", UNSALTED, SIZE)
    return list(chain.extend(tokens))


def cross_hits(named: bool) -> tuple[int, int]:
    """How many blocks were found, and how many of those were computed from something else.
    `named`: images have their stand-ins."""
    rng, found, wrong = Random(7), 0, 0
    held: dict[str, dict[bytes, tuple[object, ...]]] = {place: {} for place in PLACES}
    for _ in range(NUM_TRIES):
        expanded, images, seen = prompt_of(rng)
        tokens = expanded.named(images) if named else expanded.tokens
        names = names_of(tokens)
        for place in PLACES:
            for index, name in enumerate(names):
                if name not in held[place]:
                    break
                found += 1
                wrong += held[place][name] != seen[: (index + 1) * SIZE]
        own = held[rng.choice(PLACES)]
        for index, name in enumerate(names):
            own.setdefault(name, seen[: (index + 1) * SIZE])
        while len(own) > NUM_KEPT:
            del own[next(iter(own))]
    return found, wrong


@pytest.mark.parametrize("named", [True, False])
def test_no_block_of_other_images_is_found(named: bool) -> None:
    found, wrong = cross_hits(named)
    assert found > NUM_TRIES
    assert (wrong == 0) is named, f"{wrong} of {found}"
