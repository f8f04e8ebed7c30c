from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kvtransfer.movers.agent_kit import AgentMaker, agent_maker


@pytest.fixture
def make() -> Iterator[AgentMaker]:
    with agent_maker() as maker:
        yield maker
