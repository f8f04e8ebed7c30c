"""Every (state, event) pair of a process: a transition, or an error that changes nothing."""

from itertools import product

import pytest

from kvrelay.cluster.control.lifecycle import (
    RUNNING,
    TRANSITIONS,
    DesiredProcess,
    IllegalTransition,
    ProcessEvent,
    ProcessState,
)
from kvrelay.worker.messages import Peer


@pytest.mark.parametrize(("state", "event"), list(product(ProcessState, ProcessEvent)))
def test_pair(state: ProcessState, event: ProcessEvent) -> None:
    process = DesiredProcess("decode-0", 1, state)
    if (state, event) in TRANSITIONS:
        process.on(event)
        assert process.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"decode-0: {event} in state {state}"):
            process.on(event)
        assert process.state is state


@pytest.mark.parametrize("state", RUNNING)
def test_whatever_runs_may_end_and_may_be_wanted_no_more(state: ProcessState) -> None:
    assert TRANSITIONS[state, ProcessEvent.END] is ProcessState.BACKOFF
    assert TRANSITIONS[state, ProcessEvent.REMOVE] is ProcessState.GONE


def test_nothing_is_up_that_was_not_introduced() -> None:
    ways_up = [pair for pair, to in TRANSITIONS.items() if to is ProcessState.UP]
    assert ways_up == [(ProcessState.INTRODUCING, ProcessEvent.INTRODUCED)]


def test_gone_is_final() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] is ProcessState.GONE]


def test_one_that_has_ended_listens_nowhere_and_waits_for_nobody() -> None:
    process = DesiredProcess("decode-0", 1, ProcessState.INTRODUCING, Peer("decode-0", "h", 1, 1))
    process.pid, process.waiting_for = 7, {"prefill-0"}
    process.end(ProcessEvent.END)
    assert (process.peer, process.pid, process.waiting_for) == (None, 0, set())
