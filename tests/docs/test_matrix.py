"""The matrix is what happens: each "no" is asked for, and is refused, or told, with its reason."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvrelay.cluster.config import Config, ConfigError, ModelEntry, build_config, check_added
from kvrelay.cluster.orders import ChangeModels
from kvrelay.cluster.prepare import prepare_model
from kvrelay.cluster.processes.adapter_bases import adapter_base
from kvrelay.cluster.processes.router_process import RouterProcess
from kvrelay.cluster.roles import ROLES
from kvrelay.decode_worker.messages import Decode
from kvrelay.decode_worker.vllm.build import build as build_vllm
from kvrelay.decode_worker.vllm.form import Form
from kvrelay.decode_worker.vllm.node import VllmWorker
from kvrelay.decode_worker.vllm.parameters import unsupported
from kvrelay.engine.adapters import AdapterError
from kvrelay.engine.config import EngineSection, ModelSection, TiersSection
from kvrelay.engine.images import Image, Images
from kvrelay.engine.messages import Refused
from kvrelay.engine.model.checkpoint.adapter import AdapterLoader
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.versions import Versions
from kvrelay.engine.needs import Need
from kvrelay.engine.node import Send
from kvrelay.engine.request import Pooling, ReasoningBudget, SamplingParams
from kvrelay.engine.stats import Role
from kvrelay.engine.step import Step
from kvrelay.engine.support import (
    DRAFTERS,
    RULES,
    Capability,
    How,
    No,
    Trait,
    engine_traits,
    model_traits,
    notices_of,
    refusal_of,
)
from kvrelay.engine.weights import LoadWeights, UpdateMode, UpdateWeights, WeightVersion
from kvrelay.kvtransfer.agent import AgentError
from kvrelay.worker.build import build
from kvrelay.worker.kv_plan import BuildError
from kvrelay.worker.node import Worker
from kvrelay.worker.spec import BuildOptions, WorkerSpec
from tests.docs.matrix import PAGE, PLACES, README, TESTED, cell, with_counts, with_matrix
from tests.engine.configs import worker_config
from tests.engine.model.heads import make_head
from tests.engine.model.runners import model_runner
from tests.engine.model.talks import Talk
from tests.engine.model.test_runner import generate
from tests.engine.model.tiny import tokens_of
from tests.kvtransfer.fake_agent import FakeAgent
from tests.structure import ROOT
from tests.support import vllm_stand_in

C, T = Capability, Trait
Make = Callable[..., Path]  # a tiny checkpoint of a family
FAMILY = {T.STATES: "qwen3.5", T.LAYERWISE: "minimax-m2", T.ONLY_WINDOWS: "mistral-window"}
FAMILY |= {T.LATENT: "deepseek3", T.SPARSE: "deepseek32", T.UNEVEN_KV: "gemma4"}
NO_TIERS = TiersSection(host_gib=0.0)
VERSION = WeightVersion("new", b"d", "/nowhere")
ERRORS = (ConfigError, BuildError, ModelError, AdapterError, AgentError)
VLLM: dict[str, Any] = {"runs": "vllm", "python": sys.executable, "block_size": 32}
CONTEXT = {"arguments": {"decode_context_parallel_size": 2}}
RULE_LIST = [(capability, no) for capability, rules in RULES.items() for no in rules]


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(ERRORS) as caught:
        call()
    return str(caught.value)


def config_of(engine: dict[str, Any], prefill: int = 0, **sections: Any) -> Config:
    return build_config({"engine": engine, "cluster": {"prefill": prefill}, **sections}, "")


def prepared(path: Path, *, on_gpu: bool = False, prefill: int = 0, **engine: Any) -> object:
    usual = {"num_blocks": 64}
    config = config_of(usual | engine, prefill, model={"name": str(path), "dtype": "bfloat16"})
    return prepare_model(config, 0, lambda _: None, on_gpu=on_gpu)


def spec_of(path: Path, **engine: Any) -> WorkerSpec:
    model = ModelSection(name=str(path), device="cpu", dtype="float32")
    section = EngineSection(**{"num_blocks": 64, "threads": 1} | engine)
    # All that there is below the device; a share of nothing, so that nothing is opened.
    tiers = TiersSection(disk_gib=1.0, disk_codec="lossless", object_bucket="b", packed_gib=1.0)
    return WorkerSpec("none", "decode-0", Role.DECODE, 1, str(path), model, section, tiers)


def notices_of_ours(path: Path, tiers: TiersSection = NO_TIERS, **engine: Any) -> str:
    """Those of a worker that was built, and proposes no drafts, or keeps nothing in four bits."""
    configs: list[Any] = []
    spec = replace(spec_of(path, **engine), tiers=tiers, num_sharing=1)
    make: Any = lambda config, records: configs.append(config)  # noqa: E731
    built = build(spec, make, BuildOptions(cast(Any, FakeAgent)))
    [config] = configs
    assert (config.num_packed_blocks if tiers.packed_gib else config.num_speculative_tokens) == 0
    return "\n".join(built.notices)


def notices_of_vllm(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, others: bool = False, **engine: Any
) -> str:
    vllm_stand_in.install(monkeypatch)
    if others:
        keep_others(monkeypatch)
    vllm_stand_in.EventPublisherFactory.registered.clear()
    built = build_vllm(spec_of(path, max_model_len=128, **VLLM | engine), ROLES)
    return "\n".join(built.notices)


def of_adapters(no: No, make: Make, _: Any) -> str:
    if T.VLLM in no.where:
        return adapter_base(config_of(VLLM), Path()).refuses()
    none = cast(Any, None)
    loader = AdapterLoader(Path(), none, none, none, 1, torch.device("cuda"))
    return error_of(lambda: loader(Need(b"", "", "adapter")))


def of_ngrams(no: No, make: Make, monkeypatch: pytest.MonkeyPatch) -> str:
    if T.VLLM in no.where:
        return notices_of_vllm(make("llama"), monkeypatch, tensor_parallel_size=2)
    if T.GPU in no.where:  # that no draft is looked at: gpu/test_triton_recurrent.py
        return "\n".join(notices_of([C.NGRAM_DRAFTS], no.where))
    if T.TORCH in no.where:
        monkeypatch.setattr(kernels, "load", unavailable)
    path = make("llama")
    options: dict[str, Any] = {"num_blocks": 8, "dtype": "float32", "threads": 1}
    runner: Any = model_runner(path, **options)
    prompt, blocks = tokens_of(5, seed=1), [*range(runner.kv_spec.num_groups)]
    expected: list[int] = cast(Any, generate)(runner, prompt, blocks, 3, temperature=0.0)
    talk = Talk(prompt, blocks)
    for draft in (expected[:0], expected[1:2]):  # which is right, and not looked at
        share = talk.next(draft=draft)
        [sampled] = runner.execute(Step(0, [share])).sampled
        assert not sampled.more
        talk.take(share, sampled)
    assert talk.output == expected[:2]
    return notices_of_ours(path)


def unavailable(*_: Any) -> Any:
    raise kernels.KernelsUnavailable("no compiler")


def of_drafters(
    capability: Capability, no: No, make: Make, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> str:
    make_head(folder, "own")
    name = {C.MODEL_DRAFTS: str(make("llama")), C.MTP_DRAFTS: "mtp"}.get(capability, str(folder))
    if T.VLLM in no.where:
        return error_of(lambda: config_of({**VLLM, "drafter": name}))
    if T.TORCH in no.where:
        monkeypatch.setattr(kernels, "load", unavailable)
        model = {} if capability is not C.MTP_DRAFTS else {"num_nextn_predict_layers": 1}
        path = make("deepseek3", **model) if model else make("llama")
        monkeypatch.setattr("kvrelay.engine.model.runner.open_drafter", lambda *_: Captures())
        return notices_of_ours(path, drafter=name)
    family = next((FAMILY[each] for each in no.where if each in FAMILY), "llama")
    ranks = 2 if T.RANKS in no.where else 1
    settings: dict[str, Any] = {"drafter": name, "tensor_parallel_size": ranks}
    return error_of(lambda: prepared(make(family), on_gpu=T.GPU in no.where, **settings))


class Captures:
    captured = ()


def of_requests(capability: Capability, no: No) -> str:
    asked = {
        C.EMBEDDINGS: SamplingParams(pooling=Pooling.MEAN),
        C.REASONING_BUDGET: SamplingParams(reasoning=ReasoningBudget(4, 2)),
        C.GRAMMARS: SamplingParams(grammar='{"grammars": [{}, {}]}'),
    }
    params = asked.get(capability, SamplingParams())
    pools = "last" if T.POOLING in no.where else ""
    return unsupported(params, edits=T.GPU not in no.where, pools=pools)


def of_images(no: No, make: Make) -> str:
    asked = {"drafter": "d" if T.DRAFTER in no.where else ""}
    engine = EngineSection(tensor_parallel_size=1 + (T.RANKS in no.where), **asked)
    traits = engine_traits(engine, on_gpu=T.GPU in no.where)
    if T.OTHER_VISION in no.where:
        traits |= model_traits(read_config(make("llama")))
    config = worker_config(num_blocks=8, no_images=refusal_of(C.IMAGES, traits))
    given = Images((1,), (Image.of(b"one"),))
    work = Decode("r", SamplingParams(), 1, "router", (1, 2), 2, 30.0, images=given)
    effects = Worker(config, ROLES).receive(0.0, work)
    sent = [each.message for each in effects if isinstance(each, Send)]
    [refused] = [each for each in sent if isinstance(each, Refused)]
    return refused.detail


def keep_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM says of all models that their layers keep what no block of tokens has."""
    form = Form("0.32.0", max_model_len=512, why_not="layers keep cross_attention")
    monkeypatch.setattr("kvrelay.decode_worker.vllm.form.ask", lambda *_: form)


