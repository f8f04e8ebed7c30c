"""Greedy answers with an adapter, and with the weights that it is merged into, against the truth:
the same model in float64 by transformers, merged in float64 and not rounded.

python -m benchmarks.engine.merged: for each dtype how many answers are those of the truth, and of
those that are not, how far apart the truth's logits are of the first token that differs and of its
own: where that is less than what rounding does to logits, the two tokens tie.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import click
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.engine.adapters import SCALE, run, runner_of, share_of
from kvrelay.engine.adapters import Adapter, read_adapter
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import Step
from tests.support.adapters import merge, write_adapter

TOKENS = 16


def generate(
    runner: ModelRunner, prompt: list[int], adapter: Adapter | None, count: int
) -> list[int]:
    context, start = list(prompt), 0
    greedy = SamplingParams(temperature=0.0, max_tokens=count)
    for _ in range(count):
        share = share_of(0, list(context), start, adapter, greedy)
        (sampled,) = run(runner, Step(0, [share])).sampled
        assert sampled is not None
        start = len(context)
        context.append(sampled.token)
    return context[len(prompt) :]


def widened(folder: Path, model: Path, dtype: torch.dtype) -> Path:
    """A copy of `model` whose weights have another type."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            wide = {name: weight.to(dtype) for name, weight in load_file(file).items()}
            save_file(wide, folder / file.name, metadata={"format": "pt"})
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def truth_of(path: Path, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens [N, TOKENS], and the logits that they are the largest of."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    made = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return made.sequences[:, prompts.shape[1] :], torch.stack(made.logits, 1)


def compare(answers: list[list[int]], truth: torch.Tensor, logits: torch.Tensor) -> str:
    gaps = []
    for row, answer in enumerate(answers):
        differs = (truth[row] != torch.tensor(answer)).nonzero()
        if len(differs):
            at = int(differs[0])
            gaps.append(float(logits[row, at].max() - logits[row, at, answer[at]]))
    equal = f"{len(answers) - len(gaps)} of {len(answers)} as the truth"
    if not gaps:
        return equal
    return f"{equal}, else ties within {statistics.median(gaps):.4f} (at most {max(gaps):.4f})"


@click.command()
@click.option("--prompts", default=50, show_default=True)
@click.option("--rank", default=16, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
def main(prompts: int, rank: int, threads: int, model: str) -> None:
    """Print how many answers are equal."""
    path = resolve_model(model, progress=lambda _: None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = write_adapter(folder / "adapter", path, rank=rank, scale=SCALE, dtype=torch.bfloat16)
        adapter = Adapter(read_adapter(made).digest, str(made))
        asked = np.random.default_rng(1).integers(10, 1000, (prompts, 40))
        wide = {
            str(kind).removeprefix("torch."): merge(
                folder / f"merged_{kind}", widened(folder / str(kind), path, kind), made
            )
            for kind in (torch.bfloat16, torch.float32, torch.float64)
        }
        truth, logits = truth_of(wide["float64"], torch.from_numpy(asked))
        answers: dict[str, list[list[int]]] = {}
        for dtype in ("bfloat16", "float32"):
            kinds = {"adapter": (path, adapter), "merged into bfloat16": (wide["bfloat16"], None)}
            if dtype == "float32":
                kinds["merged into float32"] = (wide["float32"], None)
            for title, (at, given) in kinds.items():
                runner = runner_of(at, threads, 1, dtype)
                got = [generate(runner, prompt, given, TOKENS) for prompt in asked.tolist()]
                answers[f"{dtype}, {title}"] = got
                click.echo(f"{dtype}, {title}: {compare(got, truth, logits)}")
        for one, other in (
            ("bfloat16, adapter", "bfloat16, merged into bfloat16"),
            ("float32, adapter", "float32, merged into float32"),
        ):
            equal = sum(a == b for a, b in zip(answers[one], answers[other], strict=True))
            click.echo(f"{one} / {other}: {equal} of {prompts} equal")


if __name__ == "__main__":
    main()
