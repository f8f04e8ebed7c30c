"""From a `WorkerSpec` to a worker that could run, in the process that becomes it.

The model is loaded, what moves its KV is opened, and the node is made. Where the worker has several
ranks, they are seen from the first as one worker, made of what each of them has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from msgspec import structs

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.host import Deliver, Executor
from kvrelay.engine.identity import files_of
from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.engine.model.config import check_unchanged, versions_of
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.engine.node import Node
from kvrelay.engine.step import Step
from kvrelay.engine.support import (
    Capability,
    no_to,
    notices_of,
    tiers_of,
)
from kvrelay.kvtransfer.agent import StoreIndex
from kvrelay.kvtransfer.movers.ranks import join_ranks
from kvrelay.kvtransfer.ranks import RankAnswers, add_checksums, first_with_heads
from kvrelay.kvtransfer.tiers.blocks import StoreRecords
from kvrelay.kvtransfer.tiers.registry import without_missing
from kvrelay.worker.host_tier import kept_bytes as kept_host_bytes
from kvrelay.worker.kv_plan import (
    BuildError,
    KVPlan,
    auto_host_bytes,
    check_memory,
    model_config,
    plan_kv,
    plan_tiers,
    resolve_max_model_len,
)
from kvrelay.worker.process import BuiltWorker
from kvrelay.worker.spec import BuildOptions, WorkerSpec
from kvrelay.worker.threads import WorkerThreads, at_low_priority
from kvrelay.worker.transfers import (
    MakeRankTransfers,
    RankFacts,
    RemoveKV,
    Transfers,
    has_own_cores,
    open_transfers,
)

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
        """The worker's, with what all ranks have."""
        config = self._own.config
        each = [facts.metadata for facts in self._facts]
        config = structs.replace(config, agent_metadata=join_ranks(config.node_id, each))
        return structs.replace(
            without_missing(config, self.records),
            host_outlives=Tier.HOST in self.records,
            reads_left_kv=config.reads_left_kv and Tier.LEFT in self.records,
        )

    def notices(self) -> list[str]:
        """What an operator should know; once, if all ranks say it."""
        return [*dict.fromkeys(notice for facts in self._facts for notice in facts.notices)]

    def close(self) -> None:
        """End the others, which leave what is in host memory if this one does."""
        if not self._own.leaves_kv:
            self._runner.tell(RemoveKV())
        self._runner.close()

    def join(self, deliver: Deliver) -> RankAnswers:
        answers = RankAnswers(self._counted, self._runner.tell, deliver)
        self._runner.on_companion_message(answers.add)
        return answers

    def add_checksums(self, step: Step, own: list[int]) -> list[int]:
        """Completes those of the blocks that `step` filled, given those of rank 0's heads."""
        each = zip([own, *self._runner.checksums(step)], self._counted, strict=True)
        return add_checksums([sums for sums, is_counted in each if is_counted])

    def _forget_the_rest(self) -> None:
        """What a rank has in a store and another has not."""
        for tier, kept in self.records.items():
            slots = {record.slot for facts in self._facts for record in facts.records[tier]}
            slots -= {record.slot for record in kept}
            if slots:
                forgotten = StoreIndex(remove=tuple(sorted(slots)), tier=tier)
                self._own.update(forgotten)
                self._runner.tell(forgotten)


def in_all(of_ranks: Sequence[Sequence[DiskRecord]]) -> tuple[DiskRecord, ...]:
    """Blocks that every rank has, in one slot and with one checksum, which is the whole block's."""

    def key(record: DiskRecord) -> Any:
        return record.slot, record.block_hash, record.checksum

    first, *others = of_ranks
    known = [{key(record): record.num_bytes for record in rank} for rank in others]
    return tuple(
        replace(record, num_bytes=record.num_bytes + sum(rank[key(record)] for rank in known))
        for record in first
        if all(key(record) in rank for rank in known)
    )


log = logging.getLogger("kvrelay.build")

MakeWorker = Callable[[WorkerConfig, StoreRecords], Node]