def of_handing_over(no: No, make: Make, monkeypatch: pytest.MonkeyPatch) -> str:
    if T.CONTEXT_PARALLEL in no.where:
        return error_of(lambda: config_of({**VLLM, **CONTEXT}, prefill=1))
    vllm_stand_in.install(monkeypatch)
    path = make(FAMILY[T.STATES] if T.STATES in no.where else "llama")
    if T.OTHER_KV in no.where:
        keep_others(monkeypatch)
    return error_of(lambda: prepared(path, prefill=1, **VLLM))


def of_scaling(no: No, make: Make, monkeypatch: pytest.MonkeyPatch) -> str:
    scaling = {"enabled": True}
    if T.CONTEXT_PARALLEL in no.where:
        return error_of(lambda: config_of({**VLLM, **CONTEXT}, scaling=scaling))
    path = make(FAMILY[T.STATES] if T.STATES in no.where else "llama")
    vllm_stand_in.install(monkeypatch)
    if T.OTHER_KV in no.where:
        keep_others(monkeypatch)
    model = {"name": str(path), "dtype": "bfloat16"}
    config = config_of({"num_blocks": 64, **VLLM}, model=model, scaling=scaling)
    return error_of(lambda: prepare_model(config, 0, lambda _: None, on_gpu=False))


