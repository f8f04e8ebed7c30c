"""The first load of a server: little is known yet of how fast it is, and nothing is refused."""

from __future__ import annotations

import pytest

from tests.router.admission.overload import Overload


@pytest.mark.parametrize(
    ("warm", "idle_s", "prompt_len"),
    [((), 0.0, 3000), ((10,), 0.0, 3000), ((10,), 30.0, 300), ((10, 500), 3.0, 3000)],
)
def test_many_long_prompts_at_once_after_the_start(
    warm: tuple[int, ...], idle_s: float, prompt_len: int
) -> None:
    """They take 200 s of the 600 that each has."""
    s = Overload(slots=64, prompt_tokens_per_s=700.0)
    for length in warm:
        s.submit(num_prompt_tokens=length)
        s.run(s.now + 3.0)
    s.run(s.now + idle_s)
    num_before = len(s.clients)
    for _ in range(200 * 700 // prompt_len):
        s.submit(num_prompt_tokens=prompt_len)
    s.drain()
    later = s.clients[num_before:]
    assert [client.refused for client in later if client.refused] == []
    assert s.served() == len(s.clients)
