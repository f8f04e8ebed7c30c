"""What the small hybrid model is trained on: sentences of Python's reference, and who likes what.

The reference is what `help()` shows, which every Python has (`pydoc_data`, PSF licence). Between
its sentences people like things, as drawn anew for each conversation: nothing but what was read
before a question answers it.
"""

from __future__ import annotations

import random
import re
from pydoc_data.topics import topics
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END, SYSTEM, USER, ASSISTANT = SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_NAMES = (
    "Ada Anna Ben Bruno Carla Clara Dora Edgar Emil Ella Felix Frida Greta Hugo Ida Ivan Jonas"
    " Karl Lena Leo Maja Mila Nina Oskar Otto Paula Rosa Sara Theo Tilda Viktor Wanda"
)
_THINGS = (
    "apples beans birds boats bells books bread cakes carrots cats cheese cherries clocks coffee"
    " cows dates dogs drums ducks eggs figs fish flowers frogs grapes horses kites lamps lemons"
    " maps melons milk nuts onions pears peas pianos plums poems rain rice roses sheep ships snow"
    " songs stars trains"
)
NAMES, THINGS = _NAMES.split(), _THINGS.split()
NUM_FACTS = 8  # that a conversation begins with
HELD_OUT = 0.05  # share of the reference that is not trained on
NO_TARGET = -100


def fact(name: str, thing: str) -> str:
    return f" {name} likes {thing}."


def question(name: str) -> str:
    return f" What does {name} like?"


def sentences() -> list[str]:
    """Lists those of the reference, each with a space before it."""
    found: list[str] = []
    for topic in sorted(topics):
        plain = re.sub(r"[*`|]+|[-=~+^]{3,}", "", topics[topic])
        found += re.split(r"(?<=[.:])\s+", " ".join(plain.split()))
    return [f" {each}" for each in found if 20 < len(each) < 400]


def make_tokenizer() -> Tokenizer:
    """Bytes in pairs of pairs; each name and each thing is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = " ".join([*NAMES, *THINGS])
    text = [*sentences(), *[f" {words} What does like likes?"] * 50]
    tokenizer.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


class Sample(NamedTuple):
    tokens: list[int]
    targets: list[int]  # what follows each token, or NO_TARGET
    answers: list[int]  # places whose target is what someone likes


class Corpus:
    """Draws conversations. Owned by one training."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._encode = tokenizer.encode
        self._random = random.Random(seed)
        vocabulary = tokenizer.get_vocab()
        self._special = {each: vocabulary[each] for each in SPECIAL}
        ids = [each.ids for each in tokenizer.encode_batch(sentences())]
        self._random.shuffle(ids)
        cut = int(len(ids) * HELD_OUT)
        self._sentences = ids[cut:]
        self.held_out = [each for each in ids[:cut] if each not in self._sentences]

    def reference(self, length: int, held_out: bool = False) -> Sample:
        """Draws sentences that are about Python alone."""
        drawn: list[int] = []
        while len(drawn) <= length:
            drawn += self._random.choice(self.held_out if held_out else self._sentences)
        return Sample(drawn[:length], drawn[1 : length + 1], [])

    def conversation(self, length: int, before: int) -> Sample:
        """Facts among at least `before` tokens of sentences; questions and answers follow, up to
        `length` tokens."""
        rng, made = self._random, _Sequence()
        likes = dict(zip(rng.sample(NAMES, NUM_FACTS), rng.choices(THINGS, k=8), strict=True))
        made.add([self._special[SYSTEM]])
        stated: list[str] = []
        places = sorted(rng.randrange(before + 1) for _ in range(3))
        while len(made.tokens) < before:
            while places and len(made.tokens) >= places[0]:
                self._say_facts(made, likes, stated)
                places.pop()
            made.add(rng.choice(self._sentences), is_target=True)
        while len(stated) < NUM_FACTS:
            self._say_facts(made, likes, stated)
        made.add([self._special[END]])
        while len(made.tokens) <= length:
            name = rng.choice(stated)
            made.add([self._special[USER], *self._ids(question(name)), self._special[END]])
            made.add([self._special[ASSISTANT]])
            *words, thing, stop = self._ids(fact(name, likes[name]))
            made.add(words, is_target=True)
            made.answers.append(len(made.tokens) - 1)
            made.add([thing, stop, self._special[END]], is_target=True)
        answers = [place for place in made.answers if place < length]
        return Sample(made.tokens[:length], made.targets[1 : length + 1], answers)

    def _say_facts(self, made: _Sequence, likes: dict[str, str], stated: list[str]) -> None:
        """A few facts; some for the second time, which can be known then."""
        for _ in range(4):
            new = [name for name in likes if name not in stated]
            again = not new or bool(stated and self._random.random() < 0.4)
            name = self._random.choice(stated if again else new)
            *words, thing, stop = self._ids(fact(name, likes[name]))
            made.add(words)
            if again:
                made.answers.append(len(made.tokens) - 1)
            else:
                stated.append(name)
            made.add([thing], is_target=again)
            made.add([stop])

    def _ids(self, text: str) -> list[int]:
        return list(self._encode(text).ids)


class _Sequence:
    """Tokens as they are put together; `targets` has each token that is to be learnt."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.targets: list[int] = []
        self.answers: list[int] = []

    def add(self, ids: list[int], is_target: bool = False) -> None:
        self.tokens += ids
        self.targets += ids if is_target else [NO_TARGET] * len(ids)
