"""Where greedy bfloat16 tokens part from the reference, and how close the two best logits are.

python -m benchmarks.engine.bfloat16: 24 prompts, two pools, weights and KV in bfloat16, against the
implementation in `transformers` in bfloat16 and in float32.
"""

from __future__ import annotations

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.engine.request import SamplingParams
from kvrelay.router.config import RouterConfig
from tests.e2e.prompts import greedy, prompts
from tests.support.local import LocalCluster


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Output position of the first token that differs; None if all are the same."""
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


@click.command()
@click.option("--max-tokens", default=16, show_default=True)
@click.option("--max-prompt", default=4000, show_default=True, help="Leave longer prompts out.")
def main(max_tokens: int, max_prompt: int) -> None:
    """Compare, and print a table of where the answers part."""
    path = resolve_model(DEFAULT_MODEL, progress=lambda _: None)
    tokenizer = Tokenizer(path)
    tokens = [prompt for prompt in prompts(tokenizer) if len(prompt) <= max_prompt]
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        stop_token_ids=tokenizer.eos_token_ids,
        logprobs=2,
    )
    router = RouterConfig(policy="round_robin")
    with LocalCluster(path, dtype="bfloat16", router=router) as cluster:
        answers = [
            cluster.submit(prompt, sampling).result(300) for prompt in track(tokens, "kvrelay")
        ]
    against = {
        name: greedy(path, dtype, track(tokens, f"transformers, {name}"), max_tokens)
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
    }
    table = Table("prompt", "tokens", "parts from", "at output token", "margin of the two best")
    for index, answer in enumerate(answers):
        for name, expected in against.items():
            at = first_difference(answer.tokens, expected[index])
            if at is not None and at < len(answer.logprobs):
                best, second = answer.logprobs[at].top[:2]
                margin = f"{best[1] - second[1]:.3f}"
                table.add_row(str(index), str(len(tokens[index])), name, str(at), margin)
    console = Console()
    console.print(table)
    for name, expected in against.items():
        same = sum(a.tokens == e for a, e in zip(answers, expected, strict=True))
        console.print(f"the same tokens as transformers in {name}: {same} of {len(tokens)} prompts")


if __name__ == "__main__":
    main()