def build(spec: WorkerSpec, make_worker: MakeWorker, options: BuildOptions) -> BuiltWorker:
    """Load the model and make the worker; takes seconds. Raises BuildError."""
    # It takes a core for seconds, which the worker that has taken over the streams needs.
    at_low_priority(lambda: import_module("kvrelay.engine.model.runner"))
    from kvrelay.engine.model.runner import ModelRunner
    from kvrelay.engine.model.step_executor import StepExecutor
    from kvrelay.kvtransfer.agent import AgentError

    model, engine, on_gpu = spec.model, spec.engine.sized(gpu=spec.on_gpu), spec.on_gpu
    try:
        path = spec.find_model()
        before = versions_of(files_of(path))
        shape = model_config(path, engine)
        if model.dtype == "auto":
            dtype = ModelRunner.default_dtype("cuda" if on_gpu else "cpu")
            model = structs.replace(model, dtype=dtype)
        plan = plan_kv(shape, engine, model.dtype, model.quantization, on_gpu)
        plan = with_tiers(plan, spec)
        longest = resolve_max_model_len(shape, engine, plan)
        engine = structs.replace(engine, num_blocks=plan.num_blocks, max_model_len=longest)
        spec = replace(spec, model=model, engine=engine)
        runner, parallel = open_runner(spec, path, MakeRankTransfers(spec, plan))
        asked = [*runner.drafts, *tiers_of(spec.tiers)]
        asked += [Capability.QUEST] if engine.quest_budget else []
        missing = notices_of(asked, runner.traits)
        if no_to(Capability.NGRAM_DRAFTS, runner.traits):  # to propose some would cost time
            spec = replace(spec, engine=structs.replace(engine, num_speculative_tokens=0))
        first = Shard(0, spec.engine.tensor_parallel_size)
        own = open_transfers(spec, path, plan, runner, first, options)
        check_unchanged(before, files_of(path))
    except (ModelError, AgentError) as error:
        raise BuildError(str(error)) from error
    ranks = None if parallel is None else Ranks(own, parallel)
    config = own.config if ranks is None else ranks.config()
    config = structs.replace(config, no_images=runner.no_images, graph_bytes=runner.graph_bytes)
    records = own.facts.records if ranks is None else ranks.records
    notices = [*runner.notices, *missing, *(own.notices if ranks is None else ranks.notices())]
    for notice in notices:
        log.warning("%s: %s", spec.worker, notice)
    steps = StepExecutor(
        runner.execute,
        own.checksums,
        launch_step=runner.launch,
        begin_checksums=own.begin_checksums,
        add_ranks=ranks.add_checksums if ranks else None,
        close=ranks.close if ranks else None,
        prepare_grammar=runner.grammars.prepare,
        is_device_lost=runner.is_device_lost,
        change_weights=_versions(runner, parallel).change,
        num_passed=runner.num_passed,
        abandon=(lambda _: None) if parallel else runner.abandon,
    )

    def make_executor(deliver: Deliver) -> Executor:
        return WorkerThreads(
            steps,
            {t: each for t, each in own.copies.items() if t is Tier.DEVICE or t in records},
            deliver,
            spec.worker,
            join_ranks=ranks.join if ranks else None,
            shares_cores=spec.num_peers > 0 and not has_own_cores(spec),
        )

    lost, worker = parallel.when_lost if parallel else None, make_worker(config, records)
    return BuiltWorker(worker, config.info(), make_executor, tuple(notices), lost, own.leave_kv)


def with_tiers(plan: KVPlan, spec: WorkerSpec) -> KVPlan:
    """`plan` with the tiers that the machine has room for. Raises BuildError."""
    from kvrelay.engine.model.device import gpu_bytes

    on_gpu, num_machines = spec.on_gpu, spec.num_machines
    kept_bytes, taken_bytes = kept_host_bytes(spec.cluster, spec.worker)
    available_bytes = psutil.virtual_memory().available + taken_bytes
    host_bytes = spec.share_of(spec.tiers.set_host_gib)
    if spec.tiers.host_gib == "auto":  # each of its machines gives as much as this one
        gpus = spec.num_ranks_here * gpu_bytes() if on_gpu else 0
        needed_bytes = plan.host_needed_bytes(on_gpu=on_gpu)
        free_bytes = available_bytes - needed_bytes // num_machines
        here = auto_host_bytes(plan, spec.num_sharing, free_bytes, gpus)
        here = max(here, kept_bytes) if here else 0  # as much as before it died
        host_bytes = here * num_machines
    disk_bytes, packed_bytes = map(spec.share_of, (spec.tiers.disk_gib, spec.tiers.packed_gib))
    plan = plan_tiers(plan, host_bytes, disk_bytes, spec.tiers.disk_codec, packed_bytes)
    if num_machines == 1:  # else this one has a part
        host_bytes = plan.host_bytes + (plan.copied_bytes if on_gpu else 0)
        check_memory([] if on_gpu else [plan], available_bytes, host_bytes)
    return plan


def _versions(runner: Any, parallel: ParallelRunner | None) -> Any:
    """What changes weights in place, as `engine.model.versions.Versions`."""
    if parallel is None:
        from kvrelay.engine.model.versions import Versions

        return Versions(runner)
    from kvrelay.engine.model.parallel.updates import LeaderVersions

    return LeaderVersions(parallel)


def open_runner(
    spec: WorkerSpec, path: Path, companion: MakeRankTransfers | None = None
) -> tuple[Any, Any]:
    """(what runs steps, the same if it has processes of its own that may be lost, else None). Both
    have the interface of ModelRunner. `companion`: of each rank but 0. Raises ModelError."""
    from kvrelay.engine.model.versions import read_weights

    read = partial(read_weights, spec.weights) if spec.weights else None
    if spec.engine.tensor_parallel_size == 1:
        from kvrelay.engine.model.runner import ModelRunner

        # Others of the machine may be serving; one that takes the streams over goes first.
        make = partial(ModelRunner, path, spec.model, spec.engine, read=read)
        return at_low_priority(make), None
    from kvrelay.engine.model.parallel.runner import ParallelRunner

    runner = ParallelRunner(
        path,
        spec.model,
        spec.engine,
        companion=companion,
        host=spec.host,
        further=spec.rank_hosts,
        find_model=spec.find_model,
        read=read,
    )
    return runner, runner
