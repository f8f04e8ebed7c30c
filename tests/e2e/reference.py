"""Greedy answers of the reference implementation, `transformers`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import transformers


def greedy(
    model_dir: Path, dtype: torch.dtype, prompts: Iterable[list[int]], max_tokens: int
) -> list[list[int]]:
    """Up to `max_tokens` tokens for each prompt, one at a time, in `dtype`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            answers.append(out[0, len(prompt) :].tolist())
    return answers
