"""Hashes of sealed blocks: a chained, keyed 128-bit hash, the same in every process and tier.

hash(block) = BLAKE2b-128(parent hash + token ids, key = fingerprint); the first block's parent is
the root of (fingerprint, tenant salt). Equal hashes mean equal model, layout, tenant and tokens up
to the end of the block. Where a prompt begins with a public region, its blocks have the root
without a salt, and the tenant's salt goes into the chain behind them. KV that may be approximate
has another root than exact KV, in public regions too, so that the two never meet. What is computed
with an adapter has that in its salt (`engine.kv.scope`).

Where layers are in groups (`engine.kv.window`), such a hash names the block of the first group; the
block of another group that holds KV of these tokens is named after it (`group_hash`).

Many hashes are kept packed: 16 bytes each, one after the other. They are computed in C
(`c/block_chain.c`); without a C compiler, by hashlib, at a sixth of the speed.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from typing import overload

from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.native import NativeBuildError, declarations, load

SOURCE = Path(__file__).parents[1] / "c" / "block_chain.c"
HASH_BYTES = 16
TOKEN_BYTES = array("I").itemsize


def root_hash(fingerprint: bytes, salt: bytes = b"") -> bytes:
    """The parent of the first block of every sequence of this tenant."""
    return blake2b(
        salt, digest_size=HASH_BYTES, key=fingerprint[:64], person=b"kvrelay-root"
    ).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of the block that holds `tokens` after the prefix with hash `parent`."""
    return blake2b(array("I", tokens).tobytes(), digest_size=HASH_BYTES, key=parent).digest()


def group_hash(first: bytes, group: int) -> bytes:
    """Names the block of `group` whose tokens are those of `first`, a block of the first group.

    Each byte is changed alike: names stay as different from each other as they were, and native
    code finds them as fast."""
    return first.translate(_changes(group))


@cache
def _changes(group: int) -> bytes:
    """Each byte as it is in names of that group."""
    return bytes(byte ^ group for byte in range(256))


class GroupNames(Sequence[bytes]):
    """Names of the blocks of all groups, row by row, made when they are read: of most rows only one
    group's are. Not more than there are when it is made."""

    __slots__ = ("_first", "_indices", "_num_groups")

    def __init__(
        self, first: Sequence[bytes], num_groups: int, indices: range | None = None
    ) -> None:
        """first: the names of the first group's, to which more may be added."""
        self._first, self._num_groups = first, num_groups
        self._indices = range(len(first) * num_groups) if indices is None else indices

    def of_groups(self, groups: Sequence[int], rows: range) -> list[bytes]:
        """Those of some groups in some rows, row by row; of all that it is made of."""
        first = self._first[rows.start : rows.stop]
        if len(groups) == 1:
            return (
                [*map(bytes.translate, first, repeat(_changes(groups[0])))]
                if groups[0]
                else [*first]
            )
        changes = [_changes(group) for group in groups]
        return [name.translate(change) for name in first for change in changes]

    def of_one(self, group: int, num_rows: int) -> GroupNames:
        """Those of one group in the first rows, made when they are read."""
        count = self._num_groups
        return GroupNames(self._first, count, range(group, num_rows * count, count))

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[bytes]:
        indices, count = self._indices, self._num_groups
        if not indices or indices.step % count:
            return map(self.__getitem__, range(len(indices)))
        first, group = divmod(indices.start, count)
        names = self._first[first : indices[-1] // count + 1 : indices.step // count]
        return map(bytes.translate, names, repeat(_changes(group))) if group else iter(names)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> GroupNames: ...
    def __getitem__(self, at: int | slice) -> bytes | GroupNames:
        if isinstance(at, slice):
            return GroupNames(self._first, self._num_groups, self._indices[at])
        row, group = divmod(self._indices[at], self._num_groups)
        return group_hash(self._first[row], group) if group else self._first[row]


def of_groups(block_hashes: Sequence[bytes], num_groups: int) -> Sequence[bytes]:
    """Names of the blocks of all groups, row by row, given those of the first."""
    return block_hashes if num_groups == 1 else GroupNames(block_hashes, num_groups)


def first_of(names: Sequence[bytes], count: int) -> GroupNames:
    """The first `count` of them, made when they are read."""
    return names[:count] if isinstance(names, GroupNames) else GroupNames(names, 1, range(count))


def unpack(packed: bytes | bytearray | memoryview) -> list[bytes]:
    """The hashes in `packed`, in order."""
    whole = bytes(packed)
    return [whole[i : i + HASH_BYTES] for i in range(0, len(whole), HASH_BYTES)]


class PackedNames(Sequence[bytes]):
    """Hashes, packed, as a list of them that may grow: each is made when it is read."""

    __slots__ = ("packed",)

    def __init__(self) -> None:
        self.packed = bytearray()

    def __len__(self) -> int:
        return len(self.packed) // HASH_BYTES

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            first, end, step = at.indices(len(self))
            found = unpack(self.packed[first * HASH_BYTES : max(first, end) * HASH_BYTES])
            return found if step == 1 else found[::step]
        first = (at + len(self) if at < 0 else at) * HASH_BYTES
        if not 0 <= first < len(self.packed):
            raise IndexError(f"name {at} of {len(self)}")
        return bytes(self.packed[first : first + HASH_BYTES])

    def __iter__(self) -> Iterator[bytes]:
        return iter(unpack(self.packed))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]


