"""Random outputs by a grammar: of the tokens that a worker lets through, one by seed, mostly such
that end something. Each has to end, and to be read as what was asked for.

`python -m tests.cluster.api.zoo.walk SEEDS [MODEL...] [MODE...]` walks each so often."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.cluster.api.zoo.model import FILES, Model, Worker
from tests.cluster.api.zoo.modes import MODES, Mode
from tests.cluster.api.zoo.texts import SCHEMA, TOOLS

MAX_TOKENS = 600
P_CLOSE = 0.4  # that a token is one that ends something, where one may come
EVERY = 40  # tokens, a whole text that ends something is tried
_CLOSING = ('"', "}", '"}', "]", "\n", "<", "</", ">", "0", "true")


def closing(model: Model) -> np.ndarray:
    """Ids of tokens that end something."""
    tokenizer = model.tokenizer
    found = [token for text in _CLOSING for token in tokenizer.encode(text, is_prompt=False)[:1]]
    dialect = model.ctx.dialect
    assert dialect.tools is not None
    marks = (*(dialect.thinks or ()), *dialect.tools.markers)
    return np.array(sorted({*found, *tokenizer.added_ids(marks).values()}))


def closing_texts(model: Model) -> list[list[int]]:
    """Texts of several tokens that end something."""
    thinks = model.ctx.dialect.thinks or ()
    texts = (*thinks[1:], "\n</parameter>\n")
    return [model.tokenizer.encode(text, add_special_tokens=False) for text in texts]


def walk(model: Model, mode: Mode, seed: int) -> str:
    """What is wrong with the output of a seed; empty: nothing."""
    plan = model.plan(**mode.request(model), seed=seed)
    draw, worker = random.Random(seed), Worker(model, plan)
    ends, closers = [*model.tokenizer.eos_token_ids], closing(model)
    texts, planned = closing_texts(model), list[int]()
    for number in range(1, MAX_TOKENS):
        if number % EVERY == 0:
            planned = [*texts[number // EVERY % len(texts)]]
        mask = worker.mask()
        allowed = np.flatnonzero(mask)
        if not len(allowed):
            return f"nothing may come after {text_of(model, worker.output)!r}"
        if allowed[-1] >= model.tokenizer.vocab_size:
            return f"a token that is none may come after {text_of(model, worker.output)!r}"
        if worker.forced and not mask[worker.forced[0]]:
            return f"what has to come after {text_of(model, worker.output)!r} may not"
        chosen = [end for end in ends if mask[end]]
        if not chosen or draw.random() > (P_CLOSE if number < MAX_TOKENS // 2 else 1.0):
            near = closers[mask[closers]]
            chosen = near if len(near) and draw.random() < P_CLOSE else allowed
        token = int(draw.choice(chosen))
        if planned and token not in ends:
            token = planned.pop(0) if mask[planned[0]] else token
        if token in ends:
            told = model.told(plan, [*worker.output, token])
            wrong = what_is_wrong(mode, told)
            return wrong and f"{wrong}: {text_of(model, worker.output)!r} is told as {told}"
        worker.take(token)
    return f"it does not end: {text_of(model, worker.output)[-300:]!r}"


def text_of(model: Model, tokens: list[int]) -> str:
    return b"".join(map(model.tokenizer.token_bytes, tokens)).decode(errors="replace")


def what_is_wrong(mode: Mode, told: dict[str, Any]) -> str:
    calls, content = told.get("tool_calls", []), told["content"] or ""
    body = mode.body
    if "tool_choice" in body and body["tool_choice"] != "auto" and (not calls or content.strip()):
        return "no call, or more than calls"
    for call in calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        (tool,) = (tool["function"] for tool in TOOLS if tool["function"]["name"] == name)
        if not fits(tool["parameters"], arguments):
            return "arguments that do not fit"
    if "response_format" in body and not calls and not fits(SCHEMA, json.loads(content)):
        return "an answer that does not fit"
    return ""


def fits(schema: dict[str, Any], value: Any) -> bool:
    """By the keywords that the zoo's schemas have."""
    kinds: dict[str, Any] = {"object": dict, "string": str, "integer": int}
    if not isinstance(value, kinds[schema["type"]]) or isinstance(value, bool):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if schema["type"] != "object":
        return True
    parts = schema.get("properties", {})
    if any(name not in value for name in schema.get("required", ())):
        return False
    if schema.get("additionalProperties") is False and not value.keys() <= parts.keys():
        return False
    return all(fits(parts[name], each) for name, each in value.items() if name in parts)


def main() -> None:
    num, *given = sys.argv[1:]
    names = [each for each in FILES if each in given] or FILES
    modes = [each for each in MODES if each in given] or MODES
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            model = Model(name, Path(folder))
            for title in modes:
                mode = MODES[title]
                if mode.reasons and not model.thinks:
                    continue
                wrong = Counter[str]()
                for seed in range(int(num)):
                    try:
                        found = walk(model, mode, seed)
                    except Exception as error:
                        found = f"{type(error).__name__}: {error}"
                    if found:
                        wrong[found] += 1
                sys.stdout.write(f"{name} | {title} | {int(num) - wrong.total()} of {num}\n")
                for text, _ in wrong.most_common(3):
                    sys.stdout.write(f"    {text[:600]}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
