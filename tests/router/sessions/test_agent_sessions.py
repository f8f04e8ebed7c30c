"""Sessions of agents that have one name for all their conversations."""

from __future__ import annotations

import pytest

from kvrelay.router.sessions.session import TAIL
from kvrelay.router.sessions.sessions import MAX_BRANCHES
from tests.router.sessions.session_script import SessionScript

SYSTEM = [7] * 100


def asked(number: int, *more: int) -> list[int]:
    """A prompt that begins as all do, then asks for something else, and ends as all do."""
    return [*SYSTEM, *range(number * 1000, number * 1000 + 40), *more, *[3] * TAIL]


@pytest.fixture
def agent() -> SessionScript:
    return SessionScript("decode-0")


def test_conversations_of_one_name_are_told_apart(agent: SessionScript) -> None:
    first = agent.turn("a", asked(1), has_branches=True)
    child = agent.turn("a", asked(2), has_branches=True)
    assert agent.names() == ["a", "a~2"]
    agent.turn("a", [*first, 5, 6], has_branches=True)
    agent.turn("a", [*child, 5, 6], has_branches=True)
    assert agent.names() == ["a", "a~2"]
    assert [agent.show(name).num_turns for name in ("a", "a~2")] == [2, 2]


def test_the_answer_may_come_back_otherwise(agent: SessionScript) -> None:
    """Templates leave reasoning out of earlier answers, and end prompts in several ways."""
    agent.turn("a", asked(1), has_branches=True)
    agent.turn("a", [*asked(1)[:-TAIL], 8, 8, 8, *range(40)], has_branches=True)
    assert agent.names() == ["a"]


def test_two_that_begin_at_once_are_two(agent: SessionScript) -> None:
    agent.begin("a", asked(1), has_branches=True)
    agent.begin("a", asked(2), has_branches=True)
    agent.begin("a", asked(1), has_branches=True)
    assert agent.names() == ["a", "a~2"]


def test_a_repeat_is_no_other_conversation(agent: SessionScript) -> None:
    request_id = agent.begin("a", asked(1), has_branches=True)
    agent.tell(agent.router._requests.live[request_id].submit)
    assert agent.names() == ["a"]


def test_a_name_that_a_client_gives_is_one_conversation(agent: SessionScript) -> None:
    agent.turn("a", asked(1))
    agent.turn("a", asked(2))
    assert agent.names() == ["a"]


def test_after_a_restart_it_is_known_by_what_it_began_with(agent: SessionScript) -> None:
    tokens = agent.turn("a", asked(1), has_branches=True)
    session = agent.router.sessions.table.find("", "a")
    assert session is not None
    again = SessionScript("decode-0", records=[session.record(agent.now)])
    again.turn("a", [*tokens, 5], has_branches=True)
    again.turn("a", [9] * 150, has_branches=True)
    assert again.names() == ["a", "a~2"]


def test_there_are_at_most_so_many_and_the_oldest_makes_room(agent: SessionScript) -> None:
    for number in range(1, MAX_BRANCHES + 1):
        agent.turn("a", asked(number), has_branches=True)
        agent.now += 1.0
    agent.turn("a", [*asked(1)[:-TAIL], 4, 4], has_branches=True)  # the second is the oldest now
    agent.turn("a", asked(99), has_branches=True)
    assert len(agent.names()) == MAX_BRANCHES
    assert agent.show("a").num_turns == 2
    assert agent.show("a~2").num_turns == 1
    agent.turn("a", asked(2), has_branches=True)
    assert agent.show("a~3").num_turns == 1


def test_where_all_are_in_use_one_more_is_of_no_session(agent: SessionScript) -> None:
    for number in range(1, MAX_BRANCHES + 1):
        agent.begin("a", asked(number), has_branches=True)
    request_id = agent.begin("a", asked(99), has_branches=True)
    assert agent.router._requests.live[request_id].submit.session is None
    assert len(agent.names()) == MAX_BRANCHES


NAMELESS = {"has_branches": True, "has_twins": True}


def test_agents_without_names_that_begin_alike_have_a_session_each(agent: SessionScript) -> None:
    one = agent.turn("q", asked(1), **NAMELESS)
    other = agent.turn("q", asked(1), **NAMELESS)
    assert agent.names() == ["q", "q~2"]
    one = agent.turn("q", [*one, 5, 6], **NAMELESS)
    other = agent.turn("q", [*other, 5, 7], **NAMELESS)
    assert agent.names() == ["q", "q~2"]
    assert [agent.show(name).num_turns for name in ("q", "q~2")] == [2, 2]
    for tokens, name in ((one, "q"), (other, "q~2")):
        before = agent.show(name).num_turns
        agent.turn("q", [*tokens, 8], **NAMELESS)
        assert agent.show(name).num_turns == before + 1


def test_an_agent_without_a_name_goes_on_though_its_answer_comes_back_otherwise(
    agent: SessionScript,
) -> None:
    agent.turn("q", asked(1), **NAMELESS)
    agent.turn("q", [*asked(1)[:-TAIL], 8, 8, 8, *range(40)], **NAMELESS)
    assert agent.names() == ["q"]


def test_a_turn_under_way_is_another_agents(agent: SessionScript) -> None:
    agent.begin("q", asked(1), **NAMELESS)
    request_id = agent.begin("q", asked(1), **NAMELESS)
    agent.tell(agent.router._requests.live[request_id].submit)
    assert agent.names() == ["q", "q~2"]
