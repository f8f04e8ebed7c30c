"""From our sampling parameters to vLLM's, and what of them vLLM cannot do.

`FATES` has every field of a request: one that is new is not dropped in silence, since a test looks
for it there. docs/engines.md has its texts in a table.
"""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from typing import Any

from kvrelay.engine.request import DEFAULTS, NUMBERS, SamplingParams
from kvrelay.engine.support import Capability, Trait, no_to

EDITS = "kvrelay"  # in `extra_args` of vLLM's parameters: arguments of `edits.RowEdits`

SAME = "the same"
FATES: dict[str, str] = {
    **dict.fromkeys(NUMBERS, SAME),
    "max_tokens": SAME,
    "top_p": "the same; 0: the likeliest token",
    "min_tokens": "the same; with a grammar, as far as that lets the output go on",
    "logit_bias": "the same; beside vLLM's own drafts refused with 400, and so is `min_p`",
    "stop_token_ids": "the same, those of the model among them",
    "seed": "only one that the client gives: without it vLLM keeps its fast sampler",
    "is_seeded": "says whether the client has given `seed`",
    "logprobs": SAME,
    "logprob_token_ids": "the same, at most 128",
    "allowed_token_ids": SAME,
    "bad_words": "the same, as tokens",
    "grammar": "its guidance backend, all parts as one",
    "reasoning": "by a logits processor; on GPUs, and beside vLLM's own drafts, refused with 400",
    "prediction": "nothing: a hint for drafts, which does not change what comes",
    "prompt_logprobs": SAME,
    "pooling": "refused with 400 but where vLLM pools, in that way, which is all that it does then",
    "expands": "its processor says what tokens the images of a prompt are",
}
"""What becomes of each field of `SamplingParams`."""

_WORD = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*|@(?P<part>\w+)')


def unsupported(
    sampling: SamplingParams, *, edits: bool = True, drafts: bool = False, pools: str = ""
) -> str:
    """Why a request asks for what vLLM does not do; "": it does not. `edits`: logits can be
    edited by us; `drafts`: vLLM proposes draft tokens of its own; `pools`: how it makes
    embeddings, which is all that it does then."""
    traits = {Trait.VLLM, Trait.POOLING if pools else Trait.NO_POOLING}
    traits |= set() if edits else {Trait.GPU}
    asked = {
        Capability.GENERATION: sampling.pooling is None,
        Capability.EMBEDDINGS: sampling.pooling is not None,
        Capability.REASONING_BUDGET: sampling.reasoning is not None,
        Capability.GRAMMARS: bool(sampling.grammar) and not structure(sampling.grammar),
    }
    for capability in (each for each, is_asked in asked.items() if is_asked):
        if no := no_to(capability, traits):
            return no.text
    if pools and sampling.pooling != pools:
        kind = f"engine.arguments.pooler_config = {{seq_pooling_type = '{pools.upper()}'}}"
        return f"'pooling': '{sampling.pooling}', and vLLM's workers have {kind}: ask '{pools}'"
    if drafts and (sampling.min_p or sampling.logit_bias):
        name = "min_p" if sampling.min_p else "logit_bias"
        return f"vLLM has no {name} beside its draft tokens (speculative_config)"
    for name, number in NUMBERS.items():
        if not number.in_vllm and getattr(sampling, name) != getattr(DEFAULTS, name):
            return f"vLLM has no {name}"
    return ""


def structure(grammar: str) -> dict[str, Any]:
    """`grammar` as of llguidance in the form that vLLM's guidance backend takes, which has one
    part; {}: it has none."""
    if not grammar.lstrip().startswith("{"):
        return {"grammar": grammar}
    try:
        first, *others = json.loads(grammar).get("grammars") or [{}]
    except ValueError:
        return {}
    if not others and first.get("json_schema") is not None:
        return {"json": json.dumps(first["json_schema"])}
    parts = {str(each.get("name")): each for each in others}
    lark = first.get("lark_grammar")
    text = _joined(lark, parts) if isinstance(lark, str) else ""
    return {"grammar": text} if text else {}


