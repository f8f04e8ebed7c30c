"""The table in docs/plan.md, made by `kvrelay plan` from published configurations.

`python -m tests.docs.plan` rewrites what stands between the two `plan` marks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvrelay.cluster.cli.plan import plan_of
from kvrelay.cluster.config import load_config
from kvrelay.engine.model.errors import ModelError
from kvrelay.worker.model_plan import GPU_BYTES, ModelPlan
from tests.docs.modules import between_marks
from tests.engine.model.checkpoint.published import MODELS, Published
from tests.structure import ROOT

PAGE = ROOT / "docs/plan.md"
GPU, CONTEXT = "h100", 32_768
SIZES = (1, 2, 4, 8, 16, 32)
SHOWN = (
    *("Qwen3", "Qwen3-Next", "Qwen3.5", "Qwen3.6", "gpt-oss-20b", "gpt-oss-120b", "GLM-4.7-Flash"),
    *("GLM-4.7", "Kimi-Linear", "Kimi K2.6", "DeepSeek V3.1", "MiniMax M2.7", "Ministral 3"),
    *("Gemma 3", "Gemma 4", "Llama 4", "Nemotron 3", "LFM2", "Phi-4-mini"),
)
HEAD = (
    "| model | weights, GiB | KV of a token | a sequence, MiB | of it fixed | H100 | at once |\n"
    "|---|---|---|---|---|---|---|"
)


def fewest(model: Published) -> ModelPlan:
    """Its plan on the fewest GPUs that one worker of it fits on."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / model.file).write_text(json.dumps(model.config))
        for size in SIZES:
            settings = {"model.name": folder, "engine.tensor_parallel_size": size}
            try:
                plan = plan_of(load_config(None, settings), size, GPU_BYTES[GPU], (CONTEXT,))
            except ModelError:
                break  # its heads cannot be divided further
            if not plan.problems:
                return plan
    raise AssertionError(f"{model.name} fits on none of {SIZES}")


def rows() -> Iterator[str]:
    for name in SHOWN:
        (model,) = (each for each in MODELS if each.name == name)
        plan = fewest(model)
        kinds = {kind.kind: kind.sequence_bytes[CONTEXT] / (1 << 20) for kind in plan.kinds}
        fixed = sum(size for kind, size in kinds.items() if kind != "full")
        token = sum(kind.bytes_per_token for kind in plan.kinds)
        yield (
            f"| {name} | {plan.weights_bytes / (1 << 30):,.0f} | {token / 1024:,.1f} KiB |"
            f" {sum(kinds.values()):,.0f} | {f'{fixed:,.0f}' if fixed else '-'} |"
            f" {plan.num_ranks} | {plan.num_sequences[CONTEXT]} |"
        )


def with_plan(page: str) -> str:
    return between_marks(page, "plan", "\n".join([HEAD, *rows()]))


if __name__ == "__main__":
    PAGE.write_text(with_plan(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
