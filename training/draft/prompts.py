"""What a model is asked so that a draft head can learn from its answers.

Questions of many kinds are put together from lists of words, and passages of Python's reference
(`pydoc_data`, PSF licence) are given to be summed up, quoted and explained. Some words and passages
are only in questions that are held out. The prompts of `benchmarks.engine.speculation` are neither:
nothing here names their subjects.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from kvrelay.training.corpus import sentences

HELD_OUT_EVERY = 12  # word of each list, and prompt of a user's own
PASSAGE_SENTENCES = (3, 9)
WORDS = {
    kind: words.split(", ")
    for kind, words in {
        "role": "baker, young wizard, detective, gardener, pilot, shy dragon, robot, farmer,"
        " librarian, sailor, thief, blacksmith, painter, lost dog, postman, beekeeper, cook,"
        " ghost, student, nurse, taxi driver, doctor, king, tailor",
        "thing": "broken bridge, secret letter, lost key, long winter, new neighbour, river, cat,"
        " old tree, train journey, flood, friendship, locked door, garden, red balloon, wedding,"
        " promise, island, mistake, ship, dark forest, market, magic mirror, war, competition",
        "place": "Germany, Japan, Brazil, Canada, Egypt, India, Kenya, Mexico, Norway, Peru,"
        " Spain, Turkey, Vietnam, Australia, Chile, Poland, China, Greece, Iceland, Morocco,"
        " Nepal, Portugal, Thailand, Cuba",
        "topic": "photosynthesis, gravity, inflation, the water cycle, black holes, vaccines, DNA,"
        " machine learning, the Roman Empire, electricity, climate change, evolution, the human"
        " heart, memory, encryption, databases, solar panels, jazz, chess, the immune system,"
        " volcanoes, the printing press, ethics, probability",
        "skill": "bake bread, learn a language, plan a trip, save money, grow tomatoes, sleep"
        " well, cook rice, paint a wall, change a tyre, give a speech, choose a laptop, meet new"
        " friends, write a report, train a puppy, fix a leaking tap, manage time, draw a face,"
        " stay healthy, start a small business, play the guitar, prepare for an interview,"
        " meditate, run five kilometres, build a bookshelf",
        "set": "fruits, sports, musical instruments, inventions, rivers, famous scientists,"
        " hobbies, tools, jobs, healthy breakfasts, trees, birds, ways to save energy, kitchen"
        " utensils, books, holidays, vehicles, desserts, school subjects, insects, languages,"
        " materials, planets, ways to relax",
        "program": "reverses a string, counts the words of a file, sorts a list, converts Celsius"
        " to Fahrenheit, merges two dictionaries, reads a CSV file, computes a factorial, flattens"
        " a nested list, checks a password, draws a random card, adds two matrices, rolls two dice",
    }.items()
}
FORMS = (
    "Write a short story about a {role} and a {thing}.",
    "Tell me a story in which a {role} finds a {thing}.",
    "Write a poem about a {role} and a {thing}.",
    "Write a letter to a {role} about a {thing}.",
    "What is the capital of {place}, and what is it known for?",
    "What should a {role} who comes to {place} see there?",
    "What is {topic}, and why does it matter?",
    "Explain {topic} to a {role}.",
    "How does {topic} affect life in {place}?",
    "Give me some tips to {skill}.",
    "How does a {role} {skill}? Where do I begin?",
    "List ten {set} with one sentence about each.",
    "Name some {set} of {place} and say what is special about them.",
    "Write a Python function that {program}, and explain it to a {role}.",
)
FORMS_OF_PASSAGES = (
    "Sum up this text:\n\n{passage}",
    "Quote the important sentences of this text:\n\n{passage}",
    "Explain this text to a beginner:\n\n{passage}",
)
PASSAGE_EVERY = 8  # prompts


class Questions:
    """Draws prompts, the same ones for the same seed. Those that are held out and the others have
    no word or sentence of their subjects in common."""

    def __init__(self, seed: int, held_out: bool, own: Sequence[str] = ()) -> None:
        """own: prompts to take instead."""
        self._random = random.Random(f"{seed} {held_out}")
        self._words = {name: _part(words, held_out) for name, words in WORDS.items()}
        self._passages = _part(_passages(), held_out)
        self._own = cycle(_part(own, held_out)) if own else None
        self._seen: set[str] = set()

    def take(self, count: int) -> list[str]:
        """Puts none together twice, as long as there are others."""
        if self._own is not None:
            return [*islice(self._own, count)]
        return [self._next(index) for index in range(count)]

    def _next(self, index: int) -> str:
        for _ in range(100):
            chosen = {name: self._random.choice(words) for name, words in self._words.items()}
            forms = FORMS if index % PASSAGE_EVERY else FORMS_OF_PASSAGES
            text = self._random.choice(forms).format(
                **chosen, passage=self._random.choice(self._passages)
            )
            if text not in self._seen:
                break
        self._seen.add(text)
        return text


def read_prompts(path: Path, least: int = HELD_OUT_EVERY) -> list[str]:
    """One a line. Raises ValueError if there are fewer than `least`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if len(found) < least:
        raise ValueError(
            f"{path} has {len(found)} prompts, one a line: at least {least} are needed"
        )
    return found


def _part(words: Sequence[str], held_out: bool) -> list[str]:
    return [
        word
        for at, word in enumerate(words)
        if (at % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out
    ]


def _passages() -> list[str]:
    """Some sentences each that follow each other."""
    text, rng = sentences(), random.Random(0)
    found, at = [], 0
    while at < len(text):
        end = at + rng.randint(*PASSAGE_SENTENCES)
        found.append("".join(text[at:end]).strip()[:1500])
        at = end
    return found
