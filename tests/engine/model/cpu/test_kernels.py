"""Each CPU kernel against torch, on shapes with every kind of edge."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.model.config import ModelConfig, Rope
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.cpu.kernels import KernelsUnavailable
from kvrelay.engine.model.cpu.step import CpuStep
from tests.engine.model.tiny import Driver, make_ops, tokens_of


def config_of(heads=4, kv_heads=2, head_dim=16, qk_norm=False, hidden=48) -> ModelConfig:
    sizes = {"num_layers": 2, "hidden_size": hidden, "intermediate_size": 96, "vocab_size": 50}
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        ropes=(Rope(10000.0, head_dim),),
        tie_word_embeddings=False,
        attention_bias=False,
        output_bias=False,
        qk_norm=qk_norm,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_ids=(),
        **sizes,
    )


def test_norm_and_activation_equal_torch_over_their_whole_range():
    torch.manual_seed(0)
    config = config_of()
    ours, theirs = make_ops("cpu", config), make_ops("torch", config)
    for width in (16, 50, 576):
        x, weight = torch.randn(300, width) * 3, torch.randn(width)
        torch.testing.assert_close(
            ours.rms_norm(x, weight), theirs.rms_norm(x, weight), rtol=1e-5, atol=1e-6
        )
        wide = torch.randn(2 * width, 1) * torch.logspace(-3, 2, 2 * width)[:, None]
        both = [ops.gated(torch.ones(30, 1), ops.gated_matrix(wide, "x")) for ops in (ours, theirs)]
        torch.testing.assert_close(*both, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_kernels_work_in_a_forked_child_and_from_several_threads():
    """A child of fork has no helper threads, and two callers must not share a job."""
    script = """
import os, threading, torch
from tests.engine.model.cpu.test_kernels import config_of
from tests.engine.model.tiny import make_ops
torch.set_num_threads(1)  # torch's own OpenMP pool does not survive a fork
torch.manual_seed(0)
weight, x = torch.randn(512, 256), torch.randn(64, 256)
expected = x @ weight.t()
def check(times):
    ops = make_ops("cpu", config_of())
    matrix = ops.matrix(weight, None, "test")
    for _ in range(times):
        assert torch.allclose(ops.linear(x, matrix), expected, atol=1e-3)
check(5)
pid = os.fork()
if pid == 0:
    try:
        check(5)
        os._exit(0)
    finally:
        os._exit(1)
assert os.waitpid(pid, 0)[1] == 0, "child"
failed = []
threading.excepthook = lambda args: failed.append(args)
threads = [threading.Thread(target=check, args=(200,)) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not failed, failed
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_of_two_that_start_together_one_compiles(tmp_path, monkeypatch):
    """With a compiler that counts its calls, and whose library is the one that is there already."""
    ready = kernels.load(default_cache_dir()).library._name
    calls, compiler = tmp_path / "calls", tmp_path / "cc"
    compiler.write_text(
        f"#!/bin/sh\necho >> {calls}\nsleep 0.05\n"
        f'[ "$1" = --counted ] || exit 3\nwhile [ "$1" != -o ]; do shift; done\ncp {ready} "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", f"{compiler} --counted")
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(kernels.load, [tmp_path] * 2))
    assert both[0].library._name == both[1].library._name != ready
    assert (
        len(calls.read_text().splitlines()) == len(list(kernels.FOLDER.rglob("*.c"))) + 1
    )  # each, and the link


def test_shapes_that_the_kernels_do_not_know_are_refused():
    with pytest.raises(KernelsUnavailable, match="head_dim 12 "):
        make_ops("cpu", config_of(head_dim=12))


def test_tanh_gelu_equals_torch_over_its_whole_range():
    ops = make_ops("cpu", replace(config_of(), activation="gelu_tanh"))
    gate = torch.cat((torch.linspace(-30, 30, 999), torch.logspace(-6, -1, 26)))
    up = torch.randn(1025)
    matrix = ops.gated_matrix(torch.cat((gate, up))[:, None], "x")
    got = ops.gated(torch.ones(7, 1), matrix)
    expected = (torch.nn.functional.gelu(gate, approximate="tanh") * up).expand(7, -1)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "linear", "gemma2"])
def test_all_layers_at_once_give_what_they_give_one_by_one(family, checkpoint_of, monkeypatch):
    """Bit for bit; with and without biases, norms of heads, and norms behind attention and MLP;
    after all of a step's tokens, some of them, and none."""
    together, alone = (Driver(checkpoint_of(family), "cpu") for _ in range(2))
    ran = []
    at_once = CpuStep.run

    def run(self, hidden, layers, batch):
        ran.append(at_once(self, hidden, layers, batch))
        return ran[-1]

    steps = [((("a", tokens_of(150, 1)), ("b", [5]), ("c", tokens_of(9, 2))), ("b",))]
    steps += [((("a", [7]), ("b", [9])), ()), ((("a", [8]), ("b", tokens_of(40, 3))), ("a", "b"))]
    steps += [((("a", [6]), ("b", [4])), ("a",)), ((("a", [1]), ("b", [2]), ("c", [3])), ())]
    for fed, mute in steps:
        monkeypatch.setattr(CpuStep, "run", run)
        got = together.feed(*fed, mute=mute)
        monkeypatch.setattr(CpuStep, "run", lambda *_: None)
        assert torch.equal(got, alone.feed(*fed, mute=mute))
    assert [len(sampled) for sampled in ran] == [2, 2, 0, 1, 3]
