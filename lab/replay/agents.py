"""Reads sessions of coding agents, in the format of kv-cache-tester, and makes a closed loop of
them: a turn is sent when what came before it has ended and its think time has passed.

A file has one session (JSON) or one a line (JSON lines), a folder has such files. What is known of
the published fields:

* `hash_ids` names the whole blocks of a prompt; ids of two sessions say nothing of each other.
* `t` of a turn is when it began, in seconds from its agent's start. `api_time` is how long it took;
  where it is missing, `ANSWER_S` and `TOKEN_S` stand for it.
* A subagent is nested among its parent's turns. It began `duration_ms` before its `t`, or at `t`
  where there is no duration: then the parent went on without it.

Think time is what lies between the published end of what a turn waits for and its beginning: the
turn before it, and every subagent that had ended by then.

An answer is part of the next prompt where that begins with all whole blocks of the prompt before
it, and is longer by at least the answer. A subagent has the session's name, as in an agent's
headers; the router tells the two apart.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count as numbers
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay.lab.replay.lines import (
    BadValueError,
    TraceError,
    amount,
    count,
    hash_ids,
    lines_of,
    member,
    opened,
    parsed,
    shown,
)
from kvrelay.lab.replay.trace import Answered, Trace, TraceRequest

ANSWER_S, TOKEN_S = 2.9, 0.0152  # least squares over `api_time` of 15,400 published requests
ROUNDED_S = 1.0  # `t` is in whole seconds
MAX_BLOCK_TOKENS = 1 << 16
MAX_FILE_BYTES = 256 << 20  # a session that has more than one line


@dataclass(frozen=True, slots=True)
class Draw:
    """Which sessions are replayed, and how fast. Raises ValueError."""

    sessions: int | None = None  # None: all, each once; more than there are: some again
    start_rate: float | None = None  # sessions/s, by a Poisson process; None: all start at once
    think_scale: float = 1.0
    max_input: int | None = None  # a session ends before a longer prompt
    max_think_s: float = float("inf")  # longer ones count as this, before they are scaled
    share_prompts: bool = False  # system prompts and tools of equal lengths are equal
    seed: int = 0

    def think_s(self, turn: _Turn) -> float:
        return min(turn.think_s, self.max_think_s) * self.think_scale


@dataclass(slots=True, eq=False)
class _Turn:
    """A request as published. Its agent is 0 for the session's own, from 1 for subagents."""

    agent: int
    index: int  # among its agent's
    starts_s: float
    ends_s: float
    input_length: int
    output_length: int
    hash_ids: array[int]  # there are a million of them in a long session
    after: list[_Turn] = field(default_factory=list)
    think_s: float = 0.0


@dataclass(slots=True)
class _Session:
    """As published. `openings`: by agent, how long its tools and its system prompt are."""

    name: str
    block_tokens: int
    turns: list[_Turn] = field(default_factory=list)
    openings: list[tuple[int, int]] = field(default_factory=list)


def are_sessions(path: Path) -> bool:
    """What the first line says: that of the file, or of the first file of a folder."""
    files = _files(path)
    with opened(files[0]) as stream:
        _, text = next(lines_of(stream, files[0]), (0, ""))
    return text in ("{", "[") or (text.startswith("{") and '"requests"' in text)


def read_sessions(path: Path, draw: Draw) -> Trace:
    """Those of a file or folder that `draw` chooses, as a closed loop. Raises TraceError."""
    there = sum(1 for _ in texts_of(path))
    rng = np.random.default_rng(draw.seed)
    wanted = there if draw.sessions is None else draw.sessions
    drawn: list[int] = []
    while len(drawn) < wanted:
        drawn += map(int, rng.permutation(there)[: wanted - len(drawn)])
    chosen = set(drawn)
    read: dict[int, _Session] = {}
    for number, (file, line, text) in enumerate(texts_of(path)):
        if number not in chosen:
            continue
        try:
            read[number] = _cut(_session(parsed(text)), draw.max_input)
        except BadValueError as error:
            raise TraceError(f"{file}, line {line}: {error}") from None
    sizes = {session.block_tokens for session in read.values()}
    if len(sizes) > 1:
        raise TraceError(f"{path}: block_size is {sorted(sizes)}; expected one for all sessions")
    sessions, copies = [], Counter[int]()
    for number in drawn:
        copies[number] += 1
        session = read[number]
        name = f"{session.name}.{copies[number]}" if copies[number] > 1 else session.name
        sessions.append(replace(session, name=name))
    return _closed_loop(path.name.split(".")[0], sessions, draw, rng)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if ".json" in each.name and each.is_file())
    if not files:
        raise TraceError(f"{path}: no file in it is called *.json or *.jsonl")
    return files


def texts_of(path: Path) -> Iterator[tuple[Path, int, str]]:
    """Sessions as text, with file and line."""
    for file in _files(path):
        with opened(file) as stream:
            lines = lines_of(stream, file)
            first = next(lines, None)
            if first is None:
                raise TraceError(f"{file}: empty; expected one session a line")
            if first[1] != "{":
                yield file, *first
                yield from ((file, *each) for each in lines)
                continue
            parts, size = [first[1]], 0
            for _, text in lines:
                parts.append(text)
                size += len(text)
                if size > MAX_FILE_BYTES:
                    raise TraceError(f"{file}: a session of more than {MAX_FILE_BYTES} bytes")
            yield file, 1, "\n".join(parts)


