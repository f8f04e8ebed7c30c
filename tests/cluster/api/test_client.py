"""The API's end of the conversation with the router."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvrelay.cluster.api.client import RouterClient
from kvrelay.engine.request import FinishReason, Refusal, SamplingParams, TokenLogprobs
from kvrelay.router.messages import Cancel, Failed, Output, Submit


class Sent:
    """A client whose messages are kept."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.client = RouterClient("api-0", "router-0", lambda _, m: self.messages.append(m))

    def submit(self, name: str = "a", max_tokens: int = 8) -> Any:
        sampling = SamplingParams(max_tokens=max_tokens)
        return self.client.submit(Submit(name, sampling, self.client.node_id, (1, 2), 5.0))

    def receive(self, *messages: Any) -> None:
        for message in messages:
            assert self.client.receive(0.0, message) == []


@pytest.fixture
def sent() -> Sent:
    return Sent()


def test_submit_says_who_asks_and_outputs_come_in_order(sent: Sent) -> None:
    async def scenario() -> list[Any]:
        stream = sent.submit()
        sent.receive(Output("a", 0, (5,)))
        got = [await anext(stream)]
        sent.receive(Output("a", 1, (6, 7), finish=FinishReason.LENGTH))
        return got + [message async for message in stream]

    first, second = asyncio.run(scenario())
    (submit,) = sent.messages
    assert isinstance(submit, Submit)
    assert (submit.reply_to, submit.tokens, submit.timeout_s) == ("api-0", (1, 2), 5.0)
    assert first.tokens == (5,)
    assert (second.index, second.tokens, second.finish) == (1, (6, 7), FinishReason.LENGTH)
    assert sent.client.num_live == 0


def test_unread_outputs_are_merged_and_taken_in_slices(sent: Sent) -> None:
    stream = sent.submit()
    for i in range(5):
        logprobs = (TokenLogprobs(-float(i)),)
        sent.receive(Output("a", i, (10 + i,), logprobs, num_cached_tokens=2))
    sent.receive(Output("a", 5, (), finish=FinishReason.STOP))
    first = stream.take(3)
    assert (first.index, first.tokens, first.finish) == (0, (10, 11, 12), None)
    rest = stream.take(3)
    assert (rest.index, rest.tokens) == (3, (13, 14))
    assert [entry.logprob for entry in rest.logprobs] == [-3.0, -4.0]
    assert (rest.finish, rest.num_cached_tokens) == (FinishReason.STOP, 2)
    assert stream.take() is None


def test_a_repeated_output_counts_once(sent: Sent) -> None:
    stream = sent.submit()
    sent.receive(Output("a", 0, (5, 6)), Output("a", 0, (5, 6)), Output("a", 1, (6, 7)))
    assert stream.take().tokens == (5, 6, 7)


def test_a_gap_fails_the_request_and_cancels_it(sent: Sent) -> None:
    stream = sent.submit()
    sent.receive(Output("a", 0, (5,)), Output("a", 2, (7,)), Output("a", 3, (8,)))
    assert stream.take().tokens == (5,)
    failed = stream.take()
    assert failed.reason is Refusal.WORKER_FAILED
    assert "tokens 1 to 1 were lost" in failed.detail
    assert sent.messages[1:] == [Cancel("a")]
    assert sent.client.num_live == 0


def test_more_tokens_than_asked_for_fail_the_request(sent: Sent) -> None:
    stream = sent.submit(max_tokens=2)
    sent.receive(Output("a", 0, (5, 6)), Output("a", 2, (7,)))
    assert stream.take().tokens == (5, 6)
    assert stream.take().reason is Refusal.WORKER_FAILED
    assert sent.messages[1:] == [Cancel("a")]


def test_a_failure_comes_after_what_came_before_it(sent: Sent) -> None:
    stream = sent.submit()
    failed = Failed("a", Refusal.ATTEMPTS, "3 attempts failed")
    sent.receive(Output("a", 0, (5,)), failed)
    assert stream.take().tokens == (5,)
    assert stream.take() == failed
    assert sent.client.num_live == 0


def test_cancel_tells_the_router_once_and_ends_the_stream(sent: Sent) -> None:
    async def scenario() -> list[Any]:
        stream = sent.submit()
        reader = asyncio.create_task(anext(stream, None))  # waits
        await asyncio.sleep(0)
        sent.client.cancel("a")
        sent.client.cancel("a")
        sent.receive(Output("a", 0, (5,)))  # was on its way
        return [await reader]

    assert asyncio.run(scenario()) == [None]
    assert sent.messages[1:] == [Cancel("a")]


def test_a_finished_request_is_not_cancelled(sent: Sent) -> None:
    sent.submit()
    sent.receive(Output("a", 0, (5,), finish=FinishReason.STOP))
    sent.client.cancel("a")
    assert len(sent.messages) == 1


def test_one_signal_can_serve_several_streams(sent: Sent) -> None:
    async def scenario() -> tuple[Any, Any]:
        signal = asyncio.Event()
        sampling = SamplingParams()
        asked = [Submit(name, sampling, "api-0", (1,), 1.0) for name in "ab"]
        streams = [sent.client.submit(each, signal) for each in asked]
        sent.receive(Output("b", 0, (5,)))
        await asyncio.wait_for(signal.wait(), 5)
        return streams[0].take(), streams[1].take()

    nothing, output = asyncio.run(scenario())
    assert nothing is None
    assert output.request_id == "b"