def _joined(lark: str, parts: dict[str, dict[str, Any]]) -> str:
    """`lark` with each part where it refers to it; "": one is not there, or refers to others."""

    def inlined(found: re.Match[str]) -> str:
        if found["part"] is None:
            return found[0]
        part = parts[found["part"]]
        if part.get("json_schema") is not None:
            return f"%json {json.dumps(part['json_schema'])}"
        inner = part["lark_grammar"]
        if any(word["part"] for word in _WORD.finditer(inner)):
            raise KeyError(inner)
        return f"%lark {{\n{inner}\n}}"

    try:
        return _WORD.sub(inlined, lark)
    except KeyError:
        return ""


def depends_on_output(sampling: SamplingParams) -> bool:
    """Whether the next token depends on which of those before it are output: such a request cannot
    go on from a longer prompt."""
    counted = sampling.presence_penalty or sampling.frequency_penalty
    return bool(sampling.grammar or counted or any(len(each) > 1 for each in sampling.bad_words))


def options(
    sampling: SamplingParams,
    given: tuple[int, ...] = (),
    known: tuple[int, ...] = (),
    *,
    sent: bool,
    edits: bool = True,
) -> dict[str, Any]:
    """vLLM's parameters. `given`: tokens of output that it gets as part of the prompt; `known`:
    that it generates once more; `sent`: the router has the outputs of the prompt already;
    `edits`: as of `unsupported`."""
    if sampling.pooling is not None:  # as it is: the API makes the length 1, after it has cut them
        return {"task": "embed", "use_activation": False}
    numbers = {name: getattr(sampling, name) for name, each in NUMBERS.items() if each.in_vllm}
    found: dict[str, Any] = {
        **numbers,
        "max_tokens": sampling.max_tokens - len(given),
        "min_tokens": max(0, sampling.min_tokens - len(given)),
        "seed": _seed(sampling, len(given), edits=edits),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": sampling.logprobs,
    }
    if not sampling.top_p:  # which vLLM takes for no share at all
        found |= {"top_p": 1.0, "top_k": 1}
    if not sent:
        found["prompt_logprobs"] = sampling.prompt_logprobs
    if sampling.logit_bias:
        found["logit_bias"] = dict(sampling.logit_bias)
    if sampling.allowed_token_ids:
        found["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.bad_words:  # where its own code has them when it has read texts
        found["_bad_words_token_ids"] = [list(each) for each in sampling.bad_words]
    if sampling.logprob_token_ids:
        found |= {"logprob_token_ids": list(sampling.logprob_token_ids), "logprobs": None}
    if sampling.grammar:  # which says when it may end: vLLM would be left without any token
        found |= {"structured_outputs": structure(sampling.grammar), "min_tokens": 0}
    if edits and (own := _edits(sampling, given, known)):
        found["extra_args"] = {EDITS: own}
    return found


def _seed(sampling: SamplingParams, num_given: int, *, edits: bool) -> int | None:
    """None: vLLM draws for all such requests at once. Where output is generated again and nothing
    holds it to what it was, draws have to be repeated."""
    if not sampling.is_seeded and (edits or not depends_on_output(sampling)):
        return None
    seed = sampling.seed
    if num_given:  # else it would draw again as at the beginning
        seed = int.from_bytes(blake2b(f"{seed} {num_given}".encode(), digest_size=7).digest())
    return seed & (1 << 63) - 1


def _edits(
    sampling: SamplingParams, given: tuple[int, ...], known: tuple[int, ...]
) -> dict[str, Any]:
    """Arguments of `edits.RowEdits`; {}: none is needed."""
    found: dict[str, Any] = {"known": list(known)} if known else {}
    if (budget := sampling.reasoning) is not None:
        found |= {"budget": [budget.max_tokens, budget.end, budget.start], "before": list(given)}
    if sampling.grammar and sampling.min_tokens:
        found |= {"min_tokens": sampling.min_tokens, "stops": list(sampling.stop_token_ids)}
    return found
