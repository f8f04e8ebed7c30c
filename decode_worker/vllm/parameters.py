"""From our sampling parameters to vLLM's, and what of them vLLM cannot do."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from kvrelay.engine.request import DEFAULTS, NUMBERS, SamplingParams
from kvrelay.engine.support import Capability, Trait, no_to


def unsupported(sampling: SamplingParams) -> str:
    """Why a request asks for what vLLM does not do by its public interface; "": it does not."""
    asked = {
        Capability.EMBEDDINGS: sampling.pooling is not None,
        Capability.REASONING_BUDGET: sampling.reasoning is not None,
        Capability.PENALTIES: bool(sampling.bad_words),
        Capability.GRAMMARS: bool(sampling.grammar) and not structure(sampling.grammar),
    }
    for capability in (each for each, is_asked in asked.items() if is_asked):
        if no := no_to(capability, (Trait.VLLM,)):
            return no.text
    for name, number in NUMBERS.items():
        if not number.in_vllm and getattr(sampling, name) != getattr(DEFAULTS, name):
            return f"vLLM has no {name}"
    return ""


def structure(grammar: str) -> dict[str, Any]:
    """`grammar` as of llguidance in the form that vLLM's guidance backend takes; {}: it has
    none."""
    if not grammar.lstrip().startswith("{"):
        return {"grammar": grammar}
    try:
        grammars = json.loads(grammar).get("grammars") or []
    except ValueError:
        return {}
    if len(grammars) != 1:
        return {}
    if grammars[0].get("json_schema") is not None:
        return {"json": json.dumps(grammars[0]["json_schema"])}
    lark = grammars[0].get("lark_grammar")
    return {"grammar": lark} if lark else {}


def depends_on_output(sampling: SamplingParams) -> bool:
    """Whether the next token depends on which of those before it are output: such a request cannot
    go on from a longer prompt."""
    counted = sampling.presence_penalty or sampling.frequency_penalty
    return bool(sampling.grammar or counted)


def options(sampling: SamplingParams, num_output_tokens: int, *, sent: bool) -> dict[str, Any]:
    """vLLM's parameters for one that has so many tokens of output, which it gets as prompt. `sent`:
    the router has the outputs of the prompt already."""
    seed = sampling.seed
    if num_output_tokens:  # else it would draw again as at the beginning
        drawn = f"{seed} {num_output_tokens}".encode()
        seed = int.from_bytes(blake2b(drawn, digest_size=7).digest())
    numbers = {name: getattr(sampling, name) for name, each in NUMBERS.items() if each.in_vllm}
    found: dict[str, Any] = {
        **numbers,
        "max_tokens": sampling.max_tokens - num_output_tokens,
        "min_tokens": max(0, sampling.min_tokens - num_output_tokens),
        "seed": seed & (1 << 63) - 1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": sampling.logprobs,
    }
    if not sent:
        found["prompt_logprobs"] = sampling.prompt_logprobs
    if sampling.logit_bias:
        found["logit_bias"] = dict(sampling.logit_bias)
    if sampling.allowed_token_ids:
        found["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.logprob_token_ids:
        found |= {"logprob_token_ids": list(sampling.logprob_token_ids), "logprobs": None}
    if sampling.grammar:  # which says when it may end: vLLM would be left without any token
        found |= {"structured_outputs": structure(sampling.grammar), "min_tokens": 0}
    return found
