"""Images where a worker is several processes: the first encodes them, all turn and add alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kvrelay.engine.config import ModelSection
from kvrelay.engine.images import Image, Images
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.step import Step
from tests.engine.model.runners import parallel_runner
from tests.engine.model.vision.test_images import (
    CLOSE,
    ENGINE,
    LONGEST,
    Model,
    begun,
    blocks_for,
    go_on,
    rows_of,
    scheduled,
)
from tests.support import tiny_qwen_vl
from tests.support.tiny_qwen_vl import picture


@pytest.fixture(scope="module", params=[False, True], ids=["qwen3-vl", "qwen3.5"])
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Model, Model]]:
    """One process, and two ranks."""
    path = tmp_path_factory.mktemp("ranks")
    theirs = tiny_qwen_vl.make(path, hybrid=request.param)
    alone = ModelRunner(path, ModelSection(device="cpu", dtype="float32"), ENGINE)
    sizes = {"num_blocks": 64, "max_model_len": 512, "dtype": "float32", "device": "cpu"}
    with closing(parallel_runner(path, 2, threads=2, **sizes)) as ranks:
        assert not ranks.no_images
        yield Model(path, theirs, alone), Model(path, theirs, ranks)


def test_ranks_answer_as_one_process_and_as_transformers(models: tuple[Model, Model]) -> None:
    parts = 9, picture(20, 160, 160), 4, picture(21, 40, 200), 9
    answers, rows = [], []
    for model in models:
        both = model.prompt(*parts), model.prompt(23)
        talks = [begun(model, each) for each in both]
        while len(talks[0].output) < LONGEST:
            go_on(model, talks, both)
        answers.append([talk.output for talk in talks])
        tokens, kept, found = model.named(both[0]), {}, []
        table, cuts = blocks_for(model, len(tokens)), [0, 13, 30, len(tokens)]
        for start, end in pairwise(cuts):
            seq = scheduled(tokens, start, end, both[0], table, kept=kept)
            found.append(rows_of(model.run(seq), 0))
        rows.append(torch.cat(found))
        torch.testing.assert_close(rows[-1], model.reference(both[0]), **CLOSE)
    assert answers[0] == answers[1]


def test_what_waits_or_is_wrong_is_left_out_by_all_ranks(models: tuple[Model, Model]) -> None:
    alone, ranks = models
    fine, seeing = ranks.prompt(20), ranks.prompt(5, picture(40), 6)
    tokens, other = ranks.named(seeing), (Image.of(picture(40, 300, 300)),)
    given: list[Images | None] = [Images(seeing.tokens, other), None, seeing]
    each = [tokens, ranks.named(fine), tokens]
    tables = [blocks_for(ranks, len(own)) for own in each]
    seqs = [
        scheduled(own, 0, len(own), images, table, name=f"r{index}")
        for index, (own, images, table) in enumerate(zip(each, given, tables, strict=True))
    ]
    expected = alone.run(replace(seqs[1]))
    done = ranks.runner.execute(Step(1, seqs))
    assert "6 tokens of its prompt stand for images, this model makes" in done.invalid[0]
    assert done.sampled[0] is None
    assert done.sampled[1].token == expected.sampled[0].token
    while done.waiting:
        assert (done.waiting, done.sampled[2]) == ({2}, None)
        done = ranks.runner.execute(Step(2, seqs))
    assert done.sampled[2].token == int(ranks.logits(seeing)[-1].argmax())
    assert done.sampled[1].token == expected.sampled[0].token
    assert ranks.run(replace(seqs[2], request_id="again", kept={})).images == {0: (0, 1)}
