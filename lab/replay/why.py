"""Why first tokens took so long: the time by phase, and which tokens were computed once more.

`Watch` reads the messages of one replay as they are sent. From what workers announce it knows who
holds which block, and where a block went last; from what the router sends it knows what a prompt
could have found at that moment. With the tokens that were cached in the end, each token of a prompt
has one fate, in this order from its beginning:

    cached       it was not computed
    elsewhere    a worker held it; computing took less than reading it, or the router did not know
    apart        it is held, but by no worker that holds all before it too
    evicted      it was to be kept, and made room for other KV
    dropped      it was to be evicted first, since its KV was unlikely to be used again
    new          no worker has held it before: an infinite cache computes it too

The first block that is missing decides between evicted and dropped, for all that follow it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.block_hash import unpack
from kvrelay.engine.kv.events import KVEvents, KVSnapshot
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.router.explain import Explanation

Summary = dict[str, Any]
FATES = ("elsewhere", "apart", "evicted", "dropped", "new")
"""Of tokens that were computed."""


@dataclass(slots=True)
class Loss:
    """Blocks of one prompt that were held once and are no more, from the first that is missing."""

    place: str  # role of the worker that had it last, and tier
    kept_s: float  # it was there so long after its last use
    gap_s: float  # and it was used again so long after it


@dataclass(slots=True)
class Why:
    """One request. `phases` sum to its time to the first token; `computed` are prompt tokens by
    their fate, all but those that were cached."""

    phases: dict[str, float] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    loss: Loss | None = None


@dataclass(slots=True)
class _Block:
    """`holders`: by worker, its tiers. `kept`: whether one of its last users was to keep it."""

    holders: dict[NodeId, set[Tier]] = field(default_factory=dict)
    used_at: float = 0.0
    kept: bool = False
    lost_at: float = 0.0
    lost_from: str = ""


@dataclass(slots=True)
class _Found:
    """What a prompt could have found when it was sent out, in tokens from its beginning."""

    by_one: int
    by_any: int
    ever: int
    was_kept: bool
    loss: Loss | None


class Watch:
    """Owned by a replay. Invariant: `_blocks` has every block that a worker has announced."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: defaultdict[bytes, _Block] = defaultdict(_Block)
        self._epochs: dict[NodeId, int] = {}
        self._found: dict[str, _Found] = {}

    def on_send(self, now: float, message: Any) -> None:
        kind = type(message)
        if kind is KVEvents or kind is KVSnapshot:
            self._on_events(now, message)
        elif kind is Decode or kind is Prefill:
            self._on_work(now, message)

    def explain(self, explanation: Explanation | None, ttft_s: float, num_cached: int) -> Why:
        """Explains a request that has ended, with a first token after `ttft_s` at its client."""
        why = Why()
        if explanation is None:
            return why
        for phase in explanation.phases:
            if phase.to_first:
                why.phases[phase.name] = why.phases.get(phase.name, 0.0) + phase.seconds
        messages_s = why.phases.get("messages", 0.0) + ttft_s - sum(why.phases.values())
        why.phases["messages"] = max(0.0, messages_s)  # with those from and to the client
        found = self._found.pop(explanation.request_id, None)
        if found is not None:
            num_tokens = explanation.num_prompt_tokens
            why.computed = _fates(found, num_cached, num_tokens)
            if why.computed.get("evicted") or why.computed.get("dropped"):
                why.loss = found.loss
        return why

    def _on_events(self, now: float, events: KVEvents | KVSnapshot) -> None:
        worker = events.worker
        if self._epochs.get(worker, events.epoch) != events.epoch:
            self._forget(now, worker)
        self._epochs[worker] = events.epoch
        if isinstance(events, KVSnapshot):
            self._store(worker, Tier.DEVICE, events.hashes)
        else:
            self._store(worker, Tier.DEVICE, events.stored)
            self._remove(now, worker, Tier.DEVICE, events.removed)
        for tier in events.tiers:
            self._store(worker, tier.tier, tier.stored)
            self._remove(now, worker, tier.tier, tier.removed)

    def _store(self, worker: NodeId, tier: Tier, block_hashes: Iterable[bytes]) -> None:
        for block_hash in block_hashes:
            self._blocks[block_hash].holders.setdefault(worker, set()).add(tier)

    def _remove(
        self, now: float, worker: NodeId, tier: Tier, block_hashes: Iterable[bytes]
    ) -> None:
        for block_hash in block_hashes:
            block = self._blocks[block_hash]
            tiers = block.holders.get(worker, set())
            tiers.discard(tier)
            if not tiers:
                block.holders.pop(worker, None)
                block.lost_at = now
                block.lost_from = f"{worker.partition('-')[0]} {tier}"

    def _forget(self, now: float, worker: NodeId) -> None:
        """It has died, with all that it held."""
        for block in self._blocks.values():
            if block.holders.pop(worker, None) is not None:
                block.lost_at, block.lost_from = now, f"{worker.partition('-')[0]} died"

    def _on_work(self, now: float, work: Decode | Prefill) -> None:
        names = unpack(work.block_hashes)
        if work.request_id not in self._found and isinstance(work, Decode):
            usable = (work.num_prompt_tokens - 1) // self._block_size
            self._found[work.request_id] = self._look(now, names[:usable])
        keeps = work.retention is None or work.retention.keep_s > 0
        for name in names:
            block = self._blocks[name]
            block.kept = keeps or (block.kept and block.used_at == now)
            block.used_at = now

    def _look(self, now: float, names: Sequence[bytes]) -> _Found:
        blocks = []
        for name in names:
            if name not in self._blocks or not _was_held(self._blocks[name]):
                break
            blocks.append(self._blocks[name])
        by_any = next((i for i, each in enumerate(blocks) if not each.holders), len(blocks))
        by_one, workers = 0, set(blocks[0].holders) if blocks else set()
        while workers and by_one < by_any:
            by_one += 1
            workers &= set(blocks[by_one].holders) if by_one < by_any else set()
        first = blocks[by_any] if by_any < len(blocks) else None
        loss = None
        if first is not None:
            kept_s = first.lost_at - first.used_at
            loss = Loss(first.lost_from, max(0.0, kept_s), now - first.used_at)
        size = self._block_size
        kept = first is not None and first.kept
        return _Found(by_one * size, by_any * size, len(blocks) * size, kept, loss)


