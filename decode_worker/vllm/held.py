"""Which blocks vLLM holds, under the names that routers know them by.

vLLM tells the tokens of a block, its parent and, of the first block of a sequence, the salt. Ours
are chained hashes of the same, so each can be named as its event comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvrelay.decode_worker.vllm.messages import Cleared, Removed, Stored
from kvrelay.engine.kv.block_hash import block_hash, root_hash
from kvrelay.engine.kv.block_pool import NetChanges
from kvrelay.engine.kv.scope import UNSALTED, CacheScope


def salt_of(scope: CacheScope) -> str:
    """Names a scope to vLLM; it comes back with the first block of each sequence."""
    return f"{scope.salt.hex()}.{scope.num_public_tokens}" if scope.salt else ""


def scope_of(salt: str) -> CacheScope:
    if not salt:
        return UNSALTED
    digest, _, num_public = salt.partition(".")
    return CacheScope(bytes.fromhex(digest), int(num_public))


@dataclass(frozen=True, slots=True)
class _Block:
    """One that vLLM holds: our name for it, and where it stands in its sequence."""

    name: bytes
    index: int
    scope: CacheScope


class HeldBlocks:
    """Owned by a worker's node. Invariant: `_names` counts the blocks in `_blocks` by our names;
    prefixes that are public to all have one name, and a block for each tenant."""

    def __init__(self, fingerprint: bytes, block_size: int) -> None:
        self.fingerprint = fingerprint  # as it is with the weights in use
        self._block_size = block_size
        self._blocks: dict[Any, _Block] = {}  # by vLLM's hash
        self._names: Counter[bytes] = Counter()
        self._changes = NetChanges()
        self.num_unknown = 0  # blocks whose parent was not known: no name can be given

    def __len__(self) -> int:
        return len(self._blocks)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Net (stored, removed) names since the last call."""
        return self._changes.take()

    def is_cached(self, block_hash: bytes) -> bool:
        return block_hash in self._names

    def block_hashes(self) -> tuple[bytes, ...]:
        return tuple(self._names)

    def take(self, events: Iterable[Stored | Removed | Cleared]) -> None:
        for event in events:
            match event:
                case Stored():
                    self._store(event)
                case Removed(hashes):
                    for each in hashes:
                        self._remove(each)
                case Cleared():
                    for each in [*self._blocks]:
                        self._remove(each)

    def _store(self, event: Stored) -> None:
        size = self._block_size
        before = None if event.parent is None else self._blocks.get(event.parent)
        if event.parent is not None and before is None:
            self.num_unknown += len(event.hashes)
            return
        scope = scope_of(event.salt) if before is None else before.scope
        for number, each in enumerate(event.hashes):
            tokens = event.tokens[number * size : (number + 1) * size]
            if len(tokens) < size:
                return  # part of a block, which has no name
            before = self._next(before, scope, tokens)
            if each not in self._blocks:
                self._blocks[each] = before
                if not self._names[before.name]:
                    self._changes.note(before.name, stored=True)
                self._names[before.name] += 1

    def _next(self, before: _Block | None, scope: CacheScope, tokens: tuple[int, ...]) -> _Block:
        """As `engine.kv.block_hash.BlockChain` names the block after `before`."""
        index = 0 if before is None else before.index + 1
        num_public = scope.num_public_tokens // self._block_size
        if before is None:
            salt = scope.public_salt if num_public else scope.salt
            parent = root_hash(self.fingerprint, salt)
        else:
            parent = before.name
        if index == num_public and num_public and scope.salt:
            parent = root_hash(parent, scope.salt)
        return _Block(block_hash(parent, tokens), index, scope)

    def _remove(self, known_as: Any) -> None:
        block = self._blocks.pop(known_as, None)
        if block is None:
            return
        self._names[block.name] -= 1
        if not self._names[block.name]:
            del self._names[block.name]
            self._changes.note(block.name, stored=False)