def of_tiers(capability: Capability, no: No, make: Make, monkeypatch: pytest.MonkeyPatch) -> str:
    if T.VLLM not in no.where:
        family = next((FAMILY[each] for each in no.where if each in FAMILY), "llama")
        own: dict[str, Any] = {"kv_dtype": "float8_e4m3"} if T.FP8_KV in no.where else {}
        tiers = TiersSection(host_gib=0.01, packed_gib=0.01)
        return notices_of_ours(make(family), tiers, **own)
    path = make(FAMILY[T.STATES] if T.STATES in no.where else "llama")
    apart = CONTEXT if T.CONTEXT_PARALLEL in no.where else {}
    told = notices_of_vllm(path, monkeypatch, others=T.OTHER_KV in no.where, **apart)
    [line] = [each for each in told.splitlines() if capability in each]
    return line


def of_quest(no: No, make: Make, monkeypatch: pytest.MonkeyPatch) -> str:
    asked: dict[str, Any] = {"quest_budget": 0.25, "num_speculative_tokens": 0}
    if T.VLLM in no.where:
        return error_of(lambda: config_of(VLLM | asked))
    if T.GPU in no.where:
        return error_of(lambda: prepared(make("llama"), on_gpu=True, **asked))
    if T.RANKS in no.where:
        return error_of(lambda: prepared(make("llama"), tensor_parallel_size=2, **asked))
    if T.TORCH in no.where:
        monkeypatch.setattr(kernels, "load", unavailable)
    if T.FP8_KV in no.where:
        asked["kv_dtype"] = "float8_e4m3"
    family = next((FAMILY[each] for each in no.where if each in FAMILY), "llama")
    return notices_of_ours(make(family), **asked)