class BlockChain:
    """Hashes of the full blocks of a sequence that grows. Invariant: `block_hashes` are of tokens
    that it was last extended with, whose beginning never changes."""

    __slots__ = (
        "_num_groups",
        "_num_public",
        "_public_salt",
        "_salt",
        "block_hashes",
        "block_size",
        "fingerprint",
    )

    def __init__(
        self, fingerprint: bytes, scope: CacheScope, block_size: int, num_groups: int = 1
    ) -> None:
        self.fingerprint = fingerprint
        self.block_size = block_size
        self.block_hashes = PackedNames()
        self._num_groups = num_groups
        self._salt = scope.salt
        self._public_salt = scope.public_salt
        self._num_public = scope.num_public_tokens // block_size

    def under(self, fingerprint: bytes) -> BlockChain:
        """Makes the chain of the same tokens under another fingerprint."""
        return BlockChain(fingerprint, self.scope, self.block_size, self._num_groups)

    @property
    def scope(self) -> CacheScope:
        """Who may share it; of the public region, whole blocks."""
        return CacheScope(self._salt, self.num_public_tokens)

    @property
    def num_public_tokens(self) -> int:
        return self._num_public * self.block_size

    @property
    def packed(self) -> bytearray:
        """`block_hashes`, packed. Not to be changed. A memoryview of it has to be released
        before the chain grows."""
        return self.block_hashes.packed

    def adopt(self, packed: bytes | bytearray | memoryview) -> None:
        """Begin with these hashes, computed elsewhere from the same tokens, so that they are not
        hashed again. Before the first `extend`."""
        assert not self.block_hashes, f"{len(self.block_hashes)} blocks have hashes already"
        if len(packed) % HASH_BYTES:
            raise ValueError(
                f"packed block hashes of {len(packed)} bytes: expected {HASH_BYTES} each"
            )
        self.block_hashes.packed += packed

    def extend(self, tokens: Sequence[int]) -> PackedNames:
        """Hashes of all full blocks of `tokens`. Not to be changed."""
        packed, size = self.block_hashes.packed, self.block_size
        done, total = len(packed) // HASH_BYTES, len(tokens) // size
        if done < total:
            new = array("I", tokens[done * size : total * size]).tobytes()
            step = size * TOKEN_BYTES
            parent = self._parent(done)
            if self._salt and done <= self._num_public < total and self._num_public:
                at = (self._num_public - done) * step
                packed += _chain(parent, new[:at], step)
                parent, new = root_hash(self._parent(self._num_public), self._salt), new[at:]
            packed += _chain(parent, new, step)
        return self.block_hashes

    def extend_groups(self, tokens: Sequence[int]) -> Sequence[bytes]:
        """Returns what `extend` does, for every group: row by row."""
        return of_groups(self.extend(tokens), self._num_groups)

    def _parent(self, index: int) -> bytes:
        """Returns the hash before block `index`, or the root."""
        if index == 0:
            salt = self._public_salt if self._num_public else self._salt
            return root_hash(self.fingerprint, salt)
        return self.block_hashes[index - 1]


def _chain(parent: bytes, tokens: bytes, step: int) -> bytes | bytearray:
    """Hashes of the blocks of `step` bytes each that follow `parent`, packed."""
    count = len(tokens) // step
    hashed = load_native()
    if hashed is None:
        names = bytearray()
        for at in range(0, count * step, step):
            block = tokens[at : at + step]
            parent = blake2b(block, digest_size=HASH_BYTES, key=parent).digest()
            names += parent
        return names
    packed = ctypes.create_string_buffer(max(1, HASH_BYTES * count))
    hashed(parent, tokens, count, step, packed)
    return packed.raw[: HASH_BYTES * count]


@cache
def load_native() -> Callable[..., None] | None:
    """`kvr_chain_hashes` of block_chain.c; None: it cannot be compiled here."""
    try:
        library = load(SOURCE, ffi=declarations(SOURCE.with_suffix(".h")), hold_gil=True)
    except NativeBuildError:
        return None
    hasher: Callable[..., None] = library.kvr_chain_hashes
    return hasher


def hash_blocks(
    fingerprint: bytes, scope: CacheScope, tokens: Sequence[int], block_size: int
) -> list[bytes]:
    """Hashes of all full blocks of `tokens`, in order."""
    return [*BlockChain(fingerprint, scope, block_size).extend(tokens)]
