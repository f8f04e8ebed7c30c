"""Images whose embeddings a worker does not keep count as the seconds that it takes to encode
them, as far as their tokens are computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.engine.images import Image, Images, PlacedImage
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import Role
from kvrelay.router.messages import Submit
from kvrelay.router.placement.cost import CostModel
from tests.router.fleet import STATS, Chooser, endpoint, local_cost, names_of, remote_cost, work
from tests.router.script import CLIENT, Script, worker_stats

TOKEN_S = 0.01
ONE, TWO = PlacedImage(7, 60, 50), PlacedImage((1 << 64) - 1, 90, 20)
ASKED = replace(work(100), images=(ONE, TWO))


def seconds_at(cost: CostModel, keys: tuple[int, ...], **cached: int) -> float:
    worker = endpoint("decode-0", images=keys, image_token_s=TOKEN_S)
    asked = replace(work(100, **cached), images=(ONE, TWO))
    return local_cost(cost, 0.0, worker, asked).seconds.images


def test_images_that_are_not_there_cost_what_a_token_of_them_has_taken() -> None:
    cost = CostModel()
    for keys, tokens in ((), 70), ((TWO.key,), 50), ((3, ONE.key, 9), 20), ((ONE.key, TWO.key), 0):
        assert seconds_at(cost, keys) == pytest.approx(tokens * TOKEN_S)


def test_images_whose_tokens_are_cached_cost_nothing() -> None:
    cost = CostModel()
    for cached, tokens in (59, 70), (60, 20), (89, 20), (90, 0):
        assert seconds_at(cost, (), decode_0=cached) == pytest.approx(tokens * TOKEN_S)


def test_it_costs_nothing_until_a_worker_has_encoded_one_then_as_in_the_fleet() -> None:
    cost, worker = CostModel(), endpoint("decode-0")
    assert local_cost(cost, 0.0, worker, ASKED).seconds.images == 0.0
    cost.on_stats(replace(STATS, image_token_s=0.5))
    placed = local_cost(cost, 0.0, worker, ASKED).seconds
    assert placed.images == pytest.approx(35.0)
    assert placed.ttft == pytest.approx(
        35.0 + local_cost(cost, 0.0, worker, work(100)).seconds.ttft
    )


def test_of_a_handoff_the_prefill_worker_alone_encodes() -> None:
    prefill = endpoint("prefill-0", info={"role": Role.PREFILL}, image_token_s=TOKEN_S)
    decode = endpoint("decode-0", image_token_s=100.0)
    assert remote_cost(CostModel(), decode, prefill, ASKED).seconds.images == pytest.approx(0.7)


def test_the_worker_that_has_the_embeddings_is_chosen_unless_waiting_takes_longer() -> None:
    has = endpoint("decode-0", images=(ONE.key, TWO.key), image_token_s=TOKEN_S)
    lacks = endpoint("decode-1", image_token_s=TOKEN_S)
    for number in range(3):
        has.book(0.0, f"r{number}", 200, 0, 0.2)
    chooser = Chooser(has, lacks)
    assert names_of(chooser.choose(work(100))) == ("decode-1", None)
    assert names_of(chooser.choose(ASKED)) == ("decode-0", None)
    for number in range(3, 30):
        has.book(0.0, f"r{number}", 200, 0, 0.2)
    assert names_of(chooser.choose(ASKED)) == ("decode-1", None)


def test_what_was_sent_there_is_encoded_for_it() -> None:
    worker, cost = endpoint("decode-0", image_token_s=TOKEN_S), CostModel()
    worker.book(0.0, "r", 0, 0, images=(ONE.key,))
    assert local_cost(cost, 0.0, worker, ASKED).seconds.images == pytest.approx(0.2)
    told = replace(STATS, worker="decode-0", image_token_s=TOKEN_S)
    worker.on_stats(1.0, told)
    assert local_cost(cost, 1.0, worker, ASKED).seconds.images == pytest.approx(0.2)
    worker.release("r")
    worker.on_stats(2.0, told)
    assert local_cost(cost, 2.0, worker, ASKED).seconds.images == pytest.approx(0.7)


def test_prompts_that_share_an_image_and_no_prefix_go_to_one_worker() -> None:
    s = Script()
    for number in range(4):
        s.up(f"decode-{number}")
        s.tell(worker_stats(f"decode-{number}", image_token_s=TOKEN_S))
    pictures = [Image.of(bytes([n]) * 9) for n in range(4)]
    chosen: dict[bytes, set[str]] = {}
    for number in range(12):
        image = pictures[number % 4]
        text = tuple(range(100 * number, 100 * number + 10))
        images = Images((*text, 1), (image,))
        tokens = (*text, *image.stand_ins(40), 5)
        s.tell(
            Submit(f"r{number}", SamplingParams(max_tokens=8), CLIENT, tokens, 60.0, images=images)
        )
        decision = s.router.explain(f"r{number}")[-1]
        chosen.setdefault(image.digest, set()).add(decision.options.best.worker)
        least = min(each.seconds.images for each in decision.options.decodes)
        assert least == pytest.approx(0.4 if number < 4 else 0.0)
    assert [len(workers) for workers in chosen.values()] == [1, 1, 1, 1]


def test_images_are_found_in_a_prompt_by_their_numbers() -> None:
    one, two = Image.of(b"one"), Image.of(b"two")
    images = Images((8, 1, 1, 9, 1), (one, two, one))
    prompt = (8, *one.stand_ins(3), *two.stand_ins(2), 9, *one.stand_ins(3), 9)
    found = images.placed(prompt)
    assert [(each.end, each.num_tokens) for each in found] == [(4, 3), (6, 2), (10, 3)]
    assert found[0].key == found[2].key != found[1].key
    assert images.placed(images.tokens) == [], "a worker is to say what tokens they are"