def of_weights(no: No) -> str:
    if T.GPU in no.where:
        runner = cast(Any, SimpleNamespace(traits=frozenset({T.GPU})))
        return Versions(runner).change(LoadWeights(VERSION)).why
    config = worker_config(
        num_blocks=8, block_size=4, has_states=T.STATES in no.where, base_weights=b"base"
    )
    node = VllmWorker(config, ROLES) if T.VLLM in no.where else Worker(config, ROLES)
    [answer] = node.receive(0.0, UpdateWeights("controller", VERSION, UpdateMode.KEEP))
    return str(cast(Any, answer).message.why)


def of_model_changes(no: No) -> str:
    if T.VLLM in no.where:
        return error_of(lambda: check_added(ModelEntry("new", "x", engine={"python": "p"})))
    cluster = {"name": "c", "token": 16 * "t"}
    config = build_config({"cluster": cluster, "state": {"url": "redis://r:1"}}, "")
    router = cast(Any, SimpleNamespace(config=config))
    change = ChangeModels("new", ModelEntry("new", "x"))
    return error_of(lambda: RouterProcess._check_change(router, change))


def said(
    capability: Capability, no: No, make: Make, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> str:
    """Asks for the capability where it is not supported, and returns the error or notice."""
    found = "kvrelay.cluster.prepare.resolve_model"
    monkeypatch.setattr(found, lambda name, *_, **__: Path(name))  # which would want a tokenizer
    if capability in DRAFTERS:
        return of_drafters(capability, no, make, monkeypatch, folder)
    if T.POOLING in no.where:
        return of_requests(capability, no)
    match capability:
        case C.ADAPTERS:
            return of_adapters(no, make, monkeypatch)
        case C.NGRAM_DRAFTS:
            return of_ngrams(no, make, monkeypatch)
        case C.IMAGES:
            return of_images(no, make)
        case C.GRAMMARS | C.REASONING_BUDGET | C.EMBEDDINGS:
            return of_requests(capability, no)
        case C.HAND_OVER:
            return of_handing_over(no, make, monkeypatch)
        case C.QUEST:
            return of_quest(no, make, monkeypatch)
        case C.SCALING:
            return of_scaling(no, make, monkeypatch)
        case C.WEIGHT_UPDATES:
            return of_weights(no)
        case C.MODEL_CHANGES:
            return of_model_changes(no)
        case _:
            return of_tiers(capability, no, make, monkeypatch)


def name_of(value: object) -> str:
    return "+".join(sorted(value.where)) if isinstance(value, No) else str(value)


SLOW = {(C.NGRAM_DRAFTS, frozenset({T.CPU, T.RANKS}))}  # processes


@pytest.mark.parametrize(
    ("capability", "no"),
    [
        pytest.param(*rule, marks=[pytest.mark.slow] * ((rule[0], rule[1].where) in SLOW))
        for rule in RULE_LIST
    ],
    ids=name_of,
)
def test_each_no_is_said_with_its_reason(
    capability: Capability,
    no: No,
    checkpoint_of: Make,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    told = said(capability, no, checkpoint_of, monkeypatch, tmp_path)
    assert no.text in told
    if no.how is How.WITHOUT and "serving without" in told:
        assert capability in told


def test_a_rule_is_never_hidden_by_one_before_it() -> None:
    for rules in RULES.values():
        for index, no in enumerate(rules):
            assert not any(before.where <= no.where for before in rules[:index]), no


def test_tests_that_are_named_exist_and_nothing_that_is_refused_has_one() -> None:
    assert set(TESTED) == set(Capability)
    for capability, named in TESTED.items():
        for place, test in named.items():
            assert cell(capability, place) == "yes", (capability, place)
            file, _, name = test.partition("::")
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"def {name}\(", text), test


def test_every_trait_is_in_a_column() -> None:
    assert set(Trait) == set[Trait]().union(*PLACES.values())


def test_the_pages_are_up_to_date() -> None:
    """If this fails: `python -m tests.docs.matrix`."""
    page, readme = PAGE.read_text(encoding="utf-8"), README.read_text(encoding="utf-8")
    assert with_matrix(page) == page
    assert with_counts(readme) == readme
    assert " cells work" in readme
