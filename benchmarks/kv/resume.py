"""Conversations that resume after their KV left the device, for `benchmarks.kv.tiers resume`.

Each conversation is computed once, its first turn. There are more of them than the device holds and
they go on in the order in which they began, so each has been pushed out by those after it when its
next turn comes. That turn finds its KV in the one tier with room for all, or on disk after the
server was ended and started again.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.serving.conversations import NEXT_MESSAGES, Conversation, http_client
from benchmarks.serving.first_light import BLOCK_SIZE, MODEL, time_one
from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.lab.bench.load import Client, LoadSpec, RequestTiming, make_prompts

SOURCES = ("host", "disk", "restart")
NUM_TURNS = 3  # at most: the first, one resumed from host or disk, one after a restart
SETTLED_S = 6.0  # no block came to a tier for so long: all that will come have come
SETTLE_TIMEOUT_S = 180.0
# Only for the time that is announced: two slow cores.
PREFILL_TOKENS_PER_S = 350.0
RESUME_S = 1.5
START_S = 20.0


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What is measured, and how much room it needs."""

    sessions: int = 40
    tokens: int = 4000  # in each conversation, about
    output_len: int = 16
    device_sessions: int = 4  # conversations that the device pool holds
    prefill: int = 0  # prefill workers; there is one decode worker
    kill: bool = False  # end the server before "restart" by SIGKILL
    check: int = 4  # conversations of each source whose answers are compared
    seed: int = 0

    @property
    def session_blocks(self) -> int:
        """KV blocks of a conversation at its end, with some to spare."""
        tokens = self.tokens + 64 + NUM_TURNS * (self.output_len + 48)
        return math.ceil(tokens / BLOCK_SIZE)

    def gib(self, num_sessions: int, dtype: str = "float32") -> float:
        """Room for that many conversations in a tier."""
        model = read_config(resolve_model(MODEL, progress=lambda _: None))
        block_bytes = model.kv_spec(BLOCK_SIZE, dtype).bytes_per_block
        return num_sessions * self.session_blocks * block_bytes / 2**30

    def settings(self, host_sessions: int, disk_sessions: int, folder: Path) -> dict[str, object]:
        """Describes a server with room for that many conversations in its tiers; 0: no such
        tier."""
        return {
            "engine.num_blocks": self.device_sessions * self.session_blocks,
            "tiers.host_gib": self.gib(host_sessions),
            "tiers.disk_gib": self.gib(disk_sessions),
            "tiers.disk_path": str(folder),
            "sessions.state_dir": str(folder / "state"),
        }

    def seconds(self, sources: Collection[str]) -> float:
        """About how long it will take."""
        groups = ("host" in sources) + bool({"disk", "restart"} & set(sources))
        num_computed = groups * self.sessions + min(groups, 1) * 2 * self.check
        starts = groups + ("restart" in sources) + bool(self.check)
        computing_s = num_computed * self.tokens / PREFILL_TOKENS_PER_S
        return computing_s + len(sources) * self.sessions * RESUME_S + starts * START_S

    @property
    def turn_weight(self) -> float:
        """A turn that is computed, in turns that are resumed."""
        return max(1.0, self.tokens / PREFILL_TOKENS_PER_S / RESUME_S)


@dataclass(frozen=True, slots=True)
class Resumed:
    """One source: turn number `turn` of every conversation took its KV from there."""

    source: str
    turn: int  # 0: the first
    talks: list[Conversation]

    @property
    def first(self) -> list[RequestTiming]:
        return [talk.timings[0] for talk in self.talks]

    @property
    def timings(self) -> list[RequestTiming]:
        return [talk.timings[self.turn] for talk in self.talks]


