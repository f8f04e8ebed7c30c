"""A few configurations of each family, and those in which the fuzz has found a difference;
`python -m tests.fuzz.families` compares more."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from tests.engine.model import tiny
from tests.fuzz.families import FAMILIES, Fields, Outcome, compare_fields, fuzz

COUNT, SEED = 4, 1000
COARSE = {"rms_norm_eps": 1e-2}  # which shows where it is not the epsilon of all norms
QWEN_MOE = {**tiny.DELTA, **tiny.SPARSE, "norm_topk_prob": False}
ONE_SIZE = {**tiny.GEMMA4, "global_head_dim": 32}
NO_EPS = {"num_local_experts": 4, "head_dim": 16}
FOUND: dict[str, tuple[Any, Fields]] = {
    "deepseek2-latent-eps": (transformers.DeepseekV2Config, tiny.LATENT | COARSE),
    "deepseek3-latent-eps": (
        transformers.DeepseekV3Config,
        {**tiny.LATENT, **tiny.GROUPS, **COARSE},
    ),
    "mistral4-latent-eps": (
        transformers.Mistral4Config,
        {**tiny.LATENT, "q_lora_rank": 48, **tiny.GROWTH, **COARSE},
    ),
    "glm4-lite-latent-eps": (
        transformers.Glm4MoeLiteConfig,
        {**tiny.LATENT, "q_lora_rank": 48, "first_k_dense_replace": None, **COARSE},
    ),
    "phi3-eps-not-stated": (transformers.Phi3Config, tiny.PHI3),
    "mixtral-eps-not-stated": (transformers.MixtralConfig, NO_EPS),
    "qwen3.5-moe-always-normalizes": (transformers.Qwen3_5MoeTextConfig, QWEN_MOE),
    "gemma4-heads-of-one-size": (transformers.Gemma4TextConfig, ONE_SIZE),
    "kimi-linear-tied-with-a-head": (
        transformers.KimiLinearConfig,
        {**tiny.HYBRID["kimi-linear"][1], "tie_word_embeddings": True},
    ),
    "nemotron-tied-with-a-head": (
        transformers.NemotronHConfig,
        {**tiny.HYBRID["nemotron-h"][1], "tie_word_embeddings": True},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_configurations_give_the_logits_of_transformers(family: str) -> None:
    outcome = fuzz(family, COUNT, SEED)
    assert not outcome.different, "\n".join(outcome.different)
    assert outcome.compared >= COUNT // 2, (outcome.refused, outcome.impossible)


@pytest.mark.parametrize("as_given", [True, False], ids=["as-given", "as-saved"])
@pytest.mark.parametrize("case", FOUND)
def test_what_the_fuzz_has_found(case: str, as_given: bool) -> None:
    kind, fields = FOUND[case]
    outcome = Outcome()
    compare_fields(kind, {**tiny.SHAPE, **fields}, outcome, as_given, case)
    assert outcome.compared == 1, (outcome.refused, outcome.impossible)
    assert not outcome.different, "\n".join(outcome.different)
