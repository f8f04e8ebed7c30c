"""What may be said of weights in shared memory. Routers look at it too, so torch is not needed."""

from __future__ import annotations

import re
from math import prod

from kvrelay.engine.model.errors import ModelError, check_one_of
from kvrelay.engine.weights import SharedWeights

DIGEST_BYTES = 32
# So what is said of three versions, of which a controller keeps note, fits into a frame.
MOST_TENSORS, MOST_NAME_CHARS = 20_000, 2 << 20
MOST_NUMBERS = 1 << 40  # that one tensor may have
DTYPES = (
    *("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8"),
)


def check_described(weights: SharedWeights) -> None:
    """Raises ModelError unless the region and its tensors may be as they are described."""
    if re.fullmatch(r"[\w-][\w.-]{0,199}", weights.region, re.ASCII) is None:
        raise ModelError(
            f"the region {weights.region[:80]!r}: expected a name of letters, digits, '_', '-' and"
            " '.', without the '/' in front"
        )
    if not 0 < (count := len(weights.tensors)) <= MOST_TENSORS:
        raise ModelError(f"{count} tensors: expected 1 to {MOST_TENSORS}")
    if (chars := sum(len(each.name) for each in weights.tensors)) > MOST_NAME_CHARS:
        raise ModelError(f"names of {chars} characters: expected at most {MOST_NAME_CHARS}")
    known = set[str]()
    for each in weights.tensors:
        if each.name in known:
            raise ModelError(f"{each.name[:200]} is there twice: expected each tensor once")
        known.add(each.name)
        check_one_of(f"{each.name[:200]}: dtype", each.dtype, DTYPES)
        if min(each.offset, *each.shape, 0) < 0 or prod(each.shape) > MOST_NUMBERS:
            raise ModelError(
                f"{each.name[:200]}: shape {list(each.shape)[:8]} at offset {each.offset}: expected"
                " numbers that are not negative, within a region"
            )
        if len(each.digest) != DIGEST_BYTES:
            raise ModelError(
                f"{each.name[:200]}: a digest of {len(each.digest)} bytes, expected the"
                f" {DIGEST_BYTES} of BLAKE2b"
            )
