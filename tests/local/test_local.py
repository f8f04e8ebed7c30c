"""The local cluster: real nodes over a real (tiny, random) model, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from kvrelay.engine.config import EngineSection
from kvrelay.engine.request import FinishReason, Refusal, SamplingParams
from kvrelay.kvtransfer.agent import CopyBlocks
from kvrelay.router.config import RouterConfig
from kvrelay.router.messages import WorkerUp
from tests.support.local import LocalCluster

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, LAYERS = 64, 4, 2, 16, 128, 256, 2
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
REMOTE = RouterConfig(policy="round_robin")  # hands every prompt over, however short
PROMPTS = [[(7 * i + j) % VOCAB for j in range(length)] for i, length in enumerate((1, 40, 150))]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> NDArray[np.float32]:
        return random.normal(0, 0.3, shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{layer}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    save_file(tensors, path / "model.safetensors")
    return path


def small(**changes: Any) -> EngineSection:
    return EngineSection(**{"num_blocks": 128, **changes})


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    with LocalCluster(model_dir, prefill=0, engine=small()) as cluster:
        answers = cluster.generate(PROMPTS, GREEDY)
        cluster.wait_idle()
    assert [a.finish for a in answers] == [FinishReason.LENGTH] * 3
    assert len({tuple(a.tokens) for a in answers}) == 3
    return [a.tokens for a in answers]


@pytest.mark.parametrize("engine", [small(), small(max_num_batched_tokens=32, block_size=8)])
def test_two_pools_answer_as_one(
    model_dir: Path, expected: list[list[int]], engine: EngineSection
) -> None:
    with LocalCluster(model_dir, engine=engine, router=REMOTE) as cluster:
        answers = cluster.generate(PROMPTS, GREEDY)
        again = cluster.generate(PROMPTS, GREEDY)
        cluster.wait_idle()
        totals = cluster.status().totals
    assert [a.tokens for a in answers] == expected
    assert [a.tokens for a in again] == expected
    assert again[2].num_cached_tokens > 0
    assert totals.handoffs == 6
    assert not totals.retries


def test_bytes_that_were_corrupted_on_the_way_are_computed_again(
    model_dir: Path, expected: list[list[int]]
) -> None:
    corrupted: list[CopyBlocks] = []

    def corrupt(read: CopyBlocks, pool: NDArray[np.uint8]) -> None:
        if not corrupted:
            pool[read.dst[0], 5] ^= 0xFF
            corrupted.append(read)

    with LocalCluster(model_dir, engine=small(), router=REMOTE, corrupt=corrupt) as cluster:
        answers = cluster.generate(PROMPTS, GREEDY)
        cluster.wait_idle()
    assert corrupted
    assert [a.tokens for a in answers] == expected


def test_a_client_that_goes_leaves_nothing_behind(model_dir: Path) -> None:
    with LocalCluster(model_dir, engine=small(), router=REMOTE) as cluster:
        long = SamplingParams(max_tokens=400, temperature=0.0)
        futures = [cluster.submit(PROMPTS[2], long, request_id=f"r{i}") for i in range(6)]
        for i in range(6):
            cluster.cancel(f"r{i}")
        cluster.wait_idle()
        assert not any(future.done() for future in futures)


def test_a_request_that_never_fits_is_refused_with_the_sizes(model_dir: Path) -> None:
    # Left to itself the context is cut to what the pool holds; a context set by hand may not fit.
    engine = small(num_blocks=4, max_model_len=512)
    with LocalCluster(model_dir, prefill=0, engine=engine) as cluster:
        (answer,) = cluster.generate([PROMPTS[2]], GREEDY)
        cluster.wait_idle()
    assert answer.failed is not None
    assert answer.failed.reason is Refusal.NEVER_FITS
    assert "4" in answer.failed.detail


def test_a_node_that_fails_fails_those_who_wait(model_dir: Path) -> None:
    with LocalCluster(model_dir, prefill=0, engine=small()) as cluster:
        future = cluster.submit(PROMPTS[0], SamplingParams(max_tokens=500, temperature=0.0))
        broken: Any = "no info"
        cluster.run(lambda: cluster.host.deliver("router-0", WorkerUp(broken)))
        with pytest.raises(RuntimeError, match="router-0 failed"):
            future.result(10)
        with pytest.raises(AttributeError):
            cluster.check()
