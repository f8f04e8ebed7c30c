"""Adapters against models that they are merged into: every family, every kind of operations."""

import functools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.engine import adapter_copies
from kvrelay.engine.adapter_copies import read_registered, register
from kvrelay.engine.adapters import AdapterError, read_adapter
from kvrelay.engine.model.checkpoint.adapter import check_adapter
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.cpu.kernels import KernelsUnavailable
from tests.engine.model.tiny import FAMILIES, Driver, low_precision_kind, make_checkpoint, tokens_of
from tests.support.adapters import linear_modules, merge, write_adapter

LONG, SHORT, OTHER = (tokens_of(count, seed) for count, seed in ((90, 1), (21, 2), (40, 3)))
CLOSE, EXACT = {"rtol": 0.0, "atol": 1e-4}, {"rtol": 0.0, "atol": 0.0}
BY_TORCH = ("llama3", "gemma3", "phi3", "qwen3.5", "deepseek3", "deepseek32", "mixtral")
BY_TORCH += ("gpt-oss", "mimo-v2")


def driver_of(path, kind, **options):
    try:
        return Driver(path, kind, **options)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def adapted_model(tmp_path_factory):
    """(a family's model, two adapters of different ranks, the model with each of them merged)."""
    return functools.cache(lambda family: make(tmp_path_factory.mktemp(family), family))


def make(path, family):
    model = path / "model"
    make_checkpoint(family, model)
    modules = linear_modules(model)
    adapters = [
        write_adapter(path / f"adapter{rank}", model, seed=rank, rank=rank, modules=modules)
        for rank in (3, 16)
    ]
    merged = [merge(path / f"merged{i}", model, each) for i, each in enumerate(adapters)]
    return model, adapters, merged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"), [*((f, "cpu") for f in FAMILIES), *((f, "torch") for f in BY_TORCH)]
)
def test_an_adapter_gives_the_logits_of_merged_weights(adapted_model, family, kind):
    model, adapters, merged = adapted_model(family)
    mixed, base = driver_of(model, kind), driver_of(model, kind)
    # Torch's products depend on how many rows there are, and others may be sent to an expert.
    is_exact = kind == "cpu" or mixed.config.experts is None
    merged_of = {name: driver_of(path, kind) for name, path in zip("xy", merged, strict=True)}
    for name, adapter in zip("xy", adapters, strict=True):
        assert check_adapter(adapter, model, mixed.config) > 0
        mixed.adapt(name, adapter)
    order = sorted("xy", key=lambda name: mixed.adapter_of[name].digest)
    starts = {"b": 0, "x": 0, "y": 0}
    for ends in ((70, 30), (71, 31), (90, 40)):  # a long chunk, decodes, chunks again
        end_of = {"b": ends[0], "x": ends[1], "y": ends[0]}
        parts = {n: (OTHER if n == "x" else LONG)[starts[n] : end_of[n]] for n in ("b", *order)}
        starts = end_of
        got = mixed.feed(*parts.items())
        without = base.feed(*parts.items())[0]
        torch.testing.assert_close(got[0], without, **(EXACT if is_exact else CLOSE))
        for name, logits in zip(order, got[1:], strict=True):
            expected = merged_of[name].feed((name, parts[name]))[0]
            torch.testing.assert_close(logits, expected, **CLOSE)
        assert not torch.allclose(got[0], got[1 + order.index("y")], atol=0.1)


@pytest.mark.parametrize(
    ("quantization", "precision", "dtype"),
    [
        *(("none", each, "bfloat16") for each in ("none", "bf16_pairs", "fp16", "amx", "int16")),
        ("int8", "none", "float32"),
        ("int4", "bf16_pairs", "bfloat16"),
    ],
)
def test_rounded_factors_and_quantized_weights_leave_what_merged_ones_would(
    adapted_model, quantization, precision, dtype
):
    """The error of an adapter beside rounded weights is that of rounded merged weights, about."""
    model, adapters, merged = adapted_model("llama3")
    options = {
        "dtype": getattr(torch, dtype),
        "low_precision": low_precision_kind(precision),
        "quantization": quantization,
    }
    exact, rounded = driver_of(merged[1], "cpu"), driver_of(merged[1], "cpu", **options)
    mixed, base = driver_of(model, "cpu", **options), driver_of(model, "cpu", **options)
    mixed.adapt("x", adapters[1])
    errors = [0.0, 0.0]
    for tokens in (LONG[:70], LONG[70:71], LONG[71:]):
        got = mixed.feed(("b", tokens), ("x", tokens))
        assert torch.equal(got[0], base.feed(("b", tokens))[0]), "a row without an adapter"
        truth = exact.feed(("x", tokens))[0]
        for place, logits in enumerate((got[1], rounded.feed(("x", tokens))[0])):
            errors[place] += (logits - truth).abs().mean().item()
    assert 0 < errors[0] < 1.5 * errors[1]


