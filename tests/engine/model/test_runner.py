"""The executor: steps in, tokens out; what is refused; what an operator is told."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import Refusal, SamplingParams
from kvrelay.engine.step import Step
from tests.engine.model.runners import model_runner
from tests.engine.model.tiny import VOCAB, make_checkpoint, scheduled, tokens_of

PROMPT = tokens_of(40, seed=9)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    return path, make_checkpoint("llama", path)


@pytest.fixture(scope="module")
def runner(checkpoint):
    return model_runner(checkpoint[0], num_blocks=24, dtype="float32", threads=2)


@pytest.mark.parametrize(
    ("kind", "flag", "dtype"),
    [
        (6, False, "bfloat16"),
        (0, True, "float32"),
        (None, True, "bfloat16"),
        (None, False, "float32"),
    ],
)
def test_auto_is_what_the_kernels_multiply_quickest_or_the_cpu_without_them(
    monkeypatch, kind, flag, dtype
):
    def load(_):
        if kind is None:
            raise kernels.KernelsUnavailable("no compiler")

    monkeypatch.setattr(kernels, "load", load)
    monkeypatch.setattr("kvrelay.engine.model.device.fastest_kind", lambda _: kind)
    monkeypatch.setattr("kvrelay.engine.model.device.cpu_has_bf16", lambda: flag)
    assert ModelRunner.default_dtype() == dtype


def generate(runner, prompt, blocks, count, **params):
    sampling = SamplingParams(**params)
    context, feed, start, out = list(prompt), list(prompt), 0, []
    for number in range(count):
        seq = scheduled(
            feed,
            start,
            blocks,
            context=context,
            num_prompt_tokens=len(prompt),
            sampling=sampling,
        )
        done = runner.execute(Step(number, [seq]))
        assert done.step_id == number
        out.append(done.sampled[0].token)
        start, feed, context = len(context), [out[-1]], [*context, out[-1]]
    return out


def test_greedy_tokens_are_those_of_transformers(checkpoint, runner):
    with torch.inference_mode():
        expected = checkpoint[1].generate(
            torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=VOCAB + 1
        )
    assert generate(runner, PROMPT, [9, 4, 17, 2], 20, temperature=0.0) == expected[0, 40:].tolist()


def test_a_continuation_elsewhere_is_the_one_that_would_have_come(checkpoint, runner):
    params = {"temperature": 1.0, "seed": 11, "top_p": 0.9}
    whole = generate(runner, PROMPT, [1, 2, 3, 4], 12, **params)
    other = model_runner(checkpoint[0], num_blocks=8, dtype="float32", threads=1)
    assert generate(other, PROMPT + whole[:5], [5, 0, 7, 6], 7, **params) == whole[5:]


def fed(runner, tokens, blocks, chunks):
    start = 0
    for number, count in enumerate((*chunks, len(tokens))):
        part = tokens[start : start + count]
        seq = scheduled(part, start, blocks, context=tokens, num_prompt_tokens=len(tokens))
        runner.execute(Step(number, [seq]))
        start += len(part)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "mistral-window", "gemma3", "qwen3-moe", "deepseek2-groups", "deepseek3"),
        *("minimax-m2", "mistral4", "gemma4", "gemma4-inputs"),
    ],
)
def test_kv_that_is_computed_again_is_the_same_bit_for_bit(family, dtype, checkpoint_of):
    """Alone token by token, with its prompt in any chunks, by any number of threads."""
    groups = len(read_config(checkpoint_of(family)).kv_groups())
    num_blocks, whole = 12 * groups, 4 * groups
    runner = model_runner(checkpoint_of(family), num_blocks=num_blocks, dtype=dtype, threads=2)
    first, second = list(range(5 * groups)), list(range(5 * groups, 10 * groups))
    generated = generate(runner, PROMPT, first, 33, temperature=1.0, seed=5)
    tokens = PROMPT + generated[:-1]
    expected = runner.kv_pool[:whole].clone()
    assert len(tokens) >= 4 * runner.kv_spec.block_size
    for chunks in ((), (1, 50), (41, 9, 2, 1)):
        runner.kv_pool[second[0] :].zero_()
        fed(runner, tokens, second, chunks)
        assert torch.equal(runner.kv_pool[second[:whole]], expected), chunks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_many_tokens_at_once_leave_the_kv_that_few_at_a_time_do(family, dtype, checkpoint_of):
    """Many rows are cut into bands: more than there are threads, fewer, uneven ones."""
    path = checkpoint_of(family)
    groups = len(read_config(path).kv_groups())
    tokens, blocks, whole = tokens_of(411, seed=8), list(range(26 * groups)), 25 * groups
    expected = None
    for threads, chunks in ((1, [25] * 17), (1, []), (2, []), (3, []), (2, [130])):
        runner = model_runner(path, num_blocks=len(blocks), dtype=dtype, threads=threads)
        fed(runner, tokens, blocks, chunks)
        if expected is None:
            expected = runner.kv_pool[:whole].clone()
        assert torch.equal(runner.kv_pool[:whole], expected), (threads, chunks)


def test_only_what_was_asked_for_is_sampled(runner):
    parts = [
        scheduled(PROMPT[:10], 0, [3], sample=False),
        scheduled(PROMPT[:12], 0, [4], sample=True),
    ]
    done = runner.execute(Step(5, parts))
    assert done.sampled[0] is None
    assert done.sampled[1] is not None
    assert done.elapsed_s > 0
    passed = runner.num_passed()
    assert runner.execute(Step(6, [parts[0]])).sampled == [None]
    assert runner.num_passed() > passed, "a step that is slow is seen to go on"
    assert runner.execute(Step(7, [])).sampled == []


def test_kv_lands_only_in_the_blocks_of_the_table(runner):
    runner.kv_pool.zero_()
    runner.execute(Step(0, [scheduled(PROMPT[:20], 0, [11, 6])]))
    written = runner.kv_pool.flatten(1).abs().sum(1).nonzero().flatten().tolist()
    assert written == [6, 11]
    assert runner.kv_pool[11].abs().min() > 0
    assert runner.kv_pool[6, :, :, :, 4:].abs().max() == 0
    assert runner.kv_pool.shape == (24, 3, 2, 2, 16, 16)
    assert runner.kv_spec.bytes_per_block == runner.kv_pool[0].nbytes


@pytest.mark.parametrize(
    ("seq", "told"),
    [
        (scheduled([1], 0, [24]), "block ids 24 to 24 are outside the pool of 24 blocks"),
        (scheduled([1], 0, [-1]), "entry 0 of its block table is -1, and position 0 reads it"),
        (scheduled([1] * 17, 0, [3]), "1 blocks for 17 positions, 2 are needed"),
        (scheduled([1], -1, [3]), r"positions \[-1, 0\)"),
        (scheduled([], 4, [3]), r"positions \[4, 4\) are empty"),
        (scheduled([1], 512, [3] * 40), "exceed the model's length of 512"),
        (scheduled([1] * 17, 0, [3, 3]), "block 3 is in its table twice"),
        (scheduled([1], 40, [3, -2, 4]), "entry 1 of its block table is -2"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_faulty_sequence_is_left_out_with_the_reason_and_the_others_run(runner, seq, told):
    other = scheduled(PROMPT, 0, [2, 5, 6])
    alone = runner.execute(Step(0, [other])).sampled[0]
    runner.kv_pool.zero_()
    done = runner.execute(Step(0, [seq, other]))
    assert re.match(f"request r: .*{told}", done.failed[0])
    assert done.sampled == [None, alone]
    written = runner.kv_pool.flatten(1).abs().sum(1).nonzero().flatten().tolist()
    assert written == [2, 5, 6]


def test_token_ids_that_the_model_lacks_are_the_fault_of_that_request_alone(runner):
    other = scheduled(PROMPT, 0, [2, 5, 6])
    alone = runner.execute(Step(0, [other])).sampled[0]
    done = runner.execute(Step(0, [scheduled([1, VOCAB], 0, [3]), other]))
    assert done.failed == {}
    reason, why = done.fault(0)
    assert reason is Refusal.INVALID_TOKENS
    assert f"token ids 1 to {VOCAB} are outside the vocabulary" in why
    assert done.sampled == [None, alone]


@pytest.mark.parametrize("start", [20, 0])
def test_of_two_that_meet_in_a_block_that_one_writes_neither_runs(runner, start):
    other = scheduled(PROMPT[:1], 16, [7, 8])
    seqs = [scheduled(PROMPT[:4], start, [9, 8]), scheduled(PROMPT, 0, [2, 5, 6]), other]
    if not start:
        seqs[0] = scheduled(PROMPT[:20], 0, [9, 8])
    done = runner.execute(Step(0, seqs))
    assert sorted(done.failed) == [0, 2]
    assert "block 8, which is written in this step, is in the tables of r and r" in done.failed[0]
    assert done.sampled[1] is not None


def test_without_the_guard_ranges_are_looked_at_all_the_same(checkpoint):
    plain = model_runner(checkpoint[0], num_blocks=24, dtype="float32", guard=False)
    seqs = [scheduled([1] * 17, 0, [3, 3]), scheduled([1], 0, [24])]
    assert list(plain.execute(Step(0, seqs)).failed) == [1]


def test_given_memory_is_used(checkpoint):
    path, _ = checkpoint
    memory = torch.zeros(4 * 3 * 2 * 2 * 16 * 16 * 4, dtype=torch.uint8)
    runner = model_runner(path, num_blocks=4, dtype="float32", kv_pool=memory)
    runner.execute(Step(0, [scheduled([1], 0, [2])]))
    assert runner.kv_pool.data_ptr() == memory.data_ptr()
    assert memory.any()


def test_max_model_len_never_exceeds_the_models(checkpoint):
    path, _ = checkpoint
    runner = model_runner(path, num_blocks=4, max_model_len=10_000)
    assert runner.max_model_len == 512
    assert model_runner(path, num_blocks=4, max_model_len=100).max_model_len == 100


def test_without_kernels_torch_takes_over_and_says_so(checkpoint, runner, tmp_path, monkeypatch):
    assert runner.notices == []
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    plain = model_runner(checkpoint[0], num_blocks=24, dtype="float32")
    assert len(plain.notices) == 1
    assert "no-such-compiler" in plain.notices[0]
    blocks = [9, 4, 17, 2]
    assert generate(plain, PROMPT, blocks, 8, temperature=0.0) == generate(
        runner, PROMPT, blocks, 8, temperature=0.0
    )


def test_devices_that_are_not_there_are_refused(checkpoint):
    path, _ = checkpoint
    for device in ("cuda", "tpu", "mps"):
        with pytest.raises(ModelError, match=f"device {device} "):
            model_runner(path, num_blocks=1, device=device)


@pytest.fixture
def broken(tmp_path):
    """A checkpoint to damage: its directory and its weight file."""
    make_checkpoint("llama", tmp_path)
    return tmp_path, tmp_path / "model.safetensors"


def refused(path) -> str:
    with pytest.raises(ModelError) as error:
        model_runner(path, num_blocks=1)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_truncated_and_corrupt_files_are_named(broken):
    path, file = broken
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors is damaged or truncated" in refused(path)
    file.write_bytes(b"\xff" * 100)
    assert "model.safetensors is damaged or truncated" in refused(path)
    file.write_bytes(b"")
    assert "model.safetensors is damaged or truncated" in refused(path)
    file.unlink()
    assert "has no *.safetensors file" in refused(path)


def test_a_missing_shard_is_named(broken):
    path, file = broken
    places = dict.fromkeys(load_file(file), "model-00001-of-00002.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert "model-00001-of-00002.safetensors is missing" in refused(path)
