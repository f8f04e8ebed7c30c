"""The load of the overload benchmark: what it sends and counts, against a small server."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from typing import Any

from benchmarks.serving.load import Answer, Caller, Load, Offer
from benchmarks.serving.overload import goodput, report

GOLD, BATCH = Caller("gold", "gold-key"), Caller("batch", "batch-key", 10)


class Refusing:
    """Answers gold, and refuses everybody else the first time that a body comes."""

    def __init__(self, retry_after_s: int) -> None:
        self._retry_after_s = retry_after_s
        self.bodies: Counter[bytes] = Counter()
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(line for line in head.split("\r\n") if "Content-Length" in line)
                body = await reader.readexactly(int(length.split(": ")[1]))
                self.bodies[body] += 1
                is_served = "gold-key" in head or self.bodies[body] > 1
                more = "" if is_served else f"retry-after: {self._retry_after_s}\r\n"
                status = "200 OK" if is_served else "429 Too Many Requests"
                writer.write(f"HTTP/1.1 {status}\r\n{more}content-length: 2\r\n\r\n{{}}".encode())
        except asyncio.IncompleteReadError:
            writer.close()


def run(offers: list[Offer], return_share: float, server: Refusing) -> list[Answer]:
    async def both() -> list[Answer]:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        async with listening:
            load = Load(f"http://127.0.0.1:{port}", input_len=8, output_len=4)
            return await load.run(offers, return_share, lambda done: None)

    return asyncio.run(asyncio.wait_for(both(), 30))


def test_each_offer_is_sent_at_its_rate_over_few_connections() -> None:
    server = Refusing(100)
    answers = run([Offer(GOLD, 200.0, 0.5), Offer(BATCH, 100.0, 0.5)], 0.0, server)
    statuses = Counter((answer.caller.tenant, answer.status) for answer in answers)
    assert set(statuses) == {("gold", 200), ("batch", 429)}
    assert 60 <= statuses["gold", 200] <= 140
    assert 25 <= statuses["batch", 429] <= 75
    assert len(server.bodies) == len(answers)  # all different
    assert server.connections < len(answers) / 2
    bodies: list[dict[str, Any]] = [json.loads(body) for body in server.bodies]
    assert {body["priority"] for body in bodies} == {0, 10}
    assert {body["max_tokens"] for body in bodies} == {4}


def test_who_is_refused_comes_back_when_told_with_the_same_request() -> None:
    server = Refusing(0)
    answers = run([Offer(BATCH, 50.0, 0.4)], 1.0, server)
    again = [answer for answer in answers if answer.is_return]
    assert again
    assert {answer.status for answer in again} == {200}
    assert set(server.bodies.values()) <= {1, 2}
    assert sum(server.bodies.values()) == len(answers)


def test_nobody_comes_back_after_the_load_has_ended() -> None:
    answers = run([Offer(BATCH, 50.0, 0.2)], 1.0, Refusing(60))
    assert not any(answer.is_return for answer in answers)


def answer(caller: Caller, sent_at: float, took_s: float, status: int, **more: Any) -> Answer:
    return Answer(
        caller, sent_at, sent_at=sent_at, ended_at=sent_at + took_s, status=status, **more
    )


def test_the_report_counts_what_was_served_in_time() -> None:
    answers = [answer(GOLD, 20.0 + n, 1.0, 200) for n in range(10)]
    answers += [answer(BATCH, 20.0, 25.0, 200)]  # late
    answers += [answer(BATCH, 20.0 + n, 0.01, 429) for n in range(3)]
    answers += [answer(BATCH, 25.0, 0.5, 429, is_return=True)]
    answers += [Answer(GOLD, 3.0, error="timeout")]
    assert goodput(answers, 20.0, 30.0) == 0.9  # what ended at 30 s belongs to what follows
    assert answers[-1].ended_at == math.inf
    _, result = report(answers, seconds=40.0, warm_up_s=0.0, peak=0.25)
    assert result["goodput_of_peak"] == 1.0
    assert (result["admitted"], result["late"]) == (11, 1)
    assert (result["refused"], result["refusals_in_time"]) == (4, 0.75)
    assert (result["returns"], result["returns_admitted"]) == (1, 0)
    assert result["other_errors"] == {"timeout": 1}
    assert result["served_by_tenant"] == {"gold": 10, "silver": 0, "batch": 0}
