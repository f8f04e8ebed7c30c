"""Which of the models that agent platforms serve are loaded, by their published configurations."""

import json
from typing import Any

import pytest
import torch

from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.mistral import config_of
from kvrelay.engine.model.errors import ModelError
from tests.engine.model.checkpoint.mistral_files import to_mistral
from tests.engine.model.checkpoint.published import MODELS, Published
from tests.engine.model.tiny import VOCAB, Driver, tokens_of, write_checkpoint

LOADED = [model for model in MODELS if not model.refused]
PROMPT = tokens_of(40, seed=1)
# Widths, which a layer's code does not depend on. Sizes of heads and of latents, ropes, scalings,
# kinds of layers and numbers of experts stay.
WIDTHS = {
    "hidden_size": 64,
    "dim": 64,
    "intermediate_size": 48,
    "hidden_dim": 48,
    "intermediate_size_mlp": 96,
    "moe_intermediate_size": 16,
    "expert_hidden_dim": 16,
    "q_lora_rank": 32,
    "vocab_size": VOCAB,
}
HEADS = (("num_attention_heads", "num_key_value_heads"), ("n_heads", "n_kv_heads"))
MAX_KV_HEADS = 2
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """What is left with few layers and heads, and narrow: random weights of it take some MB."""
    whole = config.get("num_hidden_layers") or config.get("n_layers")
    made: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, list) and len(value) == whole:
            value = value[:layers]
        elif isinstance(value, dict):
            value = cut(value, layers)
        elif key in WIDTHS and value:
            value = WIDTHS[key]
        elif key in ("num_hidden_layers", "n_layers"):
            value = layers
        if key not in IDS and key != "quantization_config":
            made[key] = value
    for heads, kv_heads in HEADS:
        if heads in config:
            made[kv_heads] = min(config[kv_heads], MAX_KV_HEADS)
            made[heads] = config[heads] // config[kv_heads] * made[kv_heads]
    return made


def names(models: Any) -> Any:
    return pytest.mark.parametrize("model", models, ids=lambda model: model.name)


@names(MODELS)
def test_its_published_configuration_is_read_or_refused(model: Published, tmp_path) -> None:
    (tmp_path / model.file).write_text(json.dumps(model.config))
    if model.refused:
        with pytest.raises(ModelError) as error:
            read_config(tmp_path)
        assert str(error.value).startswith(model.refused)
        return
    config = read_config(tmp_path)
    stated = model.config.get("text_config", model.config)
    layers = stated.get("num_hidden_layers") or stated["n_layers"]
    assert config.num_layers == layers
    assert config.vocab_size == stated.get("vocab_size", config.vocab_size)


@pytest.mark.long
@names(LOADED)
def test_it_computes_what_transformers_does_with_random_weights(model: Published, tmp_path) -> None:
    text = model.config.get("text_config", model.config)
    small = cut(text, model.layers) | model.changes
    stated = config_of(small) if model.file == "params.json" else small
    fields = {key: value for key, value in stated.items() if key != "architectures"}
    reference = write_checkpoint(
        model.kind, {"pad_token_id": 0, "initializer_range": 0.2, **fields}, tmp_path
    )
    if model.file == "params.json":
        to_mistral(tmp_path, small)
    else:
        whole = {**model.config, "text_config": small} if text is not model.config else small
        (tmp_path / "config.json").write_text(json.dumps(whole))
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1]
    assert expected.std() > 0.3
    got = Driver(tmp_path, "torch").feed(("a", PROMPT))[0]
    torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-4)
