"""Which of the models that agent platforms serve are loaded, with the files of their repositories:
what is fetched of them has to be enough for weights, texts and chats."""

from __future__ import annotations

import json
import random
import shutil
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from tokenizers import Tokenizer as Made
from tokenizers import decoders, models, pre_tokenizers

from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.identity import files_of
from kvrelay.engine.model.checkpoint.load import Checkpoint
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.model.errors import ModelError
from tests.engine.model.checkpoint.published import MODELS, Published

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TEXT = "Hello, 世界"
VOCABULARIES = {"tokenizer.json", "tiktoken.model", "tekken.json", "merges.txt", "vocab.json"}
VOCABULARIES |= {"tokenizer.model"}


def byte_ranks() -> list[bytes]:
    order = list(range(256))
    random.Random(1).shuffle(order)
    return [bytes([byte]) for byte in order]


def tokenizer_json(_: Published) -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Made(models.BPE({char: token for token, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return str(made.to_str())


def tokenizer_config(model: Published) -> str:
    stated: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if "tiktoken.model" in model.files:
        stated["tokenizer_class"] = "TikTokenTokenizer"
    if model.template == "tokenizer_config.json":
        stated["chat_template"] = TEMPLATE
    return json.dumps(stated)


def tekken(_: Published) -> str:
    vocabulary = [
        {"rank": rank, "token_bytes": b64encode(token).decode()}
        for rank, token in enumerate(byte_ranks())
    ]
    config = {"pattern": ".", "default_vocab_size": 259, "default_num_special_tokens": 3}
    named = [
        {"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>"))
    ]
    return json.dumps({"config": config, "vocab": vocabulary, "special_tokens": named})


def index(start: str) -> Callable[[Published], str]:
    def text(model: Published) -> str:
        parts = [file for file in model.files if file.startswith(start) and "-0000" in file]
        return json.dumps({"weight_map": {part: part for part in parts}})

    return text


CONTENTS: dict[str, Callable[[Published], str]] = {
    "generation_config.json": lambda _: json.dumps({"eos_token_id": [7], "temperature": 0.6}),
    "tokenizer.json": tokenizer_json,
    "tokenizer_config.json": tokenizer_config,
    "chat_template.jinja": lambda _: TEMPLATE,
    "tiktoken.model": lambda _: "\n".join(
        f"{b64encode(token).decode()} {rank}" for rank, token in enumerate(byte_ranks())
    ),
    "tekken.json": tekken,
    "model.safetensors.index.json": index("model-"),
    "consolidated.safetensors.index.json": index("consolidated-"),
}


@pytest.fixture
def repository(tmp_path: Path) -> Callable[[Published], Path]:
    """Writes its files as far as a loader looks into them: one tensor in each of weights."""

    def write(model: Published) -> Path:
        folder = tmp_path / "repository"
        folder.mkdir()
        (folder / model.file).write_text(json.dumps(model.config))
        for name in model.files:
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            if name.endswith(".safetensors"):
                save_file({name: torch.ones(1)}, path)
            elif not path.exists():
                path.write_text(CONTENTS[name](model) if name in CONTENTS else "{}")
        return folder

    return write


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the hub's client puts what it is asked for of that repository."""
    import huggingface_hub

    def snapshot_download(
        name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any
    ) -> str:
        source, target = tmp_path / "repository", tmp_path / "fetched"
        every = [str(each.relative_to(source)) for each in source.rglob("*") if each.is_file()]
        for file in filter_repo_objects(
            every, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / file, target / file)
        return str(target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return tmp_path / "fetched"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_its_published_files_are_enough(
    model: Published, repository: Callable[[Published], Path], fetched: Path
) -> None:
    repository(model)
    if model.refused:
        with pytest.raises(ModelError) as error:
            resolve_model("maker/model", progress=lambda _: None)
        assert str(error.value).startswith(model.refused)
        return
    path = resolve_model("maker/model", progress=lambda _: None)
    assert path == fetched
    names = {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()}
    assert not {name for name in names if name.startswith(("original/", "metal/"))}
    weights = {name for name in names if name.endswith(".safetensors")}
    own = {name for name in weights if not name.startswith("consolidated")}
    assert weights == own or model.file == "params.json", "no weights are fetched twice"
    checkpoint = Checkpoint(path)
    assert all(checkpoint.has(name) for name in weights)
    tokenizer = Tokenizer(path)
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(tokens) == TEXT
    if "generation_config.json" in model.files:
        assert 7 in tokenizer.eos_token_ids
        assert tokenizer.sampling_defaults["temperature"] == 0.6
    assert bool(tokenizer.chat_template) == bool(model.template)
    if model.template:
        prompt = tokenizer.chat_prompt([{"role": "user", "content": TEXT}])
        assert tokenizer.decode(prompt.tokens) == TEXT
    counted = {file.name for file in files_of(path)}
    assert counted & VOCABULARIES == names & VOCABULARIES, (
        "what tokens mean is part of its identity"
    )
