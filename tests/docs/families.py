"""The table in docs/families.md, made from what the tests compare.

    python -m tests.docs.families [ARCHITECTURE ...]

measures the errors of the logits of those that are named, and writes the table. Errors of others
stay as the document has them; everything else comes from the tests.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before transformers is imported

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvrelay.engine.model.checkpoint.families import parse, read_config
from kvrelay.engine.model.config import EXPERTS, MLP, ModelConfig
from kvrelay.engine.model.cpu.kernels import KernelsUnavailable
from tests.engine.model import tiny
from tests.engine.model.checkpoint.published import MODELS
from tests.engine.model.test_recurrent import KINDS
from tests.engine.model.test_sparse_attention import SPARSE
from tests.local.test_local_groups import FAMILIES as GROUPED
from tests.local.test_same_tokens import FAMILIES as SERVED
from tests.structure import ROOT

PAGE = ROOT / "docs/families.md"
BEGIN, END = "<!-- families -->\n", "<!-- end -->\n"
NAMES = ("architecture", "layers", "logits", "chunks", "P/D, tiers", "published")
HEAD = f"| {' | '.join(NAMES)} |\n{len(NAMES) * '|---'}|\n"
TOLERANCE = "<1e-04"  # that the tests have, where nothing finer was measured
SHORT = {"ForCausalLM": "", "ForConditionalGeneration": " (text)"}


def architecture_of(family: str) -> str:
    kind, _ = tiny.FAMILIES[family]
    if kind in tiny.PARTS:
        return str(tiny.PARTS[kind][0].__name__)
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind.model_type, "Mistral4ForCausalLM"))


def short(architecture: str) -> str:
    for end, other in SHORT.items():
        architecture = architecture.replace(end, other)
    return architecture


def by_architecture() -> dict[str, list[str]]:
    """Lists the tests' families of each."""
    found: dict[str, list[str]] = {}
    for family in tiny.FAMILIES:
        found.setdefault(architecture_of(family), []).append(family)
    return dict(sorted(found.items()))


def config_of(family: str) -> ModelConfig:
    kind, own = tiny.FAMILIES[family]
    text = kind in tiny.PARTS and tiny.PARTS[kind][1]
    raw: dict[str, Any] = {**tiny.SHAPE, **own}
    if text is False:  # with what transformers makes of it, as a checkpoint has
        raw = json.loads(kind(**raw).to_json_string(use_diff=False))
    else:
        raw = {"text_config": {**raw, **text}}
    return parse({**raw, "architectures": [architecture_of(family)]}, {})


def layers_of(config: ModelConfig) -> set[str]:
    found = set()
    for layer in range(config.num_layers):
        if config.recurrent is not None and config.kind(layer) == config.recurrent.kind:
            found.add(config.recurrent.kind.replace("_", " "))
        if config.attends(layer):
            latent = "latent attention" if config.latent else "attention"
            latent = "sparse attention" if config.indexer else latent
            near = "window" if config.window(layer) else "chunk" if config.chunk(layer) else ""
            found.add(near or latent)
        if config.has_experts(layer):
            found.add("experts")
        if config.kind(layer) in (MLP, EXPERTS):
            found.add("one block a layer")
    return found


def error_of(family: str) -> float:
    """The largest difference of a logit, whole prompts, from transformers' in float32: kernels of
    the CPU (where they know the family) and torch."""
    prompt, worst = tiny.tokens_of(90, seed=1), 0.0
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.make_checkpoint(family, Path(folder))
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1]
        for kind in ("cpu", "torch"):
            try:
                got = tiny.Driver(Path(folder), kind, read_config(Path(folder))).feed(("a", prompt))
            except KernelsUnavailable:
                continue
            worst = max(worst, float((got[0] - expected).abs().max()))
    return worst


def table(errors: Mapping[str, str]) -> str:
    """`errors`: as they are shown, of each architecture."""
    rows = []
    for name, families in by_architecture().items():
        configs = [config_of(each) for each in families]
        kinds = sorted(set().union(*map(layers_of, configs)))
        published = sum(
            not each.refused and each.config.get("architectures") == [name] for each in MODELS
        )
        cells: Iterable[str] = (
            short(name),
            ", ".join(kinds),
            errors.get(short(name), TOLERANCE),
            "same bits" if {*families} & {*KINDS, *SPARSE} else "1e-4",
            "yes" if {*families} & {"llama", *GROUPED, *SERVED} else "-",
            str(published or "-"),
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(rows)


def stored() -> str:
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def stored_errors() -> dict[str, str]:
    rows = (line.split(" | ") for line in stored().splitlines()[2:])
    return {cells[0].removeprefix("| "): cells[2] for cells in rows}


def write(errors: Mapping[str, str]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(errors) + END + rest.partition(END)[2], encoding="utf-8")


def main() -> None:
    errors = stored_errors()
    for name, families in by_architecture().items():
        if short(name) in sys.argv[1:]:
            errors[short(name)] = f"{max(map(error_of, families)):.0e}"
            print(name, errors[short(name)], flush=True)
    write(errors)


if __name__ == "__main__":
    main()
