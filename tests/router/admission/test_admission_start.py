"""The first load of a server: little is known yet of how fast it is, and nothing is refused."""

from __future__ import annotations

import pytest

from tests.router.admission.overload import Overload
from tests.router.script import Script


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


def test_a_prompt_that_is_held_counts_for_what_is_left_of_it() -> None:
    s = Script("decode-0", max_inflight_per_worker=1)
    prompt = list(range(100, 140))
    s.holds("decode-0", device=prompt)
    s.submit("first", [1, 2, 3])
    s.submit("held", [*prompt, 7, 8])
    s.submit("other", [*prompt[1:], 7, 8])
    queue = s.router._requests.queue
    held, other = (queue._entries[name].units for name in ("held", "other"))
    assert other - held == pytest.approx(39)  # tokens: of the ten blocks, less one that is shorter
