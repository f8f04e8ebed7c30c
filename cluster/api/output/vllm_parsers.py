"""vLLM's parsers of tool calls and reasoning, where ours know no dialect (ADR 104).

They run in one process for each model, of the environment that has vLLM, and are asked once for
each part of a stream: the loop never waits for them, only the stream does. When the process ends,
another is started and told the parts so far; what it says of them again is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec

from kvrelay.cluster.api.output.dialect import Outside, Reading
from kvrelay.cluster.api.output.events import Arguments, CallBegin, Event, Reasoning, Text
from kvrelay.cluster.api.output.reader import is_json
from kvrelay.decode_worker.vllm.parse import Answer, Ask, Opened, Part, Ready, Said
from kvrelay.decode_worker.vllm.parser_process import NOTHING, START_S, ParserProcess
from kvrelay.engine.backoff import Backoff

_log = logging.getLogger("kvrelay.api")

ANSWER_S = 30.0  # to a part, the wait for others included; the process ends itself before
TRIES = 2  # processes that a part may end before it is left as it is
AT_ONCE = 512  # parts that are at the process; others wait for these
MOST_BYTES = 64 << 20  # a frame may have so many
AGAIN = Backoff(1.0, 60.0)  # after a start that failed


class ParsersAway(Exception):
    """There is no process, and why."""


class CallLost(Exception):
    """A call of a tool has begun, and cannot be read to its end."""


class _Process:
    """One that is ready. Invariant: each part that it is asked for gets its answer, or
    ConnectionError when it ends."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        ready: Ready,
    ) -> None:
        self.ready, self.is_over = ready, False
        self._process, (self._reader, self._writer) = process, streams
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._room = asyncio.Semaphore(AT_ONCE)
        self._listening = asyncio.create_task(self._listen())

    async def ask(self, ask: Ask) -> Answer:
        """Raises ConnectionError where the process ends, ConnectionAbortedError where this is what
        it was at: answers come in the order of questions."""
        number, coming = next(self._numbers), asyncio.get_running_loop().create_future()
        ask.number = number
        try:
            async with asyncio.timeout(ANSWER_S), self._room:
                if self.is_over:
                    raise ConnectionError
                self._asked[number] = coming
                self.send(ask)
                await self._writer.drain()
                answer: Answer = await coming
                return answer
        except TimeoutError:
            is_first = next(iter(self._asked), None) == number
            self.end()
            raise (ConnectionAbortedError if is_first else ConnectionError) from None
        except ConnectionError:
            self.end()  # what is written says so before what is read does
            raise
        finally:
            self._asked.pop(number, None)

    def send(self, ask: Ask) -> None:
        if not self.is_over:
            self._writer.write(msgspec.json.encode(ask) + b"\n")

    def end(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._process.kill()
        self._listening.cancel()
        self._writer.close()
        self._process.wait()
        for i, answer in enumerate(self._asked.values()):
            if not answer.done():
                answer.set_exception(ConnectionError() if i else ConnectionAbortedError())
                answer.exception()  # nobody may be left who waits for it

    async def _listen(self) -> None:
        decoder = msgspec.json.Decoder(Answer)
        with contextlib.suppress(OSError, ValueError):  # msgspec's is one
            while line := await self._reader.readline():
                answer = decoder.decode(line)
                asked = self._asked.get(answer.number)
                if asked is not None and not asked.done():
                    asked.set_result(answer)
        _log.warning("the process of vLLM's parsers has ended: another is started when needed")
        self.end()


class VllmParsers:
    """One model's. Owned by its context; used in the API's loop."""

    def __init__(self, command: ParserProcess) -> None:
        self._command = command
        self._starting: asyncio.Task[_Process] | None = None
        self._num_failed, self._not_before = 0, 0.0
        self._keys = map(str, count())

    def warm_up(self) -> None:
        """Begin to start the process, where there is none."""
        now, task = asyncio.get_running_loop().time(), self._starting
        is_there = task is not None and (not task.done() or self._running is not None)
        if not is_there and now >= self._not_before:
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def process(self) -> _Process:
        """Waits for one that is starting, START_S at most. Raises ParsersAway."""
        self.warm_up()
        assert self._starting is not None
        return await asyncio.shield(self._starting)

    async def known(self, reading: Reading, kwargs: Mapping[str, Any]) -> Reading:
        """`reading` with what a stream's parser has to know. `kwargs`: of the chat template. Raises
        ParsersAway."""
        if reading.outside is None:
            return reading
        shows = (await self.process()).ready.shows[reading.outside.calls]
        return replace(reading, outside=replace(reading.outside, kwargs=kwargs, shows=shows))

    def reader(self, reading: Reading, prompt: Sequence[int], *, is_whole: bool) -> VllmReader:
        """Make one for an output that follows the tokens of `prompt`. `is_whole`: nothing is sent
        before its end."""
        return VllmReader(self, reading, prompt, next(self._keys), is_whole=is_whole)

    def close(self) -> None:
        if self._running is not None:
            self._running.end()
        elif self._starting is not None:
            self._starting.cancel()
        self._starting = None

    @property
    def _running(self) -> _Process | None:
        task = self._starting
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return None if task.result().is_over else task.result()

    async def _start(self) -> _Process:
        try:
            process, ours = await asyncio.to_thread(self._command.start)
            try:
                async with asyncio.timeout(START_S):
                    streams = await asyncio.open_unix_connection(sock=ours, limit=MOST_BYTES)
                    line = await streams[0].readline() or NOTHING
                ready = msgspec.json.decode(line, type=Ready)
                if ready.error:
                    raise OSError(ready.error)
            except BaseException:
                process.kill()
                process.wait()
                raise
        except (OSError, ValueError) as error:  # TimeoutError among them
            self._num_failed += 1
            wait_s = AGAIN.pause_s(self._num_failed)
            self._not_before = asyncio.get_running_loop().time() + wait_s
            why = f"vLLM's parsers do not start: {error or type(error).__name__}"
            _log.error("%s; the next try in %g s", why, wait_s)
            raise ParsersAway(why) from error
        self._num_failed = 0
        return _Process(process, streams, ready)


class VllmReader:
    """One output, as vLLM's parsers read it. What they do not read, since they raise or end with
    it, is text as the model wrote it; CallLost where that leaves half a call.

    Where reasoning is read by ours, theirs get what follows it; where calls are, ours get what
    theirs leave as text.
    """

    def __init__(
        self,
        parsers: VllmParsers,
        reading: Reading,
        prompt: Sequence[int],
        key: str,
        *,
        is_whole: bool,
    ) -> None:
        assert reading.outside is not None
        self._parsers, self._key, self._is_whole = parsers, key, is_whole
        self._about: Outside = reading.outside
        self._given, self._prompt = reading.given, prompt
        self._before, self._after = reading.ours()
        self._calls_left = reading.most_calls
        self._process: _Process | None = None  # that knows the parts so far
        self._parts: list[Part] = []
        self._text, self._waiting = "", list[Part]()  # all; what waits for the end
        self._placed = 0  # character up to which texts were found in it
        self._arguments: str | None = None  # the call that began last has these
        self._is_lost = self._is_done = False

    async def read(self, parts: Sequence[Part], *, is_last: bool) -> tuple[Event, ...]:
        """What they add. Raises CallLost."""
        self._text += "".join(part.text for part in parts)
        if self._is_whole:
            self._waiting += parts
            if not is_last:
                return ()
            parts = self._waiting
        events: list[Event] = []
        if self._before is not None:
            parts = [
                Part(self._own(part.text, events) if part.text else "", part.ids) for part in parts
            ]
            parts += [Part(self._own("", events), ())] if is_last else []
        if parts or is_last:
            events += self._events(await self._asked([*parts], is_last=is_last))
        if self._after is not None:
            events = [*self._read_on(events)]
            events += self._after.finish() if is_last else []
        return tuple(self._limited(events))

    def _own(self, text: str, events: list[Event]) -> str:
        """Has ours read it, or the end of all (""); what is no reasoning is returned."""
        assert self._before is not None
        found = self._before.push(text) if text else self._before.finish()
        events += [event for event in found if not isinstance(event, Text)]
        return "".join(event.text for event in found if isinstance(event, Text))

    def close(self) -> None:
        """Have the process forget it: no part follows."""
        if self._process is not None and not self._is_done:
            self._process.send(Ask(0, self._key))

    async def _asked(self, parts: list[Part], *, is_last: bool) -> list[Said]:
        why = "it ends the process" if not self._is_lost else ""
        try:
            async with asyncio.timeout(START_S):
                num_ended = TRIES if self._is_lost else 0
                while num_ended < TRIES:
                    try:
                        answer = await self._answer(parts, is_last=is_last)
                    except ConnectionError as error:
                        num_ended += isinstance(error, ConnectionAbortedError)
                        continue
                    if not answer.error:
                        self._parts += parts
                        self._is_done = is_last
                        return answer.said
                    why = answer.error
                    break
        except (TimeoutError, ParsersAway) as error:
            why = str(error) or "it is not there in time"
        if why:
            self._is_lost = self._is_done = True
            _log.warning("vLLM's parser does not read an output, which stays text: %s", why)
        if self._arguments is not None and not is_json(self._arguments):
            raise CallLost("vLLM's parser has ended within a call of a tool")
        text = "".join(part.text for part in parts)
        return [("text", text, "")] if text else []

    async def _answer(self, parts: list[Part], *, is_last: bool) -> Answer:
        """Ask, with what the process has to know. Raises ParsersAway, ConnectionError."""
        process = await self._parsers.process()
        opened = None if process is self._process else self._opened()
        self._process = process
        return await process.ask(Ask(0, self._key, parts, is_last, opened))

    def _opened(self) -> Opened:
        about = self._about
        tools = [
            {
                "type": "function",
                "function": {"name": tool.name, "parameters": dict(tool.parameters)},
            }
            for tool in (self._given if about.calls else ())
        ]
        return Opened(
            *(tools, about.reasons, list(self._prompt), dict(about.kwargs)),
            *(self._is_whole, self._parts),
        )

    def _events(self, said: Sequence[Said]) -> Iterator[Event]:
        for kind, text, call_id in said:
            if kind == "call":
                self._arguments = ""
                yield CallBegin(text, call_id or None)
            elif kind == "arguments":
                self._arguments = (self._arguments or "") + text
                yield Arguments(text)
            else:
                yield Reasoning(text) if kind == "reasoning" else self._placed_text(text)

    def _placed_text(self, text: str) -> Text:
        """With where it stands in the output, if it does as a whole."""
        begin = self._text.find(text, self._placed)
        if begin < 0:
            return Text(text)
        self._placed = begin + len(text)
        return Text(text, ((begin, self._placed),))

    def _read_on(self, events: Sequence[Event]) -> Iterator[Event]:
        assert self._after is not None
        for event in events:
            if isinstance(event, Text):
                yield from self._after.push(event.text)
            else:
                yield event

    def _limited(self, events: Sequence[Event]) -> Iterator[Event]:
        """Without the calls that are too many."""
        for event in events:
            if isinstance(event, CallBegin) and self._calls_left is not None:
                self._calls_left -= 1
            is_call = isinstance(event, CallBegin | Arguments)
            if not is_call or self._calls_left is None or self._calls_left >= 0:
                yield event
