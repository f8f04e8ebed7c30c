"""A router knows the weights of a worker, whichever message it has lost."""

from __future__ import annotations

from kvrelay.engine.weights import WeightsChanged
from tests.router.script import Script, worker_stats


def weights(s: Script) -> tuple[bytes, str]:
    endpoint = s.router._dispatcher.endpoint("decode-0", 1)
    assert endpoint is not None
    return endpoint.info.fingerprint, endpoint.info.weights


def test_a_change_that_was_lost_is_in_the_next_statistics_and_an_earlier_one_is_not_news() -> None:
    """It sent requests for the old weights for ever, and the worker gave each of them back."""
    s = Script("decode-0")
    second = worker_stats("decode-0", num_weight_changes=2, fingerprint=b"two", weights="two")
    s.tell(second)
    assert weights(s) == (b"two", "two")
    s.tell(WeightsChanged("decode-0", 1, b"one", "one", 1))  # it was delayed
    s.tell(worker_stats("decode-0", num_weight_changes=1, fingerprint=b"one", weights="one"))
    assert weights(s) == (b"two", "two")
    s.tell(WeightsChanged("decode-0", 1, b"tiny", "", 3))  # back to its own
    s.tell(second)
    assert weights(s) == (b"tiny", "")
