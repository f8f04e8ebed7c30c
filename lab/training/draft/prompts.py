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

from kvrelay.lab.training.corpus import sentences

HELD_OUT_EVERY = 12  # word of each list, and prompt of a user's own
PASSAGE_SENTENCES = (3, 9)
_ROLES = (
    "baker, fisherman, young wizard, detective, old clockmaker, gardener, pilot, shy dragon,"
    " nurse, violin player, robot, farmer, librarian, sailor, thief, teacher, princess,"
    " blacksmith, painter, lost dog, postman, astronaut, beekeeper, cook, carpenter, ghost,"
    " student, taxi driver, miner, mountain guide, doctor, fox, shepherd, tailor, king, dancer,"
    " watchman, inventor, twin, judge"
)
_THINGS = (
    "broken bridge, secret letter, map, lost key, long winter, stolen painting, new neighbour,"
    " river, birthday party, forgotten village, race, magic mirror, cat, strange sound at night,"
    " old tree, train journey, missing child, flood, treasure chest, friendship, locked door,"
    " first snow, war, talking bird, garden, market, red balloon, hidden cave, wedding, promise,"
    " island, mistake, broken clock, desert, photograph, ship, music box, dark forest,"
    " competition, journey home"
)
_PLACES = (
    "Germany, Japan, Brazil, Canada, Egypt, India, Italy, Kenya, Mexico, Norway, Peru, Poland,"
    " Spain, Sweden, Turkey, Vietnam, Australia, Austria, Chile, China, Cuba, Denmark, Finland,"
    " Greece, Hungary, Iceland, Ireland, Morocco, Nepal, New Zealand, Portugal, South Korea,"
    " Thailand, the Netherlands, Argentina, Belgium, Colombia, Indonesia, Switzerland, the United"
    " Kingdom"
)
_TOPICS = (
    "photosynthesis, gravity, inflation, the water cycle, black holes, vaccines, democracy, DNA,"
    " machine learning, plate tectonics, the French Revolution, the Roman Empire, electricity,"
    " magnets, climate change, the stock market, evolution, the human heart, sleep, memory, the"
    " internet, encryption, databases, operating systems, nuclear energy, solar panels, the"
    " Renaissance, jazz, chess, poetry, philosophy, supply and demand, the immune system,"
    " volcanoes, glaciers, the Moon, the Silk Road, the printing press, steam engines, rainbows,"
    " bacteria, fermentation, recycling, the solar system, atoms, probability, prime numbers,"
    " triangles, algorithms, language, ethics"
)
_SKILLS = (
    "bake bread, learn a language, write a letter, plan a trip, save money, grow tomatoes, sleep"
    " well, prepare for an interview, run five kilometres, cook rice, paint a wall, change a"
    " tyre, make tea, give a speech, study for an exam, clean a kitchen, choose a laptop, meet"
    " new friends, meditate, take good photographs, write a report, train a puppy, fix a leaking"
    " tap, manage time, draw a face, read more books, stay healthy, start a small business, play"
    " the guitar, build a bookshelf"
)
_SETS = (
    "fruits, vegetables, sports, musical instruments, cities in Europe, planets, inventions,"
    " rivers, famous scientists, hobbies, board games, tools, kinds of weather, jobs, healthy"
    " breakfasts, trees, flowers, ways to save energy, programming languages, kitchen utensils,"
    " birds, books, materials, holidays, vehicles, desserts, school subjects, insects, languages,"
    " ways to relax"
)
_PROGRAMS = (
    "reverses a string, counts the words of a file, finds the largest number of a list, sorts a"
    " list, tells whether a number is prime, removes duplicates from a list, converts Celsius to"
    " Fahrenheit, merges two dictionaries, reads a CSV file, computes a factorial, finds the"
    " vowels of a word, flattens a nested list, checks a password, draws a random card, adds two"
    " matrices, parses a date, counts the letters of a text, tells whether a word is a"
    " palindrome, splits a bill, rolls two dice"
)
WORDS = {
    name: words.split(", ")
    for name, words in {
        "role": _ROLES,
        "thing": _THINGS,
        "place": _PLACES,
        "topic": _TOPICS,
        "skill": _SKILLS,
        "set": _SETS,
        "program": _PROGRAMS,
    }.items()
}
FORMS = (
    "Write a short story about a {role} and a {thing}.",
    "Tell me a story in which a {role} finds a {thing}.",
    "Write a story for children about a {role} who has a {thing}.",
    "Write a poem about a {role} and a {thing}.",
    "What is the capital of {place}, and what is it known for?",
    "What is {place} famous for?",
    "Why do people like to visit {place}?",
    "What is {topic}, and why does it matter?",
    "Explain {topic} in simple words.",
    "How does {topic} affect our lives?",
    "What should a beginner know about {topic}?",
    "How do I {skill}?",
    "Give me some tips to {skill}.",
    "I would like to {skill}. Where do I begin?",
    "List ten {set} with one sentence about each.",
    "Name some {set} and say what is special about them.",
    "Write a letter to a {role} about a {thing}.",
    "Write an email to a {role} who wants to {skill}.",
    "Write a Python function that {program}.",
    "Write a program that {program}, and explain it.",
)
FORMS_OF_PASSAGES = (
    "Sum up this text:\n\n{passage}",
    "Quote the important sentences of this text:\n\n{passage}",
    "Explain this text to a beginner:\n\n{passage}",
    "What is this text about?\n\n{passage}",
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