def changed(tmp_path, llama, change):
    """An adapter whose tensors and config `change` has altered."""
    folder = write_adapter(tmp_path / "adapter", llama)
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t, c: c.update(use_kasa=True), "use_kasa = True is not handled"),
        (lambda t, c: c.update(use_dora=True), "use_dora = True is not handled"),
        (lambda t, c: c.update(bias="all"), "bias = 'all' is not handled, 'none' is"),
        (lambda t, c: c.update(modules_to_save=["lm_head"]), "modules_to_save = ['lm_head']"),
        (lambda t, c: c.update(peft_type="IA3"), "peft_type is 'IA3', LORA is needed"),
        (lambda t, c: c.update(lora_alpha=0), "lora_alpha = 0, a positive number is needed"),
        (lambda t, c: c.update(init_lora_weights="pissa_niter_4"), "changes the model's own"),
        (lambda t, c: c.update(alpha_pattern={"(": 1}), "alpha_pattern = {'(': 1}"),
        (
            lambda t, c: t.update(x=t[Q].clone()),
            "x is not handled; linear layers of attention, MLPs",
        ),
        (
            lambda t, c: t.update({Q.replace("q_proj.lora_A", "x.lora_embedding_A"): t.pop(Q)}),
            "lora_embedding_A.weight is not handled",
        ),
        (lambda t, c: t.pop(Q), "layer 0, self_attn.q_proj: {'lora_B': [96, 8]} do not fit"),
        (lambda t, c: t.update({Q: t[Q][:3].clone()}), "do not fit each other"),
        (
            lambda t, c: t.update({Q: t[Q][:, :5].clone()}),
            "is for 5 inputs and 96 outputs, the model",
        ),
        (lambda t, c: t[Q].fill_(torch.nan), "has values that are no finite numbers"),
        (
            lambda t, c: t.update({n.replace("s.0", "s.7"): w.clone() for n, w in t.items()}),
            "has layer 7, the model has 3 layers",
        ),
        (
            lambda t, c: t.update({n.replace("q_proj", "z_proj"): w.clone() for n, w in t.items()}),
            "self_attn.z_proj is not handled in this model",
        ),
    ],
)
def test_what_is_not_handled_is_refused_in_words(tmp_path, llama, change, told):
    """Where it is registered, and by a worker."""
    folder, driver = changed(tmp_path, llama, change), Driver(llama, "torch")
    for use in (
        lambda: check_adapter(folder, llama, driver.config),
        lambda: driver.adapt("x", folder),
    ):
        with pytest.raises(AdapterError) as refused:
            use()
        assert told in str(refused.value)
        assert str(tmp_path) not in str(refused.value)


def test_a_rank_that_the_config_does_not_say_is_refused(tmp_path, llama):
    folder = changed(tmp_path, llama, lambda _, c: c.update(r=4, rank_pattern={"q_proj": 8}))
    with pytest.raises(AdapterError, match=r"_proj has rank 8, and adapter_config.json says 4"):
        check_adapter(folder, llama, read_config(llama))


def test_a_file_that_is_cut_off_is_refused(tmp_path, llama):
    folder = write_adapter(tmp_path / "adapter", llama)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors is damaged"):
        check_adapter(folder, llama, read_config(llama))


def test_registered_bytes_stay_whatever_becomes_of_their_folder(tmp_path, llama, monkeypatch):
    copies = tmp_path / "copies"
    monkeypatch.setattr(adapter_copies, "copies_dir", lambda: copies)
    folder = write_adapter(tmp_path / "adapter", llama)
    first, files = register(folder), read_adapter(folder)
    assert first.digest == files.digest
    second = register(write_adapter(folder, llama, seed=1))
    assert read_registered(first) == files
    shutil.rmtree(folder)
    assert read_registered(first) == files
    assert read_registered(second).digest == second.digest != first.digest
    kept = copies / first.digest.hex()
    (kept / "adapter_config.json").write_text("{")  # and a copy that is damaged counts for none
    with pytest.raises(AdapterError, match="cannot be read"):
        read_registered(first)
    monkeypatch.setattr(adapter_copies, "MAX_COPIES_BYTES", len(files.weights) + 9999)
    third = register(write_adapter(folder, llama, seed=2))
    assert [each.name for each in copies.iterdir()] == [third.digest.hex()]


def test_files_that_are_not_there_are_named(tmp_path, llama):
    with pytest.raises(AdapterError, match=r"adapter_config.json cannot be read: No such file"):
        read_adapter(tmp_path)
    folder = write_adapter(tmp_path / "a", llama)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model.bin is not read"):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({"lora_alpha": 32}, 4.0),
        ({"lora_alpha": 32, "use_rslora": True}, 32 / 8**0.5),
        ({"alpha_pattern": {r"layers\.\d\.(mlp|self_attn)\..*": 4}}, 0.5),
        ({"alpha_pattern": {"z_proj": 4}}, 1.0),
    ],
)
def test_what_is_added_is_scaled_as_peft_does(tmp_path, llama, config, scaling):
    adapter = write_adapter(tmp_path / "adapter", llama, **config)
    driver = Driver(llama, "torch")
    driver.adapt("x", adapter)
    merged = Driver(merge(tmp_path / "merged", llama, adapter, scaling), "torch")
    got, expected = (each.feed(("x", LONG)) for each in (driver, merged))
    torch.testing.assert_close(got, expected, **CLOSE)


def test_a_digest_is_of_every_byte(tmp_path, llama):
    folder = write_adapter(tmp_path / "adapter", llama)
    seen = {read_adapter(folder).digest}
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        path = folder / name
        whole = path.read_bytes()
        for at in (*range(0, len(whole), max(1, len(whole) // 40)), len(whole) - 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            try:
                seen.add(read_adapter(folder).digest)
            except AdapterError:  # no JSON any more
                assert name == "adapter_config.json"
        path.write_bytes(whole)
    assert len(seen) > 42
