"""Configurations of the models that agent platforms serve in 2026, one of each name: JSON files.

Keys and values are those of config.json, without what only training or images need. `source`:
"published", from a copy of that file in a public repository (aiconfigurator's; Megatron-Bridge's
for Kimi-Linear and Falcon-H1, vLLM's for Mistral Large 3); else no copy was at hand: sizes as the
makers tell them, and defaults of transformers. `files`: what their repositories have beside that
file, licences and pictures, as far as it is known (no list was at hand but Kimi's); of many files
of weights two. `template`: the file that has the chat template; "": none has.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

FILES = Path(__file__).with_name("published_models")
FORMATS = ("config.json", "params.json")  # as Hugging Face has it, and as Mistral has


@dataclass(frozen=True)
class Published:
    name: str
    source: str
    config: dict[str, Any]
    file: str
    files: tuple[str, ...]
    template: str
    kind: Any = None  # transformers' configuration of the language model
    layers: int = 2  # that have one of each kind of layer
    refused: str = ""  # what the refusal says; "": it loads
    changes: dict[str, Any] = field(default_factory=dict)  # beside the general cuts


def read(path: Path) -> tuple[int, Published]:
    """A model, and its place among all."""
    row = json.loads(path.read_text(encoding="utf-8"))
    (file,) = (each for each in FORMATS if each in row)
    kind = getattr(transformers, row.pop("kind")) if "kind" in row else None
    number, config, row["files"] = row.pop("number"), row.pop(file), (*row["files"],)
    return number, Published(**row, config=config, file=file, kind=kind)


_READ = sorted((read(path) for path in FILES.glob("*.json")), key=lambda pair: pair[0])
MODELS = tuple(model for _, model in _READ)
(LARGE3,) = (each.config for each in MODELS if each.file == "params.json")
