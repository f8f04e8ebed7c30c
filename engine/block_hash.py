"""Names of sealed blocks: a chained, keyed 128-bit hash, the same in every process and tier.

name(block) = BLAKE2b-128(parent name + token ids, key = fingerprint); the first block's parent is
the root of (fingerprint, tenant salt). Equal names mean equal model, layout, tenant and tokens up
to the end of the block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(fingerprint: bytes, salt: bytes = b"") -> bytes:
    """The parent of the first block of every sequence of this tenant."""
    return blake2b(
        salt, digest_size=HASH_BYTES, key=fingerprint[:64], person=b"kvrelay-root"
    ).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of the block that holds `tokens` after the prefix named `parent`."""
    return blake2b(array("I", tokens).tobytes(), digest_size=HASH_BYTES, key=parent).digest()


def hash_blocks(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Names of all full blocks of `tokens`, in order."""
    names: list[bytes] = []
    parent = root
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = block_hash(parent, tokens[end - block_size : end])
        names.append(parent)
    return names
