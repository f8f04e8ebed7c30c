"""The decoder against transformers, float32: every family, every way to cut the work."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.engine.model.checkpoint.load import Checkpoint
from kvrelay.engine.model.cpu.kernels import KernelsUnavailable
from tests.engine.model.tiny import FAMILIES, Driver, low_precision_kind, make_checkpoint, tokens_of

CLOSE = {"rtol": 0.0, "atol": 1e-4}
LONG, SHORT = tokens_of(90, seed=1), tokens_of(21, seed=2)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(directory, reference logits of LONG, of SHORT), logits [len, vocab]."""
    path = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(request.param, path)
    padded = torch.tensor([LONG, SHORT + LONG[len(SHORT) :]])  # longrope is chosen by the longest
    with torch.inference_mode():
        return path, *model(padded).logits


@pytest.fixture(params=["cpu", "torch"])
def driver(request, family):
    try:
        return Driver(family[0], request.param)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_whole_prompt_gives_the_reference_logits(driver, family):
    _, long, _ = family
    assert long.std() > 1.0, "logits this flat would prove nothing"
    torch.testing.assert_close(driver.feed(("long", LONG))[0], long[-1], **CLOSE)


def test_chunks_of_any_length_give_the_reference_logits(driver, family):
    _, long, _ = family
    first = 0
    for end in (1, 2, 19, 51, 52, 90):
        logits = driver.feed(("long", LONG[first:end]))[0]
        torch.testing.assert_close(logits, long[end - 1], **CLOSE)
        first = end


def test_a_ragged_batch_of_prefill_chunk_and_decode_gives_the_reference_logits(driver, family):
    _, long, short = family
    driver.feed(("a", LONG[:70]), ("b", SHORT[:9]))
    got = driver.feed(("a", LONG[70:71]), ("b", SHORT[9:15]), ("c", SHORT[:5]), ("d", LONG[:1]))
    expected = torch.stack([long[70], short[14], short[4], long[0]])
    torch.testing.assert_close(got, expected, **CLOSE)
    got = driver.feed(("a", LONG[71:72]), ("b", SHORT[15:16]), ("c", SHORT[5:6]))
    torch.testing.assert_close(got, torch.stack([long[71], short[15], short[5]]), **CLOSE)


def test_sharded_checkpoints_load_like_whole_ones(llama, tmp_path):
    make_checkpoint("llama", tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole, parts = (Driver(path, "cpu").feed(("a", LONG)) for path in (llama, tmp_path))
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("kind", ["cpu", "torch"])
def test_bf16_checkpoints_run_in_float32_without_losing_a_bit_of_them(tmp_path, kind):
    make_checkpoint("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    narrow = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(narrow, file, metadata={"format": "pt"})
    got = Driver(tmp_path, kind).feed(("a", LONG))
    save_file({n: t.float() for n, t in narrow.items()}, file, metadata={"format": "pt"})
    torch.testing.assert_close(got, Driver(tmp_path, kind).feed(("a", LONG)), **CLOSE)
    assert Checkpoint(tmp_path).get("model.norm.weight", 96).dtype == torch.float32


@pytest.mark.parametrize("low_precision", ["none", "bf16_pairs", "fp16", "amx", "int16"])
def test_bf16_kernels_stay_near_the_torch_path(llama, low_precision):
    """bfloat16 weights and KV cache. Torch rounds activations too, so the bound is bf16's."""
    kind = low_precision_kind(low_precision)
    logits = [
        torch.cat([driver.feed(("a", LONG)), driver.feed(("a", SHORT[:1]))])
        for driver in (
            Driver(llama, "cpu", dtype=torch.bfloat16, low_precision=kind),
            Driver(llama, "torch", dtype=torch.bfloat16),
            Driver(llama, "torch"),
        )
    ]
    kernel_error = (logits[0] - logits[2]).abs().mean()
    torch_error = (logits[1] - logits[2]).abs().mean()
    assert 0 < kernel_error < 1.2 * torch_error
