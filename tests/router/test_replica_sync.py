"""Routers that tell each other where prompts went."""

from __future__ import annotations

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.events import KVSnapshot
from kvrelay.engine.stats import RouterDown, RouterUp
from kvrelay.router.messages import PromptRouted
from tests.router.script import BLOCK, Script

PROMPT = tuple(range(40))


def two() -> tuple[Script, Script]:
    pair = Script("decode-0", "decode-1"), Script("decode-0", "decode-1")
    for script in pair:
        script.tell(RouterUp("the other"))
        script.tell(RouterUp("the other"))
    return pair


def test_a_prompt_that_begins_like_one_of_another_router_goes_where_that_one_went() -> None:
    first, second = two()
    first.submit("a", PROMPT)
    first.take(Decode)
    first.submit("b", [7] * 30)  # to the worker that is not busy
    (routed, other) = first.take(PromptRouted, "the other")
    assert {routed.worker, other.worker} == {"decode-0", "decode-1"}
    assert len(routed.block_hashes) == 16 * (len(PROMPT) // BLOCK)
    for script, told in ((second, routed), (two()[1], other)):
        script.tell(told)
        script.submit("c", [*(PROMPT if told is routed else [7] * 30), 99])
        ((worker, _),) = [(to, m) for to, m in script.sent if isinstance(m, Decode)]
        assert worker == told.worker


def test_only_what_the_worker_does_not_hold_is_told() -> None:
    first, _ = two()
    first.holds("decode-0", device=PROMPT[:20])
    first.submit("a", PROMPT)
    (routed,) = first.take(PromptRouted)
    assert routed.worker == "decode-0"
    assert len(routed.block_hashes) == 16 * (len(PROMPT) - 20) // BLOCK


def test_what_is_said_of_another_life_of_a_worker_means_nothing() -> None:
    first, second = two()
    first.submit("a", PROMPT)
    (routed,) = first.take(PromptRouted)
    second.tell(PromptRouted(routed.worker, 2, routed.block_hashes))
    second.tell(PromptRouted("nobody", 1, routed.block_hashes))
    assert second.router.index.num_blocks(routed.worker) == 0
    second.tell(routed)
    assert second.router.index.num_blocks(routed.worker) == len(PROMPT) // BLOCK
    assert (
        second.router.index.block_hashes(routed.worker) == frozenset()
    )  # it has not said so itself
    second.tell(KVSnapshot(routed.worker, 1, 1, ()))


def test_a_router_that_is_gone_is_told_nothing() -> None:
    first, _ = two()
    first.tell(RouterDown("the other"))
    first.tell(RouterDown("nobody"))
    first.submit("a", PROMPT)
    assert first.take(PromptRouted) == []
