"""What a placement's parts leave out is learned from when first tokens came."""

from __future__ import annotations

from random import Random

import pytest

from kvrelay.router.placement.cost import Seconds
from kvrelay.router.placement.policy import TtftPredictor

PARTS = Seconds(queue=0.05, fetch=0.02, prefill=0.1)


def test_a_new_predictor_believes_the_parts() -> None:
    for others_decode in (False, True):
        assert TtftPredictor().predict(PARTS, others_decode=others_decode) == pytest.approx(0.17)


def test_what_is_the_same_for_all_is_learned() -> None:
    predictor, rng = TtftPredictor(), Random(1)
    for _ in range(3000):
        parts = Seconds(prefill=rng.uniform(0.01, 0.3))
        predictor.on_first_token(parts, parts.prefill + 0.02, others_decode=False)
    assert predictor.overhead_s == pytest.approx(0.02, rel=0.1)
    assert predictor.factors[False, False] == pytest.approx(1.0, abs=0.03)


def test_prompts_beside_decodes_take_longer_than_others() -> None:
    predictor, rng = TtftPredictor(), Random(2)
    for _ in range(3000):
        parts, others = Seconds(prefill=rng.uniform(0.05, 0.5)), rng.random() < 0.5
        predictor.on_first_token(
            parts, parts.prefill * (2.5 if others else 0.9), others_decode=others
        )
    for others, factor in ((True, 2.5), (False, 0.9)):
        predicted_s = predictor.predict(Seconds(prefill=0.15), others_decode=others)
        assert predicted_s == pytest.approx(0.15 * factor, rel=0.1)


def test_prompts_that_others_come_before_are_held_up_by_more() -> None:
    predictor, rng = TtftPredictor(), Random(3)
    for _ in range(3000):
        parts = Seconds(queue=rng.choice((0.0, 0.1)), prefill=rng.uniform(0.05, 0.5))
        real_s = (parts.queue + parts.prefill) * (1.8 if parts.queue else 1.0)
        predictor.on_first_token(parts, real_s, others_decode=False)
    for queue_s, factor in ((0.0, 1.0), (0.1, 1.8)):
        predicted_s = predictor.predict(Seconds(queue=queue_s, prefill=0.2), others_decode=False)
        assert predicted_s == pytest.approx((0.2 + queue_s) * factor, rel=0.1)


def test_a_few_that_are_far_off_do_not_count_more_than_the_many() -> None:
    predictor, rng = TtftPredictor(), Random(4)
    for _ in range(3000):
        parts = Seconds(prefill=rng.uniform(0.05, 0.5))
        late = 20.0 if rng.random() < 0.1 else 1.2
        predictor.on_first_token(parts, parts.prefill * late, others_decode=False)
    predicted_s = predictor.predict(Seconds(prefill=0.2), others_decode=False)
    assert predicted_s == pytest.approx(0.2 * 1.2, rel=0.1)


def test_one_request_that_was_held_up_changes_predictions_little() -> None:
    predictor = TtftPredictor()
    predictor.on_first_token(PARTS, 60.0, others_decode=True)
    assert predictor.predict(PARTS, others_decode=True) < 0.18


def test_predictions_stay_within_reason() -> None:
    predictor = TtftPredictor()
    for _ in range(5000):
        predictor.on_first_token(PARTS, 0.0, others_decode=False)
    assert 0.0 <= predictor.predict(PARTS, others_decode=False) < 0.1
