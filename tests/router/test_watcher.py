"""What a router tells whoever follows it of the caches: names, with their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.engine.kv.block_hash import hash_blocks, unpack
from kvrelay.engine.kv.scope import UNSALTED, CacheScope
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.request import FinishReason, RequestSpec
from tests.router.script import BLOCK, Script, worker_info


class Watcher:
    """Keeps the tokens of all names."""

    def __init__(self) -> None:
        self.tokens: dict[bytes, tuple[int, ...]] = {}
        self.held: dict[str, set[bytes]] = {}
        self.scopes: list[CacheScope] = []

    def changed(self, worker: str, tier: Tier, stored: bytes, removed: bytes) -> None:
        held = self.held.setdefault(worker, set())
        held |= {*unpack(stored)}
        held -= {*unpack(removed)}

    def forgotten(self, worker: str) -> None:
        self.held.pop(worker, None)

    def named(
        self, spec: RequestSpec, tokens: Sequence[int], block_hashes: bytes, block_size: int
    ) -> None:
        self.scopes.append(spec.scope)
        for at, name in enumerate(unpack(block_hashes)):
            own = tuple(tokens[at * block_size : (at + 1) * block_size])
            assert self.tokens.setdefault(name, own) == own


def names_of(tokens: Sequence[int], scope: CacheScope = UNSALTED) -> list[bytes]:
    return hash_blocks(worker_info("decode-0").fingerprint, scope, tokens, BLOCK)


def test_blocks_of_a_prompt_are_named_when_it_goes_out_and_those_of_its_output_at_its_end() -> None:
    watcher, scope = Watcher(), CacheScope(b"salt")
    script = Script("decode-0", watcher=watcher)
    prompt = [*range(10)]
    script.submit(tokens=prompt, scope=scope)
    script.dispatched()
    assert watcher.tokens == {
        name: tuple(prompt[at * BLOCK : (at + 1) * BLOCK])
        for at, name in enumerate(names_of(prompt, scope))
    }
    script.delta("decode-0", 10, 20, 21, 22, 23)
    script.delta("decode-0", 14, 24, 25, finish=FinishReason.STOP)
    everything = [*prompt, *range(20, 26)]
    assert [*watcher.tokens] == names_of(everything, scope)
    assert watcher.tokens[names_of(everything, scope)[-1]] == (22, 23, 24, 25)
    assert set(watcher.scopes) == {scope}


def test_a_request_that_no_worker_gets_names_nothing() -> None:
    watcher = Watcher()
    script = Script(watcher=watcher)
    script.submit()
    script.pass_time(100.0)
    assert not watcher.tokens


def test_what_a_worker_holds_is_told_until_it_is_down() -> None:
    watcher = Watcher()
    script = Script("decode-0", "decode-1", watcher=watcher)
    prompt = [*range(12)]
    for worker in ("decode-0", "decode-1"):
        script.holds(worker, device=prompt)
    script.holds("decode-1", device=prompt[:4], host=prompt[:8])
    assert watcher.held == {"decode-0": {*names_of(prompt)}, "decode-1": {*names_of(prompt[:8])}}
    script.down("decode-0")
    assert watcher.held == {"decode-1": {*names_of(prompt[:8])}}
