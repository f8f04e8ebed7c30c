"""A layer that drafts, in the model's own checkpoint: its drafts are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

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


def make_mtp(family: str, path: Path, **changes: int) -> None:
    """A random checkpoint whose last layer is none of the model's own: it drafts."""
    make_checkpoint(family, path, {"num_hidden_layers": LAYERS + 1, **changes})
    file = path / "model.safetensors"
    tensors, width = load_file(file), 96
    generator = torch.Generator().manual_seed(3)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        norm = 1 + 0.3 * torch.randn(width, generator=generator)
        tensors[f"model.layers.{LAYERS}.{name}.weight"] = norm
    fc = torch.randn(width, 2 * width, generator=generator) * 0.1
    tensors[f"model.layers.{LAYERS}.eh_proj.weight"] = fc
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=["deepseek3", "glm4-moe"])
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
        names = [rf"model\.layers\.{LAYERS}.*"]
        monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", names)
        self.model = kind.from_pretrained(path, dtype=torch.float32)
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
        options = {"use_mtp": True, "do_sample": False, "max_new_tokens": count}
        self.model.generation_config.eos_token_id = None
        return self.model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def chain(self, known: list[int], count: int) -> list[int]:
        """Several after `known`, whose last token the model has not computed."""
        layer, cache = self.layer, MtpCache(config=self.model.config.get_mtp_config())
        states = self.model.model(torch.tensor([known[:-1]])).last_hidden_state
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
            if known in theirs.drafts and ours.proposed:
                assert ours.proposed == [[theirs.drafts[known]]]
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
    check_that_it_goes_on(cold, warm, tokens_of(37, 1))


def test_models_without_such_a_layer_are_named(path: Path, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    with pytest.raises(ModelError, match="states no num_nextn_predict_layers"):
        read_drafter("mtp", read_config(tmp_path))
    tensors = load_file(path / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if "eh_proj" not in name}
    save_file(kept, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(ModelError, match=r"has no tensor model\.layers\.3\.eh_proj\.weight"):
        Drafting(tmp_path, "mtp")
