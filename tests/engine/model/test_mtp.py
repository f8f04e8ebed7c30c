"""A layer that drafts, in the model's own checkpoint: its drafts are those of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from kvrelay.engine.model.checkpoint.drafters import read_drafter
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.errors import ModelError
from tests.engine.model.talks import DRAWN, GREEDY, Talk
from tests.engine.model.test_drafter import (
    BLOCKS,
    Drafting,
    check_that_it_goes_on,
    spoken,
    talks,
)
from tests.engine.model.tiny import make_checkpoint, tokens_of

LAYERS, NUM_DRAFTS = 3, 4


BEHIND = f"model.layers.{LAYERS}."
PARTS = [BEHIND + name for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")]
QWEN_PARTS = ["mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"]
KINDS = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
QWEN: dict[str, dict[str, Any]] = {
    "qwen3.5": {"layer_types": KINDS},
    "qwen3.5-part": {"layer_types": KINDS},
    "qwen3.5-moe": {"layer_types": KINDS},
    "qwen3-next": {"layer_types": KINDS},
}


def make_mtp(family: str, path: Path, **changes: Any) -> None:
    """A random checkpoint whose last layer is none of the model's own: it drafts."""
    is_qwen = family in QWEN
    changes = QWEN.get(family, {}) | changes
    make_checkpoint(family, path, {"num_hidden_layers": LAYERS + 1, **changes})
    file = path / "model.safetensors"
    tensors, width = load_file(file), 96
    generator = torch.Generator().manual_seed(3)
    fc, *norms = QWEN_PARTS if is_qwen else PARTS
    for name in norms:
        norm = (not is_qwen) + 0.3 * torch.randn(width, generator=generator)  # theirs add one
        tensors[f"{name}.weight"] = norm
    tensors[f"{fc}.weight"] = torch.randn(width, 2 * width, generator=generator) * 0.1
    config = json.loads((path / "config.json").read_text())
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": LAYERS}
    if is_qwen:
        tensors = {
            re.sub(rf"^.*layers\.{LAYERS}\.", "mtp.layers.0.", n): t for n, t in tensors.items()
        }
        text |= {"layer_types": KINDS[:LAYERS]}
        text |= {} if family == "qwen3-next" else {"mtp_num_hidden_layers": 1}
    else:
        text |= {"num_nextn_predict_layers": 1}
    save_file(tensors, file, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=["deepseek3", "glm4-moe", *QWEN])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(request.param)
    make_mtp(request.param, found)
    return found


class Theirs:
    """transformers' model, and what its layer drafts."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = json.loads((path / "config.json").read_text())
        kind = getattr(transformers, config["architectures"][0])
        # It knows which one drafts by its number in models that were published.
        names = [rf"model\.layers\.{LAYERS}.*", r"^mtp\."]
        monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", names)
        self.model = kind.from_pretrained(path, dtype=torch.float32)
        self.text = text = self.model.config.get_text_config()
        if not hasattr(text, "num_mtp_layers"):  # it has the class, and no name for the number
            text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
        self.has_states = self.model._is_stateful  # with which it generates no drafts by itself
        self.layer = layer = MtpModel.from_pretrained(self.model)
        monkeypatch.setattr(MtpModel, "from_pretrained", lambda *_, **__: layer)  # once for all
        self.drafts: dict[tuple[int, ...], int] = {}
        theirs = MTPCandidateGenerator.get_candidates

        def watched(generator, input_ids, *args, **kwargs):
            found = theirs(generator, input_ids, *args, **kwargs)
            known = input_ids[0].tolist()
            if found[0].shape[1] > len(known):
                self.drafts[tuple(known)] = int(found[0][0, -1])
            return found

        monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", watched)

    def generate(self, prompt: list[int], count: int) -> list[int]:
        options = {"use_mtp": not self.has_states, "do_sample": False, "max_new_tokens": count}
        self.model.generation_config.eos_token_id = None
        return self.model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()

    def draft(self, known: tuple[int, ...]) -> int | None:
        return self.chain([*known], 1)[0] if self.has_states else self.drafts.get(known)

    @torch.inference_mode()
    def chain(self, known: list[int], count: int) -> list[int]:
        """Several after `known`, whose last token the model has not computed."""
        layer, cache = self.layer, MtpCache(config=self.model.config.get_mtp_config())
        states = self.model.get_decoder()(torch.tensor([known[:-1]])).last_hidden_state
        tokens, positions, found = torch.tensor([known[1:]]), torch.arange(1, len(known))[None], []
        for _ in range(count):
            states = layer.forward_layer(0, states, positions, cache, input_ids=tokens)[:, -1:]
            found.append(int(layer._project_to_logits(states)[0, -1].argmax()))
            tokens, positions = torch.tensor([found[-1:]]), positions[:, -1:] + 1
        return found


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 54), marks=pytest.mark.long)])
def test_drafts_are_those_of_transformers(
    path: Path, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = Theirs(path, monkeypatch), Drafting(path, "mtp", threads=1)
    compared = 0
    for seed in seeds:
        prompt = tokens_of(5 + seed % 23, seed)
        expected, talk = theirs.generate(prompt, 12), Talk(prompt, BLOCKS[0])
        ours.step(talk)
        while len(talk.output) < 12:
            known, ours.proposed = tuple(talk.tokens), []
            ours.step(talk, num_drafts=1)
            if ours.proposed and (draft := theirs.draft(known)) is not None:
                assert ours.proposed == [[draft]]
                compared += 1
        assert talk.output[:12] == expected
    assert compared > 8 * len(seeds)


def test_several_come_from_its_own_output(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = Theirs(path, monkeypatch), Drafting(path, "mtp", threads=1)
    talk, compared = Talk(tokens_of(37, 1), BLOCKS[0]), 0
    ours.step(talk, counts=[20])  # in chunks
    ours.step(talk)
    for _ in range(6):
        known = list(talk.tokens)
        ours.step(talk, num_drafts=NUM_DRAFTS)
        assert ours.proposed[-1] == theirs.chain(known, len(ours.proposed[-1]))
        compared += len(ours.proposed[-1])
    assert compared > 12


@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3"])
def test_tokens_are_those_without_it(path: Path, kv_dtype: str) -> None:
    of = [Drafting(path, drafter, kv_dtype=kv_dtype, threads=1) for drafter in ("", "mtp")]
    without, drafted = (spoken(each, talks(GREEDY, DRAWN, DRAWN), num_drafts=3) for each in of)
    assert drafted == without
    assert any(of[1].proposed)


def test_a_prefix_hit_goes_on_from_the_blocks(path: Path) -> None:
    cold, warm = Drafting(path, "mtp", threads=1), Drafting(path, "mtp", threads=1)
    check_that_it_goes_on(cold, warm, tokens_of(cold.runner.kv_spec.block_size + 21, 1))


def test_models_without_such_a_layer_are_named(path: Path, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    with pytest.raises(ModelError, match="states no num_nextn_predict_layers"):
        read_drafter("mtp", read_config(tmp_path))
    tensors = load_file(path / "model.safetensors")
    fc = next(name for name in tensors if name.endswith(("eh_proj.weight", "mtp.fc.weight")))
    kept = {name: each for name, each in tensors.items() if name != fc}
    save_file(kept, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(ModelError, match=rf"has no tensor {re.escape(fc)}"):
        Drafting(tmp_path, "mtp")
