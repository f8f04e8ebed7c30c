"""The ranks of a worker seen from its first: one worker, made of what each of them has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.host import Deliver
from kvrelay.engine.kv.tier import DiskRecord
from kvrelay.engine.step import Step
from kvrelay.kvtransfer.agent import StoreIndex
from kvrelay.kvtransfer.agents.ranks import join_ranks
from kvrelay.kvtransfer.ranks import RankAnswers, add_checksums, first_with_heads
from kvrelay.kvtransfer.tiers.blocks import StoreRecords
from kvrelay.worker.transfers import RankFacts, Transfers

if TYPE_CHECKING:
    from kvrelay.engine.model.parallel.runner import ParallelRunner


class Ranks:
    """Rank 0, whose transfers are `own`, and the followers of `runner`. Owns neither."""

    def __init__(self, own: Transfers, runner: ParallelRunner) -> None:
        self._own = own
        self._runner = runner
        self._facts: list[RankFacts] = [own.facts, *runner.facts]
        self._counted = first_with_heads([each.share for each in self._facts])
        tiers = set.intersection(*(set(each.records) for each in self._facts))
        self.records: StoreRecords = {
            tier: in_all([each.records[tier] for each in self._facts]) for tier in tiers
        }
        self._forget_the_rest()

    def config(self) -> WorkerConfig:
        """Of the worker."""
        config = self._own.config
        each = [facts.metadata for facts in self._facts]
        config = replace(config, agent_metadata=join_ranks(config.node_id, each))
        return config if self.records else replace(config, num_disk_blocks=0)

    def notices(self) -> list[str]:
        """What an operator should know; once, if all ranks say it."""
        return [*dict.fromkeys(notice for facts in self._facts for notice in facts.notices)]

    def join(self, deliver: Deliver) -> RankAnswers:
        answers = RankAnswers(self._counted, self._runner.tell, deliver)
        self._runner.on_companion_message(answers.add)
        return answers

    def add_checksums(self, step: Step, own: list[int]) -> list[int]:
        """Of the blocks that `step` filled, from those of rank 0's heads."""
        each = zip([own, *self._runner.checksums(step)], self._counted, strict=True)
        return add_checksums([sums for sums, is_counted in each if is_counted])

    def _forget_the_rest(self) -> None:
        """What a rank has in a store and another has not."""
        for tier, kept in self.records.items():
            slots = {record.slot for facts in self._facts for record in facts.records[tier]}
            slots -= {record.slot for record in kept}
            if slots:
                forgotten = StoreIndex(remove=tuple(sorted(slots)), tier=tier)
                self._own.storage[tier].store.update(forgotten)
                self._runner.tell(forgotten)


def in_all(of_ranks: Sequence[Sequence[DiskRecord]]) -> tuple[DiskRecord, ...]:
    """Blocks that every rank has, in one slot and with one checksum, which is the whole block's."""

    def key(record: DiskRecord) -> Any:
        return record.slot, record.block_hash, record.checksum

    first, *others = of_ranks
    known = [{key(record) for record in rank} for rank in others]
    return tuple(record for record in first if all(key(record) in rank for rank in known))
