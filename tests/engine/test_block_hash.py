"""Names of blocks: the same however a sequence grows, and whoever hashed its beginning."""

from __future__ import annotations

from random import Random

import pytest

from kvrelay.engine.kv.block_hash import (
    HASH_BYTES,
    BlockChain,
    block_hash,
    hash_blocks,
    root_hash,
    unpack,
)
from kvrelay.engine.kv.scope import APPROXIMATE, UNSALTED, CacheScope

SIZE = 4
TOKENS = [7 * n for n in range(22)]  # 5 blocks and a part of one
SCOPES = [UNSALTED, CacheScope(b"tenant"), CacheScope(b"tenant", 9), CacheScope(b"tenant", 99)]
SCOPES += [CacheScope(APPROXIMATE + scope.salt, scope.num_public_tokens) for scope in SCOPES]


def chain(scope: CacheScope) -> BlockChain:
    return BlockChain(b"model", scope, SIZE)


def by_definition(scope: CacheScope) -> list[bytes]:
    """Block by block: public ones from the root without a tenant's salt, which is in the chain
    behind them."""
    num_public = scope.num_public_tokens // SIZE
    unsalted = APPROXIMATE if scope.is_approximate else b""
    parent = root_hash(b"model", unsalted if num_public else scope.salt)
    names = []
    for index in range(len(TOKENS) // SIZE):
        if index and index == num_public:
            parent = root_hash(parent, scope.salt)
        parent = block_hash(parent, TOKENS[index * SIZE : (index + 1) * SIZE])
        names.append(parent)
    return names


@pytest.mark.parametrize("scope", SCOPES)
def test_names_do_not_depend_on_how_the_sequence_grew(scope: CacheScope) -> None:
    names = by_definition(scope)
    assert hash_blocks(b"model", scope, TOKENS, SIZE) == names
    growing = chain(scope)
    for length in range(len(TOKENS) + 1):
        assert growing.extend(TOKENS[:length]) == names[: length // SIZE]
        assert growing.packed == b"".join(names[: length // SIZE])
    assert growing.packed is growing.packed


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("num_known", range(6))
def test_a_chain_goes_on_from_names_that_another_has_found(
    scope: CacheScope, num_known: int
) -> None:
    names = by_definition(scope)
    adopting = chain(scope)
    adopting.adopt(b"".join(names[:num_known]))
    assert adopting.extend(TOKENS) == names
    assert unpack(adopting.packed) == names


def test_packed_names_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=f"17 bytes: expected {HASH_BYTES} each"):
        chain(UNSALTED).adopt(bytes(17))


@pytest.mark.parametrize("size", [1, 16, 31, 32, 33, 100])
def test_names_are_the_same_without_a_compiler(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one, and of several of the hash's own blocks."""
    tokens = [n * n for n in range(3 * size + size // 2)]
    compiled = hash_blocks(b"model", UNSALTED, tokens, size)
    monkeypatch.setattr("kvrelay.engine.kv.block_hash.load_native", lambda: None)
    assert hash_blocks(b"model", UNSALTED, tokens, size) == compiled
    assert len(compiled) == 3


def test_exact_and_approximate_kv_never_have_a_name_in_common() -> None:
    """Ten thousand prompts that share beginnings, of tenants that share public ones: blocks of both
    kinds, of all that was ever named."""
    rng = Random(46)
    kinds: dict[bool, set[bytes]] = {False: set(), True: set()}
    shared = set[bytes]()
    for _ in range(10_000):
        tokens = rng.choices(range(3), k=rng.randrange(SIZE, 5 * SIZE))
        salt, num_public = rng.choice((b"", b"red", b"blue")), rng.randrange(3 * SIZE)
        for is_approximate in kinds:
            scope = CacheScope(APPROXIMATE * is_approximate + salt, num_public)
            assert scope.is_approximate == is_approximate
            names = hash_blocks(b"model", scope, tokens, SIZE)
            shared |= kinds[is_approximate].intersection(names)
            kinds[is_approximate].update(names)
    assert kinds[False].isdisjoint(kinds[True])
    assert len(shared) > 1_000  # tenants and prompts of one kind did meet