def _session(line: dict[str, Any]) -> _Session:
    name = member(line, "id")
    if not isinstance(name, str) or not name:
        raise BadValueError(f"id is {shown(name)}; expected a text")
    session = _Session(name, count(line, "block_size", 1, MAX_BLOCK_TOKENS))
    _add_agent(session, line, 0.0, None)
    if not session.turns:
        raise BadValueError("requests has none; expected at least one")
    session.turns.sort(key=lambda turn: (turn.starts_s, turn.agent, turn.index))
    return session


def _add_agent(
    session: _Session, line: dict[str, Any], start_s: float, parent: _Turn | None
) -> _Turn | None:
    """Adds the turns of an agent that began at `start_s`, after `parent`, and of its subagents.
    Returns the last of its own."""
    agent = len(session.openings)
    tools, system = (
        count(line, f"{each}_tokens", 0) if f"{each}_tokens" in line else 0
        for each in ("tool", "system")
    )
    session.openings.append((tools, system))
    requests = member(line, "requests")
    if not isinstance(requests, list):
        raise BadValueError(f"requests is {shown(requests)}; expected a list")
    own: list[_Turn] = []
    nested: list[tuple[int, dict[str, Any]]] = []
    for number, request in enumerate(requests):
        with _of_request(number):
            if not isinstance(request, dict):
                raise BadValueError(f"{shown(request)} is not a JSON object")
            if "requests" in request:
                nested.append((number, request))
            else:
                own.append(_turn(request, agent, start_s, session.block_tokens))
    own.sort(key=lambda turn: turn.starts_s)
    waited_for = []
    for number, request in nested:
        with _of_request(number):
            is_waited_for = request.get("duration_ms") is not None
            its_s = start_s + amount(request, "t", "seconds")
            if is_waited_for:
                its_s -= amount(request, "duration_ms", "milliseconds") / 1e3
            begun = [turn for turn in own if turn.starts_s <= its_s + ROUNDED_S]
            last = _add_agent(session, request, its_s, begun[-1] if begun else parent)
            if is_waited_for and last is not None:
                waited_for.append(last)
    for index, turn in enumerate(own):
        turn.index = index
        before = own[index - 1] if index else parent
        ended = [each for each in waited_for if each.ends_s <= turn.starts_s + ROUNDED_S and index]
        waited_for = [each for each in waited_for if each not in ended]
        turn.after = [*filter(None, (before,)), *ended]
        if turn.after:
            turn.think_s = max(0.0, turn.starts_s - max(each.ends_s for each in turn.after))
    session.turns += own
    return own[-1] if own else None


@contextmanager
def _of_request(number: int) -> Iterator[None]:
    try:
        yield
    except BadValueError as error:
        raise BadValueError(f"request {number}: {error}") from None


def _turn(request: dict[str, Any], agent: int, start_s: float, block_tokens: int) -> _Turn:
    starts_s = start_s + amount(request, "t", "seconds")
    input_length, output_length = count(request, "in", 1), max(1, count(request, "out", 0))
    if "api_time" in request:
        took_s = amount(request, "api_time", "seconds")
    else:
        took_s = ANSWER_S + TOKEN_S * output_length
    ids, whole = hash_ids(request), input_length // block_tokens
    if not whole <= len(ids) <= whole + 1:
        raise BadValueError(
            f"hash_ids has {len(ids)} ids; an input of {input_length} tokens has {whole} whole "
            f"blocks of {block_tokens}"
        )
    return _Turn(
        agent, 0, starts_s, starts_s + took_s, input_length, output_length, _packed(ids[:whole])
    )


def _packed(ids: Sequence[int]) -> array[int]:
    """In four bytes each where they fit: lists would take a gigabyte for 300 sessions."""
    return array("I" if max(ids, default=0) < 1 << 32 else "Q", ids)


def _cut(session: _Session, max_input: int | None) -> _Session:
    """What comes before the first prompt that is too long, for each agent."""
    if max_input is None:
        return session
    ended: set[int] = set()  # agents
    kept: list[_Turn] = []
    for turn in session.turns:
        after = [each for each in turn.after if each in kept]
        is_orphan = bool(turn.after) and not after
        if turn.agent in ended or turn.input_length > max_input or is_orphan:
            ended.add(turn.agent)
        else:
            turn.after = after
            kept.append(turn)
    session.turns = kept
    return session


@dataclass(slots=True, eq=False)
class _Placed:
    """A turn of a session that is replayed. `ids` are those of its blocks, the last of which may be
    partial."""

    turn: _Turn
    session: str
    at_s: float  # if each answer takes as long as published
    ids: array[int]
    reusable: int  # tokens
    number: int = 0  # the request's


