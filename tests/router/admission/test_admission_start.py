"""The first load of a server: little is known yet of how fast it is, and nothing is refused."""

from __future__ import annotations

import pytest

from tests.router.admission.overload import Overload
from tests.router.script import Script


@pytest.mark.slow
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


@pytest.mark.parametrize("says_times", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("first_token_s", [0.1, 10.0, 60.0])
def test_a_first_token_that_took_long_refuses_no_prompt_of_a_fresh_server(
    first_token_s: float, says_times: float
) -> None:
    """Its machine is slow or busy, and what is measured 100 times wrong: sixteen agents take 120 s
    of the 600 s that each has."""
    s = Overload(slots=64, prompt_tokens_per_s=10 / first_token_s)
    s.says_times = says_times
    s.submit(num_prompt_tokens=10)
    s.run(s.now + 10 * first_token_s)
    s.prompt_tokens_per_s = 400.0
    for turn in range(2):
        for _ in range(16):
            s.submit(num_prompt_tokens=3000 + turn)
            s.run(s.now + 0.7)
        s.drain()
    assert [client.refused for client in s.clients if client.refused] == []
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
