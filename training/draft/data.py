"""What a head is trained on: answers with their hidden states, in files of some dozens each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.request import SamplingParams
from kvrelay.training.draft.prompts import Questions
from kvrelay.training.draft.target import Sample, Target

TEMPERATURES = (0.0, 0.8)  # files have them in turn


@dataclass(frozen=True, slots=True)
class Answers:
    """What one file has. hidden: all samples' states in order, bfloat16 [N, hidden_size]."""

    samples: list[Sample]
    hidden: torch.Tensor
    seconds: float = 0.0  # that it took

    def __iter__(self) -> Iterator[tuple[Sample, torch.Tensor]]:
        counts = [len(each.tokens) for each in self.samples]
        return zip(self.samples, torch.split(self.hidden, counts), strict=True)

    def first(self, count: int) -> Answers:
        samples = self.samples[:count]
        return Answers(samples, self.hidden[: sum(len(each.tokens) for each in samples)])

    def save(self, path: Path, seconds: float) -> None:
        """The file appears whole or not at all."""
        said = json.dumps([asdict(each) for each in self.samples])
        fresh = path.with_suffix(".part")
        save_file({"hidden": self.hidden}, fresh, {"samples": said, "seconds": f"{seconds:.3f}"})
        fresh.rename(path)

    @staticmethod
    def load(path: Path) -> Answers:
        with safe_open(path, framework="pt") as file:
            said = file.metadata()
            samples = [Sample(**each) for each in json.loads(said["samples"])]
            return Answers(samples, file.get_tensor("hidden"), float(said["seconds"]))


def tokens_of(tokenizer: Tokenizer, question: str) -> list[int]:
    if tokenizer.chat_template is None:
        return [*tokenizer.encode(question)]
    return [*tokenizer.chat_prompt([{"role": "user", "content": question}]).tokens]


def answer(
    target: Target, prompts: Sequence[Sequence[int]], temperature: float, seed: int, max_tokens: int
) -> Answers:
    """Prompts that leave no room for an answer are left out."""
    fitting = [each for each in prompts if len(each) + max_tokens <= target.length]
    if not fitting:
        raise ModelError(
            f"no prompt of {len(prompts)} leaves room for an answer of {max_tokens} tokens:"
            f" together they may have {target.length}"
        )
    stops = target.config.eos_token_ids
    params = [
        SamplingParams(max_tokens, temperature, seed=seed + at, stop_token_ids=stops)
        for at in range(len(fitting))
    ]
    samples = target.answers(fitting, params)
    hidden = [target.hidden_states(each) for each in samples]
    return Answers(samples, torch.cat(hidden))


def ask(questions: Questions, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    return [tokens_of(tokenizer, each) for each in questions.take(count)]


def frequent(answers: Iterable[Answers], vocab_size: int, count: int) -> tuple[torch.Tensor, float]:
    """The ids of the `count` most frequent tokens of answers, ascending, and the share of all that
    they are."""
    seen = torch.zeros(vocab_size, dtype=torch.int64)
    for each in answers:
        for sample in each.samples:
            said = torch.tensor(sample.tokens[sample.num_prompt_tokens :])
            seen += torch.bincount(said, minlength=vocab_size)
    ids = seen.argsort(descending=True, stable=True)[:count].sort().values
    return ids, float(seen[ids].sum() / seen.sum())


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded sequences; slot j - 1 here is slot j >= 1 of `head`."""

    tokens: torch.Tensor  # [B, L]: 1 to L of each
    hidden: torch.Tensor  # [B, L, hidden], after the norm: of tokens 0 to L - 1
    after: torch.Tensor  # [B, L, hidden]: of the tokens themselves
    is_answer: torch.Tensor  # [B, L]: what comes after the token is part of an answer

    @staticmethod
    def of(pairs: Sequence[tuple[Sample, torch.Tensor]]) -> Batch:
        width, size = max(len(s.tokens) for s, _ in pairs) - 1, pairs[0][1].shape[1]
        tokens = torch.zeros(len(pairs), width, dtype=torch.int64)
        hidden = torch.zeros(len(pairs), width, size, dtype=torch.bfloat16)
        after, is_answer = hidden.clone(), torch.zeros_like(tokens, dtype=torch.bool)
        for row, (sample, states) in enumerate(pairs):
            count = len(sample.tokens) - 1
            tokens[row, :count] = torch.tensor(sample.tokens[1:])
            hidden[row, :count], after[row, :count] = states[:-1], states[1:]
            is_answer[row, sample.num_prompt_tokens - 1 : count] = True
        return Batch(tokens, hidden, after, is_answer)


def batches(
    pairs: Sequence[tuple[Sample, torch.Tensor]], num_tokens: int, seed: int
) -> list[list[int]]:
    """The places in `pairs` of each batch of one epoch, of about `num_tokens`."""
    order = [*range(len(pairs))]
    Random(seed).shuffle(order)
    order.sort(key=lambda at: len(pairs[at][0].tokens) // 64)  # little is padded
    found: list[list[int]] = [[]]
    for at in order:
        widest = max(len(pairs[each][0].tokens) for each in (*found[-1], at))
        if found[-1] and widest * (len(found[-1]) + 1) > num_tokens:
            found.append([])
        found[-1].append(at)
    Random(seed).shuffle(found)
    return found