class _Blocks:
    """Names the blocks of all sessions: equal ids, equal beginnings."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, int, int, _Placed]] = []  # block, start, end, whose
        self._next = numbers()
        self._openings: dict[tuple[int, ...], int] = {}

    def place(self, session: _Session, start_s: float, draw: Draw) -> dict[_Turn, _Placed]:
        size = session.block_tokens
        named: dict[tuple[int, int], int] = {}
        known: set[int] = set(self._openings.values()) if draw.share_prompts else set()
        last: dict[int, _Placed] = {}  # by agent
        placed: dict[_Turn, _Placed] = {}
        for turn in session.turns:
            before = last.get(turn.agent)
            ids = self._opening(*session.openings[turn.agent], size) if draw.share_prompts else []
            del ids[len(turn.hash_ids) :]
            goes_on = before is not None and self._goes_on(before, turn, named)
            for block in turn.hash_ids[len(ids) :]:
                key = (ids[-1] if ids else -1, block)
                ids.append(named[key] if key in named else named.setdefault(key, next(self._next)))
            shared = next((n for n, each in enumerate(ids) if each not in known), len(ids)) * size
            known.update(ids)
            if turn.input_length % size:
                is_longer = before is not None and goes_on and len(before.ids) > len(ids)
                ids.append(before.ids[-1] if before and is_longer else next(self._next))
            ends_s = [placed[each].at_s + each.ends_s - each.starts_s for each in turn.after]
            at_s = max(ends_s, default=start_s) + draw.think_s(turn)
            each = placed[turn] = last[turn.agent] = _Placed(
                turn, session.name, at_s, _packed(ids), shared
            )
            if before is not None and goes_on:
                each.reusable = before.turn.input_length
                self._add_answer(before, each, size)
        return placed

    def _opening(self, tools: int, system: int, size: int) -> list[int]:
        """The whole blocks of tools and, after them, a system prompt."""
        found, ids = self._openings, []
        for number in range((tools + system) // size):
            whole_tools = (number + 1) * size <= tools
            key = (tools, number) if whole_tools else (tools, system, number)
            if key not in found:
                found[key] = next(self._next)
            ids.append(found[key])
        return ids

    def _goes_on(self, before: _Placed, turn: _Turn, named: dict[tuple[int, int], int]) -> bool:
        """Whether `turn` begins with the whole prompt before it, and no prompt did so already. If
        so, that one's partial block is the beginning of the block that comes there now."""
        whole = len(before.turn.hash_ids)
        is_longer = turn.input_length >= before.turn.input_length
        if not is_longer or turn.hash_ids[:whole] != before.turn.hash_ids:
            return False
        if len(turn.hash_ids) == whole:
            return True
        key = (before.ids[whole - 1] if whole else -1, turn.hash_ids[whole])
        if key in named:
            return False
        if len(before.ids) > whole:
            named[key] = before.ids[whole]
        return True

    def _add_answer(self, before: _Placed, each: _Placed, size: int) -> None:
        start = before.turn.input_length
        end = start + before.turn.output_length
        if each.turn.input_length < end:
            return
        each.reusable = end
        for number in range(start // size, -(-end // size)):
            first = number * size
            part = max(0, start - first), min(size, end - first)
            self.answers.append((each.ids[number], *part, before))


def _closed_loop(
    name: str, sessions: Sequence[_Session], draw: Draw, rng: np.random.Generator
) -> Trace:
    blocks, at_s = _Blocks(), 0.0
    all_placed: list[dict[_Turn, _Placed]] = []
    for session in sessions:
        if session.turns:
            all_placed.append(blocks.place(session, at_s, draw))
            if draw.start_rate is not None:
                at_s += float(rng.exponential(1 / draw.start_rate))
    if not all_placed:
        raise TraceError(f"{name}: no session has a prompt of at most {draw.max_input} tokens")
    ordered = sorted((e for its in all_placed for e in its.values()), key=lambda each: each.at_s)
    for number, each in enumerate(ordered):
        each.number = number
    number_of = [{turn: each.number for turn, each in its.items()} for its in all_placed]
    made: dict[int, TraceRequest] = {}
    for its, numbered in zip(all_placed, number_of, strict=True):
        for turn, each in its.items():
            made[each.number] = TraceRequest(
                at_s=each.at_s,
                input_length=turn.input_length,
                output_length=turn.output_length,
                block_ids=each.ids,
                session=each.session,
                after=tuple(numbered[before] for before in turn.after),
                think_s=draw.think_s(turn),
                turn=turn.index,
                reusable=each.reusable,
            )
    answers: defaultdict[int, list[Answered]] = defaultdict(list)
    for block, start, end, each in blocks.answers:
        answers[block].append(Answered(start, end, each.number))
    left_out = len(sessions) - len(all_placed)
    notes = [f"{left_out} sessions begin with a longer prompt: they are left out"] * (left_out > 0)
    return Trace(
        f"{name}: {len(all_placed)} sessions",
        tuple(made[number] for number in range(len(ordered))),
        sessions[0].block_tokens,
        tuple(notes),
        {block: tuple(parts) for block, parts in answers.items()},
    )
