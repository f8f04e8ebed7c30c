"""Greedy tokens after long prompts of real text are those of transformers, on a model whose layers
mostly keep a window of 512 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.config import EngineSection
from kvrelay.engine.request import SamplingParams
from tests.e2e.prompts import blocks_for, greedy
from tests.structure import ROOT
from tests.support.local import LocalCluster

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(7200)]

PROMPT_TOKENS, MAX_TOKENS = 4000, 24


@pytest.mark.parametrize("num_prompts", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_prompts_of_4000_tokens(gemma3_dir: Path, num_prompts: int) -> None:
    """One may part: two tokens may be closer than the order of a sum makes a difference."""
    tokenizer = Tokenizer(gemma3_dir)
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))]
    text = tokenizer.encode("\n".join(pages), add_special_tokens=False)
    (bos,) = tokenizer.encode("")
    size = PROMPT_TOKENS - 1
    assert len(text) >= num_prompts * size, f"only {len(text)} tokens"
    prompts = [[bos, *text[at * size : (at + 1) * size]] for at in range(num_prompts)]
    ends = tuple(tokenizer.eos_token_ids)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, stop_token_ids=ends)
    engine = EngineSection(num_blocks=blocks_for(gemma3_dir, PROMPT_TOKENS + 100))
    with LocalCluster(gemma3_dir, prefill=0, engine=engine) as cluster:
        answers = [cluster.submit(prompt, sampling).result(600) for prompt in prompts]
        cluster.wait_idle()
        assert cluster.audit()["clean"], cluster.audit()
    expected = greedy(gemma3_dir, torch.float32, prompts, MAX_TOKENS)
    assert all(answer.failed is None for answer in answers)
    equal = [answer.tokens == want for answer, want in zip(answers, expected, strict=True)]
    print(f"{sum(equal)} of {num_prompts} equal; not: {[i for i, e in enumerate(equal) if not e]}")
    assert sum(equal) >= num_prompts - 1