def _was_held(block: _Block) -> bool:
    return bool(block.holders or block.lost_from)


def _fates(found: _Found, num_cached: int, num_tokens: int) -> dict[str, int]:
    """Tokens that were computed. What has come to the worker meanwhile counts as cached."""
    gone = "evicted" if found.was_kept else "dropped"
    ends = (("elsewhere", found.by_one), ("apart", found.by_any), (gone, found.ever))
    fates, at = {}, num_cached
    for fate, end in (*ends, ("new", num_tokens)):
        if end > at:
            fates[fate] = end - at
            at = end
    return fates


def summary_of(whys: Sequence[Why]) -> Summary:
    """Means over requests, ready for JSON: milliseconds by phase, and of the phase in which prompts
    are computed by the fate of the tokens; then where KV was lost from, as shares of the tokens,
    with how long it had been kept and how long after its last use it was wanted."""
    count = max(1, len(whys))
    phases: defaultdict[str, float] = defaultdict(float)
    tokens: defaultdict[str, int] = defaultdict(int)
    seconds: defaultdict[str, float] = defaultdict(float)
    losses: defaultdict[str, list[tuple[Loss, int]]] = defaultdict(list)
    for why in whys:
        for name, phase_s in why.phases.items():
            phases[name] += phase_s
        computed = sum(why.computed.values())
        for fate, number in why.computed.items():
            tokens[fate] += number
            seconds[fate] += why.phases.get("prefill", 0.0) * number / computed
        if why.loss is not None:
            lost = why.computed.get("evicted", 0) + why.computed.get("dropped", 0)
            losses[why.loss.place].append((why.loss, lost))
    all_lost = sum(number for each in losses.values() for _, number in each)
    return {
        "phases_ms": {name: 1e3 * total / count for name, total in phases.items()},
        "computed_tokens": {fate: tokens[fate] for fate in FATES if tokens[fate]},
        "computed_ms": {fate: 1e3 * seconds[fate] / count for fate in FATES if tokens[fate]},
        "lost_from": {place: _lost(each, all_lost) for place, each in sorted(losses.items())},
    }


def _lost(losses: Sequence[tuple[Loss, int]], all_lost: int) -> dict[str, float]:
    gaps = [loss.gap_s for loss, _ in losses]
    return {
        "share": sum(number for _, number in losses) / max(1, all_lost),
        "kept_s_p50": float(np.percentile([loss.kept_s for loss, _ in losses], 50)),
        "gap_s_p50": float(np.percentile(gaps, 50)),
        "gap_s_p90": float(np.percentile(gaps, 90)),
    }


def why_table(found: Sequence[Summary]) -> Group:
    """Replays of one trace, each by its policy: mean TTFT by phase, and what of it each fate of the
    tokens costs. In 80 columns, for as many policies as fit."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("mean TTFT, ms", no_wrap=True)
    for one in found:
        table.add_column(Text(one["policy"]), justify="right", no_wrap=True, max_width=14)
    whys = [one["why"] for one in found]
    for phase in dict.fromkeys(name for why in whys for name in why["phases_ms"]):
        table.add_row(phase, *(_ms(why["phases_ms"].get(phase)) for why in whys))
        if phase != "prefill":
            continue
        for fate in [each for each in FATES if any(each in why["computed_ms"] for why in whys)]:
            table.add_row(f"  of it {fate}", *(_ms(why["computed_ms"].get(fate)) for why in whys))
    table.add_row("all", *(_ms(sum(why["phases_ms"].values())) for why in whys))
    lines = [
        f"{one['policy']}: {lost['share']:.0%} of what was evicted or dropped was last in"
        f" {place}, for {lost['kept_s_p50']:.0f} s without use (p50); it was wanted after"
        f" {lost['gap_s_p50']:.0f} s (p50), {lost['gap_s_p90']:.0f} s (p90)"
        for one in found
        for place, lost in one["why"]["lost_from"].items()
    ]
    return Group("", table, Text("\n".join(lines)))


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:,.1f}"
