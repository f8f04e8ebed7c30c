"""A worker that computes with vLLM: its real node and thread under a real router, over a stand-in
for vLLM that gives what the real one gives. `tests/e2e/test_vllm.py` has the real one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from msgspec import structs

from kvrelay.cluster.api.constraints.grammar import grammar_of
from kvrelay.cluster.roles import ROLES
from kvrelay.decode_worker.messages import Decode
from kvrelay.decode_worker.vllm.arguments import arguments
from kvrelay.decode_worker.vllm.build import build
from kvrelay.decode_worker.vllm.held import HeldBlocks, salt_of
from kvrelay.decode_worker.vllm.messages import (
    Begin,
    Cleared,
    Copied,
    Generated,
    NotBegun,
    Removed,
    Stepped,
    Stop,
    Stored,
)
from kvrelay.decode_worker.vllm.node import VllmWorker
from kvrelay.decode_worker.vllm.parameters import structure
from kvrelay.engine.config import EngineSection, ModelSection, TiersSection, WorkerConfig
from kvrelay.engine.cost import prompt_features
from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.events import KVEvents
from kvrelay.engine.kv.scope import UNSALTED, CacheScope
from kvrelay.engine.kv.spec import KVSpec
from kvrelay.engine.messages import Abort, Probe, Refused, TokenDeltas
from kvrelay.engine.node import Exit, Send, Woken
from kvrelay.engine.request import FinishReason, Pooling, ReasoningBudget, Refusal, SamplingParams
from kvrelay.engine.stats import Role, RouterUp, WorkerStats
from kvrelay.engine.weights import UpdateMode, UpdateWeights, WeightsUpdated, WeightVersion
from kvrelay.engine.wire import channel
from kvrelay.engine.wire.channel import own_version
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.layout import BlockLayout
from kvrelay.kvtransfer.messages import KVConnect, KVConnected
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.router.config import RouterConfig
from kvrelay.worker import guardian
from kvrelay.worker.guardian import WorkerGuardian, in_environment, openmp_of
from kvrelay.worker.messages import StartFailed
from kvrelay.worker.process import Listening
from kvrelay.worker.spec import WorkerOrder, WorkerSpec
from tests.local.test_local import model_dir as model_dir
from tests.support import vllm_stand_in
from tests.support.local import LocalCluster
from tests.support.vllm_stand_in import LLMEngine, next_token

VLLM = EngineSection(
    runs="vllm", python="bin/python", block_size=32, num_blocks=64, max_model_len=512, lease_s=2.0
)
GREEDY = SamplingParams(max_tokens=60, temperature=0.0)
PROMPTS = [[(7 * i + j) % 250 for j in range(20 + 31 * i)] for i in range(6)]
HANDS_OVER = RouterConfig(policy="round_robin")
CONFIG = WorkerConfig(
    node_id="decode-0",
    role=Role.DECODE,
    epoch=3,
    block_size=4,
    num_blocks=16,
    max_model_len=64,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    max_waiting=2,
    bytes_per_block=1,
    fingerprint=b"f",
    step_timeout_s=1.0,
)
ROUTER = "router-0"
WORK = Decode("r", replace(GREEDY, max_tokens=4), 1, ROUTER, (1, 2, 3), 3, 30.0)


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@pytest.fixture
def cluster(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """Two workers, whose node, thread and build are the real ones."""
    vllm_stand_in.install(monkeypatch)

    def built(spec: Any, options: Any) -> Any:
        vllm_stand_in.EventPublisherFactory.registered.clear()  # each process has its own
        return build(spec, ROLES, options.make_agent)

    monkeypatch.setattr("tests.support.local.build_worker", built)
    with LocalCluster(model_dir, prefill=0, decode=2, engine=VLLM) as cluster:
        yield cluster
        if LLMEngine.turns is not None:
            LLMEngine.turns.release(100_000)


def num_runs(cluster: LocalCluster, worker: str) -> int:
    node = cluster.workers[worker].node
    assert isinstance(node, VllmWorker)
    return len(node.core.seqs)


def assert_clean(cluster: LocalCluster) -> None:
    cluster.check()
    cluster.wait_idle()
    report = cluster.audit()
    assert report["clean"], report


def test_requests_are_answered_with_what_vllm_generates(cluster: LocalCluster) -> None:
    answers = cluster.generate(PROMPTS, GREEDY)
    assert [each.tokens for each in answers] == [greedy(prompt, 60) for prompt in PROMPTS]
    assert {each.finish for each in answers} == {FinishReason.LENGTH}
    stops = tuple(greedy(PROMPTS[0], 9)[-1:])
    [stopped] = cluster.generate(PROMPTS[:1], replace(GREEDY, stop_token_ids=stops))
    assert stopped.finish is FinishReason.STOP
    assert stopped.tokens[-1] == stops[0]
    [known] = cluster.generate(PROMPTS[:1], replace(GREEDY, logprobs=1))
    assert [len(each.top) for each in known.logprobs] == [1] * 60
    chosen = replace(GREEDY, logprobs=0, logprob_token_ids=(301, 300))  # never the next one
    [known] = cluster.generate(PROMPTS[:1], chosen)
    tops = [[token for token, _ in each.top] for each in known.logprobs]
    assert tops == [[token, 300, 301] for token in known.tokens]
    assert_clean(cluster)


def test_what_vllm_holds_is_known_to_the_router_and_reused(cluster: LocalCluster) -> None:
    # Where an output is long, workers' step times may count for more than its prompt.
    prompt, sampling = PROMPTS[5], replace(GREEDY, max_tokens=2)
    scopes = [UNSALTED, CacheScope(b"tenant"), CacheScope(b"other tenant")]
    for scope in scopes:
        both = (cluster.submit(prompt, sampling, scope=scope).result(30.0) for _ in range(2))
        first, again = both
        assert first.num_cached_tokens == 0
        assert again.num_cached_tokens == len(prompt) // 32 * 32
        assert sum(again.cached_by_source.values()) == again.num_cached_tokens
        assert again.cached_by_source.keys() <= {"device", "peer"}  # from the other worker's memory
    decisions = [cluster.decided(f"local-{number}", "")[0] for number in (1, 3, 5)]
    best = [max(c.held.device for c in each.options.decodes) for each in decisions]
    assert best == [len(prompt) // 32 * 32] * 3
    for worker in cluster.workers.values():
        assert isinstance(worker.node, VllmWorker)
        assert len(worker.node._held) == 0, "it names blocks of which it keeps copies itself"
    assert_clean(cluster)


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        replace(GREEDY, temperature=0.8, seed=7),
        replace(GREEDY, temperature=0.8, seed=7, presence_penalty=0.5),
        replace(GREEDY, temperature=0.8, is_seeded=False),
        replace(GREEDY, temperature=0.8, is_seeded=False, presence_penalty=0.5),
    ],
    ids=[
        *("greedy", "seeded", "depends on which tokens are output"),
        *("of no seed", "of no seed, depends on which tokens are output"),
    ],
)
def test_a_worker_that_dies_is_taken_over_from(
    cluster: LocalCluster, sampling: SamplingParams
) -> None:
    expected = [each.tokens for each in cluster.generate(PROMPTS, sampling)]
    turns = vllm_stand_in.turns(0)
    futures = [cluster.submit(prompt, sampling) for prompt in PROMPTS]
    before = cluster.status().totals.output_tokens
    deadline = time.monotonic() + 60
    while cluster.status().totals.output_tokens < before + 60:
        assert time.monotonic() < deadline
        turns.release(1)
        time.sleep(0.001)
    busy = max(cluster.workers, key=lambda name: cluster.run(lambda: num_runs(cluster, name)))
    cluster.kill(busy)
    turns.release(10_000)
    answers = [future.result(60.0) for future in futures]
    assert [each.failed for each in answers] == [None] * len(PROMPTS)
    assert cluster.status().totals.retries
    is_same = [each.tokens for each in answers] == expected
    # What is drawn is a function of the seed, and of how many were drawn since the prompt's end.
    repeats = sampling.is_seeded and sampling.presence_penalty > 0
    assert is_same is (sampling.temperature == 0 or repeats)
    explanations = cluster.router.explanations
    for answer in answers:
        each = cluster.run(lambda of=answer: explanations.get(of.request_id))
        assert each is not None
        first, *others = each.attempts
        assert not first.redraws
        went_on = [a for a in others if a.num_tokens > each.num_prompt_tokens]
        assert all(a.redraws is (sampling.temperature > 0) for a in went_on)
    assert {len(each.tokens) for each in answers} == {60}
    assert_clean(cluster)


def test_clients_that_leave_and_deadlines_free_vllm(cluster: LocalCluster) -> None:
    turns = vllm_stand_in.turns(8)
    futures = [cluster.submit(prompt, GREEDY, timeout_s=0.5) for prompt in PROMPTS[:3]]
    cluster.submit(PROMPTS[3], GREEDY, request_id="leaves")
    cluster.cancel("leaves")
    failed = [future.result(60.0).failed for future in futures]
    assert [each and each.reason for each in failed] == [Refusal.DEADLINE] * 3
    turns.release(100_000)
    assert_clean(cluster)


def test_an_engine_that_fails_ends_its_worker(cluster: LocalCluster) -> None:
    vllm_stand_in.turns(4)
    cluster.submit(PROMPTS[0], GREEDY)
    LLMEngine.fails = "out of memory"
    assert LLMEngine.turns is not None
    LLMEngine.turns.release(100)
    deadline = time.monotonic() + 60
    while not cluster.host.failed:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for error in cluster.host.failed.values():  # the other one, too, when it has tried it
        assert "vLLM: RuntimeError: out of memory" in str(error)


def test_a_slow_step_ends_no_worker(cluster: LocalCluster) -> None:
    turns = vllm_stand_in.turns(4)
    future = cluster.submit(PROMPTS[0], GREEDY)
    deadline = time.monotonic() + 60
    while not (busy := [name for name in cluster.workers if is_slow(cluster, name)]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.5)  # how far it is has been asked
    turns.release(100_000)
    assert future.result(30.0).tokens == greedy(PROMPTS[0], 60)
    assert not cluster.host.failed, busy


def is_slow(cluster: LocalCluster, worker: str) -> bool:
    return bool(cluster.run(lambda: cluster.workers[worker].node.core.watch.is_slow))


def test_tokens_that_the_model_lacks_are_refused_by_their_value(cluster: LocalCluster) -> None:
    failed = cluster.submit([1, 999], GREEDY).result(30.0).failed
    assert failed is not None
    assert failed.reason is Refusal.UNSUPPORTED
    assert "Token id 999 is out of vocabulary" in failed.detail


@pytest.mark.parametrize("killed", ["", "prefill-0", "decode-0"])
def test_prompts_are_computed_by_one_worker_and_decoded_by_another(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    vllm_stand_in.install(monkeypatch)
    monkeypatch.setattr(
        "tests.support.local.build_worker",
        lambda spec, options: build(spec, ROLES, options.make_agent),
    )
    sampling = replace(GREEDY, presence_penalty=0.5) if killed else GREEDY  # sampled there only
    with LocalCluster(
        model_dir, prefill=1, decode=2, engine=VLLM, host_bytes=1 << 20, router=HANDS_OVER
    ) as cluster:
        turns = vllm_stand_in.turns(4)
        futures = [cluster.submit(prompt, sampling) for prompt in PROMPTS]
        if killed:
            cluster.kill(killed)
        turns.release(100_000)
        answers = [future.result(60.0) for future in futures]
        assert [each.tokens for each in answers] == [greedy(prompt, 60) for prompt in PROMPTS]
        if not killed:
            done = [w.node.core.counters.get("handoffs_done", 0) for w in cluster.workers.values()]
            assert sum(done) == len(PROMPTS)
        assert_clean(cluster)


@pytest.mark.parametrize("who", ["another request", "client leaves", "for another worker"])
def test_damage_in_memory_reaches_no_request_and_not_what_vllm_caches(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    vllm_stand_in.install(monkeypatch)
    monkeypatch.setattr(
        "tests.support.local.build_worker",
        lambda spec, options: build(spec, ROLES, options.make_agent),
    )
    few, prompt = replace(GREEDY, max_tokens=3), PROMPTS[5]
    alike = [*prompt[:140], 9, 9]
    prefill = int(who == "for another worker")
    with LocalCluster(
        model_dir, prefill=prefill, decode=1, engine=VLLM, router=HANDS_OVER
    ) as cluster:
        cluster.generate([prompt], few)
        engine = LLMEngine.made[-1 if not prefill else 0]
        for name in list(engine.cached):
            engine._uncache(name)  # it has to be loaded again
        pool = engine.connectors[0]._copies.pool
        pool[np.flatnonzero(pool.any(axis=1)), 7] ^= 1
        turns = vllm_stand_in.turns(0)
        futures = [cluster.submit(prompt, few, request_id="leaves"), cluster.submit(alike, few)]
        if who == "client leaves":
            cluster.cancel("leaves")
        turns.release(100_000)
        assert futures[1].result(30.0).tokens == greedy(alike, 3)
        again = [cluster.submit(each, few).result(30.0) for each in (prompt, alike)]
        assert [each.tokens for each in again] == [greedy(prompt, 3), greedy(alike, 3)]
        nodes = [each.node for each in cluster.workers.values()]
        assert sum(node.core.counters.get("kv_blocks_damaged", 0) for node in nodes)
        pools = [each.connectors[0]._copies.pool for each in LLMEngine.made]
        # What only the client that left would have read may be there still: nobody has compared it.
        for node, memory in zip(nodes, pools, strict=True) if who != "client leaves" else ():
            share = BlockLayout(KVSpec(2, 2, 2, 32, "float32")).share(0, 1)
            kv = node.core.kv
            sealed = [kv.pool.lookup([name])[0] for name in kv.pool.block_hashes()]
            sums = checksum_blocks(memory, sealed, share)
            assert sums == [kv.checksums[block] for block in sealed]
        assert_clean(cluster)


# The node alone


def worker() -> VllmWorker:
    made = VllmWorker(CONFIG, ROLES)
    made.receive(0.0, RouterUp(ROUTER))
    return made


def step(*generated: Generated, **about: Any) -> Stepped:
    return Stepped(generated, elapsed_s=0.1, **about)


def sent(effects: list[Any], kind: type) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def test_a_step_is_one_frame_and_a_probe_is_answered_from_what_came() -> None:
    node = worker()
    node.receive(0.0, WORK)
    node.receive(0.0, replace(WORK, request_id="s", tokens=(4, 5), num_prompt_tokens=2))
    [frame] = sent(
        node.receive(1.0, step(Generated("r/1", (7, 8)), Generated("s/1", (9,)))), TokenDeltas
    )
    assert [(d.request_id, d.position, d.tokens) for d in frame.deltas] == [
        ("r", 3, (7, 8)),
        ("s", 2, (9,)),
    ]
    [again] = sent(node.receive(1.1, Probe("r", 1, ROUTER, 4)), TokenDeltas)
    assert (again.deltas[0].position, again.deltas[0].tokens) == (4, (8,))
    assert sent(node.receive(1.2, Probe("r", 2, ROUTER, 4)), Refused)[0].reason is Refusal.UNKNOWN
    assert node.receive(1.3, Abort("r", 1)) == [Stop("r/1")]
    assert node.receive(1.4, WORK) == []  # late, and repeated
    assert not sent(node.receive(1.5, step(Generated("r/1", (1,)))), TokenDeltas)


def test_a_block_that_is_there_before_its_tokens_waits_for_them() -> None:
    node = worker()
    node.receive(0.0, WORK)
    [seq] = node.core.seqs.values()
    checksums, block = node.core.kv.checksums, seq.block_ids[0]
    node.receive(0.1, Copied("r/1", 0, (11,)))
    assert block not in checksums
    assert not seq.num_sealed
    node.receive(0.2, step(Generated("r/1", (4,))))
    assert not seq.num_sealed, "its last token has no KV before another one follows"
    node.receive(0.3, step(Generated("r/1", (5,))))
    assert checksums[block] == 11
    assert seq.num_sealed == 1
    node.receive(0.3, Copied("gone/1", 0, (12,)))
    node.receive(0.4, Abort("r", 1))
    node.receive(0.5, Copied("r/1", 1, (13,)))
    assert 13 not in checksums.values()


def test_what_vllm_says_that_it_holds_is_announced_where_nothing_is_copied() -> None:
    node = VllmWorker(CONFIG, ROLES, copies=False)
    node.receive(0.0, RouterUp(ROUTER))
    [begin] = [each for each in node.receive(0.0, WORK) if isinstance(each, Begin)]
    assert begin.table == ()
    events = (Stored((7,), None, (1, 2, 3, 4), ""),)
    effects = node.receive(0.1, step(Generated("r/1", (4,)), events=events))
    [announced] = sent(effects, KVEvents)
    assert announced.stored == tuple(hash_blocks(b"f", UNSALTED, (1, 2, 3, 4), 4))


def test_what_no_vllm_copies_is_asked_for_in_vain_and_nothing_dies() -> None:
    node = VllmWorker(CONFIG, ROLES, copies=False)
    connected = node.receive(0.0, KVConnect("decode-1", CONFIG.fingerprint))
    [answer] = sent(connected, KVConnected)
    assert answer.fingerprint != CONFIG.fingerprint
    assert not answer.metadata
    for asked in (
        replace(WORK, prefill_from="prefill-0"),
        Prefill("p", GREEDY, 1, ROUTER, (1, 2, 3), 3, 30.0, decode_to="decode-1"),
    ):
        [refused] = sent(node.receive(0.0, asked), Refused)
        assert refused.reason is Refusal.WORKER_FAILED
        assert "hands no KV over" in refused.detail
    [begin] = [e for e in node.receive(0.0, replace(WORK, fetch_from="b")) if isinstance(e, Begin)]
    assert begin.tokens == WORK.tokens


def test_a_grammar_says_by_itself_when_it_may_end() -> None:
    work = replace(WORK, sampling=replace(GREEDY, grammar="start: /a/", min_tokens=9))
    [begin] = [each for each in worker().receive(0.0, work) if isinstance(each, Begin)]
    assert begin.options["min_tokens"] == 0


def test_settings_of_ours_have_the_names_of_vllm() -> None:
    engine = replace_section(kv_dtype="float8_e4m3", cuda_graphs=False)
    model = ModelSection(dtype="bfloat16", quantization="fp8")
    found = arguments(model, engine, Path("m"), on_gpu=False)
    assert (found["quantization"], found["kv_cache_dtype"]) == ("fp8", "fp8_e4m3")
    assert found["enforce_eager"]
    assert arguments(model, engine, Path("m"), on_gpu=True)["enforce_eager"]
    graphs = replace_section(cuda_graphs=True)
    assert arguments(model, graphs, Path("m"), on_gpu=False)["enforce_eager"]
    assert not arguments(model, graphs, Path("m"), on_gpu=True)["enforce_eager"]
    own = replace_section(arguments={"enforce_eager": False})
    assert not arguments(model, own, Path("m"), on_gpu=False)["enforce_eager"]


def test_output_that_comes_out_otherwise_is_refused_and_never_sent() -> None:
    node = worker()
    sampling = replace(WORK.sampling, grammar="start: /a+/", max_tokens=9)
    work = replace(WORK, tokens=(1, 2, 3, 50, 51), sampling=sampling, attempt=2)
    [begin] = [each for each in node.receive(0.0, work) if isinstance(each, Begin)]
    assert begin.tokens == (1, 2, 3)
    assert begin.options["max_tokens"] == 9
    assert begin.options["structured_outputs"] == {"grammar": "start: /a+/"}
    assert not sent(node.receive(0.1, step(Generated("r/2", (50,)))), TokenDeltas)
    effects = node.receive(0.2, step(Generated("r/2", (52,))))
    assert Stop("r/2") in effects
    [refused] = sent(effects, Refused)
    assert refused.reason is Refusal.EXECUTION
    assert "token 4 is 52, and was 51 elsewhere" in refused.detail
    assert not sent(effects, TokenDeltas)


@pytest.mark.parametrize(
    ("work", "reason", "said"),
    [
        (replace(WORK, tokens=(1,) * 64), Refusal.CONTEXT_LENGTH, "64 tokens leave no room"),
        (replace(WORK, num_prompt_tokens=80), Refusal.NEVER_FITS, ""),
        (
            replace(WORK, sampling=replace(GREEDY, pooling=Pooling.LAST)),
            Refusal.UNSUPPORTED,
            "runner = 'pooling' compute embeddings",
        ),
        (
            replace(WORK, sampling=replace(GREEDY, reasoning=ReasoningBudget(4, 2))),
            Refusal.UNSUPPORTED,
            "no budget for reasoning",
        ),
        (
            replace(WORK, sampling=replace(GREEDY, min_p=0.1)),
            Refusal.UNSUPPORTED,
            "no min_p beside its draft tokens",
        ),
        (
            replace(WORK, sampling=replace(GREEDY, logit_bias=((7, 1.0),))),
            Refusal.UNSUPPORTED,
            "no logit_bias beside its draft tokens",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_in_words(work: Any, reason: Refusal, said: str) -> None:
    config = replace_config(num_blocks=8) if reason is Refusal.NEVER_FITS else CONFIG
    node = VllmWorker(config, ROLES, edits=False, drafts=True)  # as on a GPU with a drafter
    [refused] = sent(node.receive(0.0, work), Refused)
    assert refused.reason is reason
    assert said in refused.detail


def replace_config(**changes: Any) -> WorkerConfig:
    return structs.replace(CONFIG, **changes)


def test_a_full_queue_and_what_vllm_refuses() -> None:
    node = worker()
    for number in range(4):
        node.receive(0.0, replace(WORK, request_id=f"r{number}"))
    [refused] = sent(node.receive(0.0, WORK), Refused)
    assert refused.reason is Refusal.QUEUE_FULL
    [refused] = sent(node.receive(0.0, NotBegun("r0/1", "no such thing")), Refused)
    assert refused.reason is Refusal.UNSUPPORTED
    assert "no such thing" in refused.detail


def ticks(node: VllmWorker, start: float, seconds: float) -> list[Any]:
    number = int(seconds / CONFIG.stats_interval_s)
    effects = (
        node.receive(start + i * CONFIG.stats_interval_s, Woken("tick")) for i in range(number)
    )
    return [each for effect in effects for each in effect]


def test_a_step_that_hangs_ends_the_worker_an_idle_one_lives() -> None:
    node = worker()
    assert not [e for e in ticks(node, 0.0, 60.0) if isinstance(e, Exit)]
    node.receive(60.0, WORK)
    assert not [e for e in ticks(node, 60.0, 9.0) if isinstance(e, Exit)]  # the first one compiles
    node.receive(69.0, step(Generated("r/1", (7,))))
    effects = ticks(node, 69.0, 3.0)
    [end] = [e for e in effects if isinstance(e, Exit)]
    assert end.hangs
    assert sent(effects, Refused)[0].reason is Refusal.WORKER_FAILED


def test_rates_are_of_prompts_and_of_decodes_apart() -> None:
    node = worker()
    node.receive(0.0, WORK)
    node.receive(0.2, step(num_running=1))  # a chunk
    node.receive(0.3, step(Generated("r/1", (7,), num_cached=1), num_running=1))
    node.receive(0.4, step(Generated("r/1", (7,)), num_running=1, used=0.25))
    stats = sent(node.receive(0.5, Woken("tick")), WorkerStats)[0]
    seconds = node.core.timing.prompt_cost.seconds(prompt_features(2, 0, 2))
    assert seconds == pytest.approx(0.2, rel=0.01)
    assert stats.prefill_tokens_per_s > 10 * 2 / 0.2, "long prompts are not as slow"
    assert stats.decode_step_s == pytest.approx(0.1)
    assert (stats.num_free_blocks, stats.num_running, stats.num_decoding) == (13, 1, 1)


def test_weights_without_versions_stay_and_who_asks_hears_why() -> None:
    asked = UpdateWeights("controller", WeightVersion("new", b"d"), UpdateMode.DRAIN)
    [said] = sent(worker().receive(0.0, asked), WeightsUpdated)
    assert (said.wanted, said.fingerprint) == (b"d", CONFIG.fingerprint)
    assert "no *.safetensors" in said.why


def test_its_process_finds_our_source_and_nothing_else_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    look = (
        "import sys, kvrelay.decode_worker.vllm.messages as m; print(m.__file__); print(sys.path)"
    )
    given = {"VIRTUAL_ENV": "/ours", "PYTHONPATH": "/ours/lib", "HOME": "/home"}
    words, env = in_environment(sys.executable, ["python", "-S", "-c", look], given)
    assert "VIRTUAL_ENV" not in env
    said = subprocess.run(
        words, env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith(str(tmp_path / "source"))
    assert "/ours" not in said
    ours = own_version()
    own_version.cache_clear()
    monkeypatch.setattr(channel, "version", Mock(side_effect=PackageNotFoundError))
    monkeypatch.setenv(channel.VERSION_VARIABLE, env[channel.VERSION_VARIABLE])
    assert own_version() == ours, "or the server would find its workers outdated, and restart them"
    own_version.cache_clear()
    assert in_environment(sys.executable, ["python"], given)[1] == env  # the link is there


def test_its_openmp_is_that_of_its_environment(tmp_path: Path) -> None:
    python, library = tmp_path / "bin" / "python", tmp_path / "lib" / "libiomp5.so"
    assert openmp_of(python) == {"OMP_WAIT_POLICY": "passive"}, "torch's: its threads do not spin"
    library.parent.mkdir()
    library.touch()
    assert openmp_of(python)["LD_PRELOAD"] == str(library)


def test_what_openmp_leaves_of_dead_processes_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}" for pid in (os.getpid(), ended.pid)]
    for name in (*names, "other"):
        (tmp_path / name).touch()
    monkeypatch.setattr(guardian, "SHARED_MEMORY", tmp_path)
    guardian.forget_openmp()
    assert {path.name for path in tmp_path.iterdir()} == {names[0], "other"}


def test_an_interpreter_that_is_not_there_is_named() -> None:
    spec = WorkerSpec(
        cluster="none",
        worker="decode-0",
        role=Role.DECODE,
        epoch=1,
        model_dir="",
        model=ModelSection(),
        engine=replace_section(python="/nowhere/bin/python"),
        tiers=TiersSection(),
    )
    answer = WorkerGuardian("decode-0").run(WorkerOrder(spec, Listening("", b"", 1 << 20)))
    assert isinstance(answer, StartFailed)
    assert answer.permanent
    assert answer.reason == "/nowhere/bin/python does not start: No such file or directory"


def replace_section(**changes: Any) -> EngineSection:
    return structs.replace(VLLM, **changes)


# Names of blocks

SCOPES = [UNSALTED, CacheScope(b"tenant"), CacheScope(b"tenant", 8), CacheScope(b"tenant", 3)]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("cut", [1, 2, 5])
def test_blocks_have_the_names_that_routers_look_for(scope: CacheScope, cut: int) -> None:
    tokens = tuple(range(22))
    held = HeldBlocks(b"f", 4)
    held.take([Stored(tuple(range(cut)), None, tokens[: 4 * cut], salt_of(scope))])
    if cut < 5:
        held.take([Stored(tuple(range(cut, 5)), cut - 1, tokens[4 * cut : 20], "")])
    names = tuple(hash_blocks(b"f", scope, tokens, 4))
    assert held.take_changes() == (names, ())
    held.take([Removed((4, 2)), Removed((99,))])
    assert held.take_changes() == ((), (names[4], names[2]))
    held.take([Stored((2, 4), 1, (*tokens[8:12], *tokens[16:20]), ""), Cleared()])
    assert held.take_changes()[0] == ()
    assert not held.block_hashes()


def test_a_public_block_of_two_tenants_is_held_until_both_are_gone() -> None:
    held = HeldBlocks(b"f", 4)
    for number, salt in enumerate((b"a", b"b")):
        held.take([Stored((number,), None, (1, 2, 3, 4), salt_of(CacheScope(salt, 4)))])
    [name], _ = held.take_changes()
    held.take([Removed((0,))])
    assert held.is_cached(name)
    held.take([Removed((1,))])
    assert held.take_changes() == ((), (name,))


def test_a_block_after_an_unknown_one_has_no_name() -> None:
    held = HeldBlocks(b"f", 4)
    held.take([Stored((2,), 1, (1, 2, 3, 4), "")])
    assert (len(held), held.num_unknown) == (0, 1)


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ("start: /a/", {"grammar": "start: /a/"}),
        ('{"grammars": [{"lark_grammar": "start: /a/"}]}', {"grammar": "start: /a/"}),
        (grammar_of("regex", "a+", {}), {"grammar": "start: /a+/"}),
        ('{"grammars": [{"json_schema": {"type": "null"}}]}', {"json": '{"type": "null"}'}),
        ('{"grammars": [{"lark_grammar": "start: @a"}, {"name": "a"}]}', {}),
        (
            '{"grammars": [{"lark_grammar": "start: @a"}, {"name": "a", "json_schema": {}}]}',
            {"grammar": "start: %json {}"},
        ),
        ("{", {}),
    ],
)
def test_a_grammar_has_the_form_that_vllm_takes(grammar: str, expected: Any) -> None:
    assert structure(grammar) == expected


@pytest.mark.parametrize(
    ("given", "gpu", "sized"), [(16, False, 32), (33, False, 64), (16, True, 16)]
)
def test_blocks_have_a_size_that_vllm_has_attention_for(given: int, gpu: bool, sized: int) -> None:
    assert EngineSection(runs="vllm", block_size=given).sized(gpu=gpu).block_size == sized
    assert EngineSection(block_size=given).sized(gpu=gpu).block_size == given


def test_its_steps_on_cpus_are_as_long_as_those_of_its_own_server() -> None:
    of_vllm = EngineSection(runs="vllm")
    assert of_vllm.sized(gpu=False).max_num_batched_tokens == 2048
    set_so = EngineSection(runs="vllm", max_num_batched_tokens=64)
    assert set_so.sized(gpu=False).max_num_batched_tokens == 64
    assert EngineSection().sized(gpu=False).max_num_batched_tokens == 512
