"""Every (state, event) pair of both tables: a transition, or an error that changes nothing."""

from itertools import product

import pytest

from kvrelay.kvtransfer.peer.handoff import (
    CONSUMER,
    PRODUCER,
    ConsumerEvent,
    ConsumerState,
    IllegalTransition,
    ProducerEvent,
    ProducerState,
    next_consumer,
    next_producer,
)


@pytest.mark.parametrize(("state", "event"), list(product(ConsumerState, ConsumerEvent)))
def test_consumer_pair(state: ConsumerState, event: ConsumerEvent) -> None:
    if (state, event) in CONSUMER:
        assert next_consumer(state, event) is CONSUMER[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"{event} in state {state}"):
            next_consumer(state, event)


@pytest.mark.parametrize(("state", "event"), list(product(ProducerState, ProducerEvent)))
def test_producer_pair(state: ProducerState, event: ProducerEvent) -> None:
    if (state, event) in PRODUCER:
        assert next_producer(state, event) is PRODUCER[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"{event} in state {state}"):
            next_producer(state, event)


def test_only_confirmed_reads_are_used() -> None:
    ways_to_done = [pair for pair, to in CONSUMER.items() if to is ConsumerState.DONE]
    assert ways_to_done == [(ConsumerState.CONFIRMING, ConsumerEvent.CONFIRMED)]


def test_giving_up_while_reading_drains_first() -> None:
    assert next_consumer(ConsumerState.READING, ConsumerEvent.CANCEL) is ConsumerState.DRAINING


@pytest.mark.parametrize("state", [ConsumerState.DONE, ConsumerState.FAILED])
def test_consumer_ends_are_final(state: ConsumerState) -> None:
    assert not [pair for pair in CONSUMER if pair[0] is state]


def test_freed_is_final() -> None:
    assert not [pair for pair in PRODUCER if pair[0] is ProducerState.FREED]
