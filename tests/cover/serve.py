"""One row, from the start of its cluster to what it leaves behind.

Life: the mix is asked, and a worker is killed in mid-stream, so that one is left of its model; a
session is parked and resumed there; what was evicted comes back from the tiers; weights change
while streams run; nothing may be left. Then the next worker begins with the KV that is left, and
another machine with the objects. Each answer is compared with that of a plain worker.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.config import EngineSection
from kvrelay.engine.kv.scope import APPROXIMATE, CacheScope
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.node import Effect
from kvrelay.engine.step import Step, StepDone
from kvrelay.engine.support import Capability, Trait, model_traits
from kvrelay.engine.weights import UpdateMode
from kvrelay.kvtransfer.movers import object as objects
from kvrelay.kvtransfer.store.arena import arena_root, remove_arenas
from kvrelay.router.config import RouterConfig
from kvrelay.router.messages import SessionCommand, SessionOp, SessionReply, SessionState
from tests.cover.checkpoints import Checkpoints
from tests.cover.requests import (
    GREEDY,
    SHORT,
    TIMEOUT_S,
    USUAL,
    Asked,
    Plain,
    differences,
    ended,
    mix_of,
    prompt_of,
    submit_all,
)
from tests.cover.settings import HAVE_MTP, MODEL_TRAITS, YES, Row, is_without, shown
from tests.local.test_local_tiers import MIB, assert_clean, load_all, settle
from tests.support.local import Completion, LocalCluster
from tests.support.s3 import ACCESS_KEY, SECRET_KEY, s3_standin
from tests.support.weights import Operator

GIB = float(1 << 30)
STEP_S = 0.2  # a step, of several tokens, takes at least so long while streams have to run on
NUM_BEGUN = 1  # tokens: the next step may be the last
ROUGH = CacheScope(APPROXIMATE + b"anne")


def serve(row: Row, made: Checkpoints, folder: Path) -> None:
    """Raises what is wrong; AssertionError for answers, with a line for each. `folder`: empty."""
    served = Served(row, made, folder)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        prepare(patch, row)
        if row["objects"] == YES:
            served.store = stack.enter_context(_object_store(patch))
        try:
            served.run()
            left = [str(each) for each in (arena_root() / served.name).rglob("*")]
            assert not left, f"shared memory is left: {left}"
        finally:
            remove_arenas(served.name)


def prepare(patch: pytest.MonkeyPatch, row: Row) -> None:
    """What differs from a server: it does not hurry, drafts at whatever gain, and interprets the
    kernels of GPUs."""
    execute = ModelRunner.execute

    def slowly(self: ModelRunner, step: Step) -> StepDone:
        time.sleep(Served.step_s)
        return execute(self, step)

    patch.setattr(ModelRunner, "execute", slowly)
    patch.setattr("kvrelay.router.router.PAUSE", Backoff(0.0, 0.0))
    patch.setattr("kvrelay.engine.scheduling.drafts.MIN_GAIN", 0.0)
    patch.setattr("kvrelay.engine.scheduling.drafts.MAX_SLOWDOWN", 100.0)
    if row["computes"] == "triton":
        from tests.cover.interpreted import InterpretedRunner

        patch.setattr("kvrelay.engine.model.runner.ModelRunner", InterpretedRunner)


@contextmanager
def _object_store(patch: pytest.MonkeyPatch) -> Iterator[Any]:
    patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    patch.setattr(objects, "STALL_S", TIMEOUT_S)
    with s3_standin() as server:
        yield server


class Served:
    """A row, with what its workers are to answer."""

    step_s = 0.0  # a step takes at least, whichever worker's

    def __init__(self, row: Row, made: Checkpoints, folder: Path) -> None:
        self.row, self.made, self.folder = row, made, folder
        self.name = f"cover-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.store: Any = None
        kind = row["model"]
        others = [each for each in HAVE_MTP if each != kind] if row["drafter"] == "mtp" else []
        self.other = next(iter(others), "other")
        self.kinds = [kind, *([self.other] if row["models"] == "two" else [])]
        self.models = {each: made.model(each) for each in self.kinds}
        found = model_traits(read_config(self.models[kind])) - {Trait.OTHER_VISION}  # all of them
        assert found == MODEL_TRAITS[kind]
        quantization = "none" if row["weights"] == "stored" else row["weights"]
        kv_dtype = "auto" if row["kv"] == "same" else "float8_e4m3"
        num_ranks = 2 if row["computes"] == "ranks" and quantization != "none" else 1
        self.plain = Plain(quantization, kv_dtype, num_ranks)  # type: ignore[arg-type]
        self.size = SHORT if row["computes"] == "triton" else USUAL
        self.asked = mix_of(row, made, self.other, self.size)
        self.right = self.plain.answers(self.asked, self.models)
        if row["ngrams"] == YES:
            self.asked = [
                replace(each, sampling=replace(each.sampling, prediction=_nearly(known.tokens)))
                for each, known in zip(self.asked, self.right, strict=True)
            ]

    def has(self, setting: str) -> bool:
        return self.row[setting] == YES

    def cluster(self, **changes: Any) -> LocalCluster:
        row = self.row
        groups = max(read_config(path).kv_spec(16, "float32").num_groups for path in self.paths)
        drafter = {"head": str(self.made.head), "model": str(self.made.model("dense"))}
        engine = EngineSection(
            # Some wait, and a session does not stay on the device for ever.
            num_blocks=6 * groups * (USUAL.longest + 2 * USUAL.count) // 16,
            max_num_batched_tokens=64,
            num_speculative_tokens=5 if self.has("ngrams") else 0,
            drafter={"none": "", "mtp": "mtp", **drafter}[row["drafter"]],
            tensor_parallel_size=2 if row["computes"] == "ranks" else 1,
            kv_dtype=self.plain.kv_dtype,
            threads=1 if row["computes"] != "ranks" else 2,
            step_timeout_s=0.0 if row["computes"] == "triton" else 30.0,
        )
        two_pools = row["pools"] == "two"
        tiers: dict[str, Any] = {"host_bytes": 16 * MIB}
        if self.has("codec"):
            tiers |= {"disk_bytes": 64 * MIB, "disk_path": str(self.folder / "disk")}
            tiers |= {"disk_after_s": 0.0, "disk_codec": "lossless"}
        if self.has("approximate"):
            tiers["packed_gib"] = 8 * MIB / GIB
        if self.store is not None:
            tiers |= {"object_bucket": self.store.bucket, "object_endpoint": self.store.url}
            tiers["object_after_s"] = 0.1
        options: dict[str, Any] = {
            "prefill": 1 if two_pools else 0,
            "decode": 2,
            "router": RouterConfig(policy="round_robin") if two_pools else None,
            "num_routers": 2 if row["routers"] == "two" else 1,
            "quantization": self.plain.quantization,
            "further": {each: self.models[each] for each in self.kinds[1:]},
            "name": self.name,
            **tiers,
        }
        return LocalCluster(self.paths[0], engine=engine, **options | changes)

    @property
    def paths(self) -> list[Path]:
        return list(self.models.values())

    def run(self) -> None:
        with self.cluster() as cluster:
            self.check_notices(cluster)
            load_all(cluster)
            self.check_through_a_kill(cluster)
            if self.has("sessions"):
                self.check_session(cluster)
            if self.has("approximate"):
                self.check_approximate(cluster)
            self.check_tiers(cluster)
            if self.has("updates"):
                self.check_update(cluster)
            settle(cluster)
            assert_clean(cluster)
            if self.has("left"):
                for built in cluster.workers.values():
                    built.leave_kv()
        if self.has("left"):
            with self.cluster() as cluster:
                self.check_that_it_goes_on(cluster, "the next workers")
        if self.store is not None and not is_without(self.row, Capability.OBJECT_TIER):
            remove_arenas(self.name)
            with self.cluster(host_bytes=0, disk_bytes=0, packed_gib=0.0) as cluster:
                self.wait_for(lambda: self.counted(cluster, "tier_found_object") > 0)
                self.check_that_it_goes_on(cluster, "another machine")

    def check(self, cluster: LocalCluster, futures: list[Future[Completion]], when: str) -> int:
        """Returns how many tokens were cached."""
        answers = ended(cluster, futures)
        wrong = differences(self.asked, answers, self.right)
        assert not wrong, "\n".join([f"{when}:", *wrong])
        return sum(each.num_cached_tokens for each in answers)

    def ask(self, cluster: LocalCluster, when: str) -> int:
        futures = submit_all(cluster, self.asked, to=[*cluster.routers])
        return self.check(cluster, futures, when)

    def ask_again(self, cluster: LocalCluster, when: str) -> None:
        fill = any(self.fills_block(cluster, each) for each in self.asked)
        assert self.ask(cluster, when) > 0 or not fill, f"{when}: nothing was there"

    def fills_block(self, cluster: LocalCluster, asked: Asked) -> bool:
        """A block that also has states holds more tokens, the narrower the KV is."""
        sizes = [
            built.info.block_size
            for worker, built in cluster.workers.items()
            if self.kind_of(worker) == asked.kind
        ]
        return len(asked.prompt) > max(sizes)

    def check_notices(self, cluster: LocalCluster) -> None:
        told = "\n".join(note for built in cluster.workers.values() for note in built.notices)
        for name, capability in (
            ("objects", Capability.OBJECT_TIER),
            ("ngrams", Capability.NGRAM_DRAFTS),
            ("approximate", Capability.APPROXIMATE_KV),
        ):
            if self.has(name):
                is_told = str(capability) in told
                assert is_told == is_without(self.row, capability), (capability, told)

    def check_through_a_kill(self, cluster: LocalCluster) -> None:
        futures = self.begun(cluster, self.asked)
        cluster.kill("decode-0")
        Served.step_s = 0.0
        self.check(cluster, futures, "through the death of a worker")

    def begun(self, cluster: LocalCluster, asked: list[Asked]) -> list[Future[Completion]]:
        """Returns requests that are in mid-stream, and go on slowly."""
        Served.step_s = STEP_S
        futures = submit_all(cluster, asked, to=[*cluster.routers])
        self.wait_for(lambda: self.has_begun(cluster, futures))
        return futures

    def has_begun(self, cluster: LocalCluster, futures: list[Future[Completion]]) -> bool:
        """Whether most of what runs has some tokens."""

        def look() -> list[int]:
            routers = [r for each in cluster.routers.values() for r in each.routers.values()]
            return [live.num_output_tokens for r in routers for live in r.live.values()]

        live: list[int] = cluster.run(look)
        cluster.check()
        ended = all(future.done() for future in futures)
        assert not ended, "all has ended: steps are too fast to kill a worker in mid-stream"
        return sum(count >= NUM_BEGUN for count in live) > len(live) // 2

    def check_session(self, cluster: LocalCluster) -> None:
        kind, prompt = self.row["model"], prompt_of(self.size.longest, 50)
        sampling = replace(GREEDY, max_tokens=self.size.count)
        first = Asked(kind, prompt, sampling)
        (known,) = self.plain.answers([first], self.models)
        named = replace(first, fields={"session": "s", "tenant": "t"})
        tell = Commands(cluster)
        answers = ended(cluster, submit_all(cluster, [named]))
        assert not (wrong := differences([first], answers, [known])), wrong
        for op in (SessionOp.PARK, SessionOp.RESUME):
            reply = tell(op, "s", "t")
            assert reply.refusal is None, reply
            settle(cluster)
            if op is SessionOp.PARK:
                assert [each.state for each in reply.sessions] == [SessionState.PARKED]
        later = Asked(kind, [*prompt, *known.tokens, *prompt_of(9, 51)], sampling)
        right = self.plain.answers([later], self.models)
        named = replace(later, fields=named.fields)
        answers = ended(cluster, submit_all(cluster, [named]))
        assert not (wrong := differences([later], answers, right)), wrong
        is_cached = answers[0].num_cached_tokens > 0
        assert is_cached or not self.fills_block(cluster, later), "nothing of the session was there"
        assert tell(SessionOp.CLOSE, "s", "t").refusal is None

    def check_approximate(self, cluster: LocalCluster) -> None:
        """What was evicted comes back as the numbers that it comes back as to a plain worker."""
        prompt, count = prompt_of(self.size.longest, 60), self.size.count
        greedy = replace(GREEDY, max_tokens=count)
        asked = Asked(self.row["model"], prompt, greedy, "", {"scope": ROUGH})
        exact = replace(asked, fields={"scope": CacheScope(b"anne")})

        def answered(of: LocalCluster) -> list[Completion]:
            found = []
            for each in (asked, asked, exact):
                settle(of)
                evict(of)
                found += ended(of, submit_all(of, [each]))
            return found

        tiers = {"host_bytes": 16 * MIB, "packed_gib": 8 * MIB / GIB}
        with self.plain.cluster(self.models[asked.kind], **tiers) as plain:
            load_all(plain)
            right = answered(plain)
        answers, known = answered(cluster), [right[0], right[1], right[2]]
        is_exact = is_without(self.row, Capability.APPROXIMATE_KV)
        if is_exact or answers[1].num_cached_tokens != right[1].num_cached_tokens:
            known[1] = right[0]  # or some of it was computed again
        assert not (wrong := differences([asked, asked, exact], answers, known)), wrong
        assert right[0].tokens == right[2].tokens, "exact KV was met by approximate KV"

    def check_tiers(self, cluster: LocalCluster) -> None:
        settle(cluster)
        evict(cluster)
        self.ask_again(cluster, "from the tiers")

    def check_update(self, cluster: LocalCluster) -> None:
        """Streams end by the weights with which they began; then nothing of those is used."""
        plain = [each for each in self.asked if not each.model][:3]
        models = {kind: self.made.retrained(kind) for kind in self.kinds}
        futures, operator = self.begun(cluster, plain), Operator(cluster)
        Served.step_s = 0.0
        for kind, path in models.items():
            of_kind = [w for w in sorted(cluster.workers) if self.kind_of(w) == kind]
            operator.update(path, UpdateMode.DRAIN, of_kind)
        answers = ended(cluster, futures)
        assert not (wrong := differences(plain, answers, self.right[: len(plain)])), wrong
        before, self.right = self.right, self.plain.answers(self.asked, models)
        changed = [a.tokens != b.tokens for a, b in zip(before, self.right, strict=True)]
        assert any(changed), "the new weights say the same"
        assert self.ask(cluster, "by the new weights") == 0, "KV of other weights was used"

    def check_that_it_goes_on(self, cluster: LocalCluster, who: str) -> None:
        load_all(cluster)
        if not self.has("updates"):
            self.ask_again(cluster, who)
        settle(cluster)
        assert_clean(cluster)

    def kind_of(self, worker: str) -> str:
        """Those of the second model are named after it."""
        return self.other if f"-{self.other}-" in worker else self.row["model"]

    @staticmethod
    def counted(cluster: LocalCluster, name: str) -> float:
        nodes: list[Any] = [built.node for built in cluster.workers.values()]
        return sum(node.exchange.tiers.counters.get(name, 0) for node in nodes)

    @staticmethod
    def wait_for(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_so():
            assert time.monotonic() < deadline, "it never comes to that"
            time.sleep(0.005)


class Commands:
    """Node. Sends commands for sessions, and waits for what is answered."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.node_id = "commands"
        self._cluster, self._number = cluster, 0
        self._reply: Future[SessionReply] = Future()
        cluster.run(lambda: cluster.host.add(self))

    def start(self, now: float) -> list[Effect]:
        return []

    def receive(self, now: float, message: SessionReply) -> list[Effect]:
        self._reply.set_result(message)
        return []

    def __call__(self, op: SessionOp, session: str, tenant: str) -> SessionReply:
        self._reply, self._number = Future(), self._number + 1
        command = SessionCommand(str(self._number), self.node_id, tenant, op, session)
        self._cluster.run(lambda: self._cluster.host.deliver("router-0", command))
        return self._reply.result(TIMEOUT_S)


def evict(cluster: LocalCluster) -> None:
    """All blocks from all devices, as others would that need the memory."""
    for built in cluster.workers.values():
        pool = built.node.core.kv.pool  # type: ignore[attr-defined]
        cluster.run(lambda pool=pool: pool.evict(pool.block_hashes()))


def _nearly(tokens: list[int]) -> tuple[int, ...]:
    """What comes, but for some."""
    return tuple(token ^ (at % 7 == 6) for at, token in enumerate(tokens))


def command_of(row: Row) -> str:
    return f"python -m tests.cover --row '{shown(row)}'"
