"""What an outage leaves behind: estimates must not refuse what can be served again."""

from __future__ import annotations

import pytest

from tests.router.admission.overload import Overload


@pytest.mark.slow
@pytest.mark.parametrize("num_meanwhile", [4, 20, 60])
@pytest.mark.parametrize("outage_s", [60.0, 240.0])
def test_after_an_outage_nothing_is_refused_that_was_served_before(
    num_meanwhile: int, outage_s: float
) -> None:
    s = Overload(slots=8)
    s.offer(12.0, 0.0, 20.0)  # half as much again as it serves
    s.run(60.0)
    s.is_frozen = True
    s.offer(num_meanwhile / 2, 60.0, 62.0)
    s.run(60.0 + outage_s)
    s.is_frozen = False
    num_before = len(s.clients)
    s.offer(40.0, s.now, s.now + 10.0)  # their timeouts allow for the queue that they make
    s.run(s.now + 20.0)
    later = s.clients[num_before:]
    assert len(later) == 400
    assert [client.refused for client in later if client.refused] == []