class ResumeRun:
    """One run of a plan. Owns its servers, one at a time, and the files of their disk tier.
    `advance` is told the weight of each turn that is done."""

    def __init__(
        self, plan: ResumePlan, parent: Path | None, advance: Callable[[float], None]
    ) -> None:
        self._plan = plan
        self._parent = parent
        self._advance = advance

    def measure(self, sources: Collection[str]) -> list[Resumed]:
        """Raises LoadFailed if one fails."""
        results = []
        if "host" in sources:
            results += self._from_host()
        if {"disk", "restart"} & set(sources):
            results += self._from_disk(sources)
        return results

    def count_same(self, resumed: Sequence[Resumed]) -> dict[str, int]:
        """By source: how many of the first `check` answers are what a server without tiers answers
        to the same messages, which it computes."""
        same = dict.fromkeys((each.source for each in resumed), 0)
        if not self._plan.check:
            return same
        with tempfile.TemporaryDirectory(dir=self._parent) as name:
            plain = self._plan.settings(0, 0, Path(name))
            with self._serve(plain) as server:
                for i in range(self._plan.check):
                    for each in resumed:
                        same[each.source] += self._is_same(server.url, each, i)
        return same

    def _from_host(self) -> list[Resumed]:
        plan = self._plan
        with tempfile.TemporaryDirectory(dir=self._parent) as name:
            settings = plan.settings(plan.sessions + 1, 0, Path(name))
            with self._serve(settings) as server:
                talks = self._begin(server.url)
                wait_settled(server.url, Tier.HOST)
                self._go_on(server.url, talks, NEXT_MESSAGES[0])
        return [Resumed("host", 1, talks)]

    def _from_disk(self, sources: Collection[str]) -> list[Resumed]:
        """The disk for all, and host memory for two: what the one before has not yet written to
        disk, while the next is computed."""
        plan, results = self._plan, []
        with tempfile.TemporaryDirectory(dir=self._parent) as name:
            folder = Path(name)
            settings = plan.settings(2, plan.sessions + 1, folder)
            with self._serve(settings) as server:
                talks = self._begin(server.url)
                wait_settled(server.url, Tier.DISK)
                if "disk" in sources:
                    drop_page_cache(folder)
                    self._go_on(server.url, talks, NEXT_MESSAGES[0])
                    results.append(Resumed("disk", 1, talks))
                    wait_settled(server.url, Tier.DISK)
                if plan.kill and "restart" in sources:
                    kill_tree(server.process.pid)
            if "restart" in sources:
                turn = 1 + len(results)
                with self._serve(settings) as server:
                    drop_page_cache(folder)
                    self._go_on(server.url, talks, NEXT_MESSAGES[turn - 1])
                results.append(Resumed("restart", turn, talks))
        return results

    def _serve(self, settings: dict[str, object]) -> Served:
        return Served(settings, "--prefill", str(self._plan.prefill), "--decode", "1")

    def _begin(self, url: str) -> list[Conversation]:
        plan = self._plan
        texts = make_prompts(LoadSpec("", "", plan.sessions, input_len=plan.tokens, seed=plan.seed))
        talks = [Conversation(f"session-{i}") for i in range(plan.sessions)]
        self._take_turn(url, talks, texts, plan.turn_weight)
        return talks

    def _go_on(self, url: str, talks: Sequence[Conversation], text: str) -> None:
        self._take_turn(url, talks, [text] * len(talks), 1.0)

    def _take_turn(
        self, url: str, talks: Sequence[Conversation], texts: Sequence[str], weight: float
    ) -> None:
        """Takes a turn of each, one after the other."""

        async def take() -> None:
            spec = LoadSpec(url, MODEL, 1, concurrency=1, output_len=self._plan.output_len)
            async with http_client(url) as http:
                client = Client(spec, http, lambda _: None)
                for talk, text in zip(talks, texts, strict=True):
                    await talk.say(client, text, prompt_cache_key=talk.name)
                    self._advance(weight)

        time_one(url, "Hello")  # what only the first request of a server pays for
        asyncio.run(take())

    def _is_same(self, url: str, resumed: Resumed, i: int) -> bool:
        talk, turn = resumed.talks[i], resumed.turn
        replay = Conversation(f"{talk.name}, again", messages=talk.messages[: 2 * turn])
        question, answer = talk.messages[2 * turn : 2 * turn + 2]
        self._take_turn(url, [replay], [question["content"]], self._plan.turn_weight)
        return replay.timings[0].text == answer["content"]


def wait_settled(url: str, tier: Tier) -> int:
    """Until no more blocks come into the tier; how many it holds. Raises RuntimeError."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    count, since = -1, time.monotonic()
    while time.monotonic() - since < SETTLED_S:
        if time.monotonic() > deadline:
            raise RuntimeError(f"blocks still come to the {tier} tier after {SETTLE_TIMEOUT_S} s")
        workers = httpx.get(f"{url}/status", timeout=30, auth=OwnKey()).json()["workers"]
        found = sum(worker[f"num_{tier}_blocks"] for worker in workers)
        if found != count:
            count, since = found, time.monotonic()
        time.sleep(0.5)
    return count


def drop_page_cache(folder: Path) -> None:
    """So that what is read next from these files comes from the disk, not from memory."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # only clean pages can be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all that it started: nobody gets to put anything in order."""
    top = psutil.Process(pid)
    tree = [top, *top.children(recursive=True)]
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(tree, timeout=10)
