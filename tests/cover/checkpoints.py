"""Tiny random checkpoints of each kind, with a tokenizer of bytes, and what goes with them."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvrelay.engine.adapters import Adapter, read_adapter
from kvrelay.engine.model.checkpoint.families import read_config
from tests.cover.settings import HAVE_MTP
from tests.engine.model.heads import make_head
from tests.engine.model.test_mtp import make_mtp
from tests.engine.model.tiny import make_checkpoint
from tests.support.adapters import write_adapter
from tests.support.weights import scaled

FAMILY = {
    "dense": "llama",
    "experts": "glm4-moe",
    "hybrid": "qwen3.5",
    "windows": "gemma3",
    "short": "mistral-window",
    "latent": "deepseek3",
    "sparse": "deepseek32",
    "other": "qwen3",
}
SPECIAL = ("<pad>", "<s>", "</s>")
FIRST_BYTE, VOCAB = len(SPECIAL), len(SPECIAL) + 256 + 5  # some rows that no token has
END = 2
PART = "self_attn.o_proj"  # a matrix that all of them have


class Checkpoints:
    """Owns a folder; each is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def model(self, kind: str) -> Path:
        path = self._folder / kind
        if not path.exists():
            path.mkdir(parents=True)
            if kind in HAVE_MTP:
                make_mtp(FAMILY[kind], path, vocab_size=VOCAB)
            else:  # tied, the windowed one repeats itself
                changes = {"tie_word_embeddings": False} if kind == "windows" else {}
                make_checkpoint(FAMILY[kind], path, {"vocab_size": VOCAB, **changes})
            _tokenizer().save(str(path / "tokenizer.json"))
            (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[END]}))
        return path

    def retrained(self, kind: str) -> Path:
        """Writes a checkpoint that differs from the model in one matrix."""
        path = self._folder / f"{kind}-2"
        return path if path.exists() else scaled(self.model(kind), path, 2.0, PART)

    def adapter(self, kind: str) -> Adapter:
        path = self._folder / f"{kind}-adapter"
        if not path.exists():
            model = self.model(kind)  # a layer that drafts has none
            layers = range(read_config(model).num_layers)
            write_adapter(path, model, rank=4, layers=layers)
        return Adapter(read_adapter(path).digest, str(path))

    @cached_property
    def head(self) -> Path:
        make_head(self._folder / "head", "own")
        return self._folder / "head"


def _tokenizer() -> Tokenizer:
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate((*SPECIAL, *names))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made
