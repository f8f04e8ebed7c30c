"""Images in our own engine beside transformers, float32: pixels, embeddings, positions, and the
log-probabilities of all tokens, however the work is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pictures

from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.images import FIRST_STAND_IN, Image, Images
from kvrelay.engine.model.cpu.ops import CpuOps
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.model.vision.layout import expand, layout_of
from kvrelay.engine.model.vision.pictures import ImageError, grid_of, patches_of
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step, StepDone
from tests.engine.model.talks import Talk
from tests.support import tiny_qwen_vl
from tests.support.tiny_qwen_vl import PROCESSOR, picture, prompt_of

CLOSE = {"rtol": 0.0, "atol": 1e-4}
SIZES = [(64, 96), (200, 40), (33, 500), (300, 300), (17, 18), (96, 96)]
LONGEST = 20  # answer, in tokens
ENGINE = EngineSection(num_blocks=64, block_size=16, max_num_seqs=8, max_model_len=512)


@dataclass
class Model:
    path: Path
    theirs: Any
    runner: ModelRunner
    steps: int = 0
    free: list[int] = field(default_factory=lambda: [*range(64)])

    @property
    def vision(self) -> Any:
        return self.runner.config.vision

    def prompt(self, *parts: int | bytes) -> Images:
        return prompt_of(self.vision, *parts)

    def named(self, images: Images) -> list[int]:
        return [*expand(images, self.vision).named(images.each)]

    def reference(self, images: Images) -> torch.Tensor:
        """Log-probabilities after each token, [n, vocab]."""
        return self.logits(images).log_softmax(-1)

    def logits(self, images: Images) -> torch.Tensor:
        """What transformers gives after each token, [n, vocab]."""
        from transformers import Qwen2VLImageProcessorPil

        tokens = torch.tensor([expand(images, self.vision).tokens])
        processor = Qwen2VLImageProcessorPil.from_pretrained(self.path)
        given = {}
        if images.each:
            pictures = [Pictures.open(BytesIO(each.data)) for each in images.each]
            given = dict(processor(images=pictures, return_tensors="pt"))
            given["mm_token_type_ids"] = (tokens == self.vision.image_token).int()
        self.theirs.model.rope_deltas = None
        with torch.inference_mode():
            logits: torch.Tensor = self.theirs(input_ids=tokens, **given).logits[0]
        return logits.float()

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def run(self, *seqs: ScheduledSeq, repeats: int = 1) -> StepDone:
        """Runs a step until no sequence of it waits."""
        for _ in range(200):
            self.steps += 1
            done = self.runner.execute(Step(self.steps, [*seqs], repeats=repeats))
            assert done.error is None
            assert not done.has_faults, done
            if not done.waiting:
                return done
        raise AssertionError("images are not encoded")


def scheduled(
    tokens: list[int], start: int, end: int, images: Images | None, blocks: list[int], **more: Any
) -> ScheduledSeq:
    """All tokens are the prompt, of which each gives outputs."""
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=2000, logprobs=2000)
    name = more.pop("name", "r")
    return ScheduledSeq(
        *(name, tokens[start:end], start, blocks, end == len(tokens), sampling, tokens),
        num_prompt_tokens=len(tokens),
        outputs_from=start,
        images=images,
        **more,
    )


def rows_of(done: StepDone, index: int) -> torch.Tensor:
    """[n, vocab] of the tokens that are not the last one, then of what follows the last."""
    given = [*done.prompts[index].logprobs]
    if (sampled := done.sampled[index]) is not None:
        assert sampled.logprobs is not None
        given.append(sampled.logprobs)
    rows = torch.full((len(given), len(given[0].top)), torch.nan)
    for row, each in zip(rows, given, strict=True):
        for token, logprob in each.top:
            row[token] = logprob
    assert not rows.isnan().any()
    return rows


@pytest.fixture(scope="module", params=["qwen3-vl", "qwen3.5", "torch"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("seeing")
    theirs = tiny_qwen_vl.make(path, hybrid=request.param == "qwen3.5")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            from kvrelay.engine.model.cpu import kernels

            def none(_: Path) -> Any:
                raise kernels.KernelsUnavailable("none here")

            patch.setattr(kernels, "load", none)
        runner = ModelRunner(path, ModelSection(device="cpu", dtype="float32"), ENGINE)
    assert not runner.no_images
    return Model(path, theirs, runner)


@pytest.fixture(autouse=True)
def blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        request.getfixturevalue("model").free = [*range(64)]


def blocks_for(model: Model, count: int) -> list[int]:
    limits = model.runner._limits
    return model.take(limits.entries(count))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_transformers(model: Model, size: tuple[int, int], mode: str) -> None:
    from transformers import Qwen2VLImageProcessorPil

    data = picture(1, *size, mode)
    processor = Qwen2VLImageProcessorPil.from_pretrained(model.path)
    theirs = processor(images=[Pictures.open(BytesIO(data))], return_tensors="np")
    patches, grid = patches_of(0, Image.of(data), model.vision)
    assert [1, *grid] == theirs["image_grid_thw"][0].tolist()
    assert np.array_equal(patches, theirs["pixel_values"])


@pytest.mark.parametrize("size", SIZES)
def test_embeddings_are_those_of_transformers(model: Model, size: tuple[int, int]) -> None:
    patches, grid = patches_of(0, Image.of(picture(2, *size)), model.vision)
    with torch.inference_mode():
        theirs = model.theirs.model.visual(torch.from_numpy(patches), torch.tensor([[1, *grid]]))
    added = getattr(theirs, "deepstack_features", None) or []
    expected = torch.stack([theirs.pooler_output, *added])
    tower = model.runner._decoder._weights.tower
    assert tower is not None
    assert expected.std() > 0.1, "embeddings this flat would prove nothing"
    torch.testing.assert_close(tower.encode(patches, grid), expected, **CLOSE)


def test_positions_are_those_of_transformers(model: Model) -> None:
    images = model.prompt(7, picture(3), 20, picture(4, 300, 90), picture(5, 40, 200), 9)
    tokens = torch.tensor([expand(images, model.vision).tokens])
    sizes = [grid_of(0, 64, 96, model.vision), grid_of(1, 300, 90, model.vision)]
    sizes.append(grid_of(2, 40, 200, model.vision))
    theirs, _ = model.theirs.model.get_rope_index(
        tokens,
        (tokens == model.vision.image_token).int(),
        torch.tensor([[1, *size] for size in sizes]),
    )
    layout, count = layout_of(images, model.vision), tokens.shape[1]
    assert np.array_equal(layout.turns(0, count), theirs[:, 0].numpy())
    for start in range(0, count, 3):
        for end in (start + 1, min(start + 17, count)):
            assert np.array_equal(layout.turns(start, end), theirs[:, 0, start:end].numpy())


@pytest.mark.parametrize("num", [0, 1, 3])
@pytest.mark.parametrize("chunk", [500, 13])
def test_log_probabilities_are_those_of_transformers(model: Model, num: int, chunk: int) -> None:
    parts = [part for i in range(num) for part in (11 + i, picture(10 + i, *SIZES[i]))]
    images = model.prompt(*parts, 30)
    expected, tokens = model.reference(images), model.named(images)
    assert len(expected) == len(tokens)
    given = images if num else None
    table, kept, found = blocks_for(model, len(tokens)), dict[str, Any](), []
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        done = model.run(scheduled(tokens, start, end, given, table, kept=kept))
        found.append(rows_of(done, 0))
    assert expected.std() > 0.5, "logits this flat would prove nothing"
    torch.testing.assert_close(torch.cat(found), expected, **CLOSE)


def test_texts_beside_them_are_as_without_and_decodes_go_on(model: Model) -> None:
    """Prompts and decodes, with images and without: by kernels to the bit as alone."""
    is_exact = isinstance(model.runner.ops, CpuOps)
    seeing, text = model.prompt(9, picture(20), 40), model.prompt(50)
    both = [(seeing, model.named(seeing)), (text, model.named(text))]
    alone: list[list[torch.Tensor]] = []
    for images, tokens in both:
        given, table = images if images.each else None, blocks_for(model, len(tokens))
        cuts = [0, 30, *range(31, len(tokens) + 1)]
        each = [scheduled(tokens, a, b, given, table, kept={}) for a, b in pairwise(cuts)]
        done = [model.run(seq) for seq in each]
        alone.append([rows_of(each, 0) for each in done])
        torch.testing.assert_close(torch.cat(alone[-1]), model.reference(images), **CLOSE)
    tables = [blocks_for(model, len(tokens)) for _, tokens in both]
    kept: list[dict[str, Any]] = [{}, {}]
    for number in range(min(map(len, alone))):
        seqs = []
        for index, (images, tokens) in enumerate(both):
            start, end = (0, 30) if not number else (29 + number, 30 + number)
            given, own = images if images.each else None, {"kept": kept[index], "name": f"r{index}"}
            seqs.append(scheduled(tokens, start, end, given, tables[index], **own))
        done = model.run(*seqs)
        for index in range(2):
            how = {"rtol": 0.0, "atol": 0.0} if is_exact else CLOSE
            torch.testing.assert_close(rows_of(done, index), alone[index][number], **how)


def greedy(model: Model, images: Images, count: int) -> list[int]:
    """What it generates next, by transformers."""
    longer = images
    for _ in range(count):
        token = int(model.logits(longer)[-1].argmax())
        longer = replace(longer, tokens=(*longer.tokens, token))
    return [*longer.tokens[len(images.tokens) :]]


def begun(model: Model, images: Images, **sampling: Any) -> Talk:
    """A sequence whose prompt is computed, and the first token of its answer drawn."""
    tokens, drawn = model.named(images), SamplingParams(temperature=0.0, **sampling)
    talk = Talk(tokens, blocks_for(model, len(tokens) + LONGEST), drawn)
    go_on(model, [talk], [images])
    return talk


def go_on(
    model: Model,
    talks: Sequence[Talk],
    images: Sequence[Images],
    repeats: int = 1,
    drafts: Sequence[Sequence[int]] = ((), ()),
) -> list[int]:
    """A step of all of them; returns how many tokens came of each."""
    shares = [
        replace(
            talk.next(draft=draft), request_id=str(id(talk)), images=each if each.each else None
        )
        for talk, each, draft in zip(talks, images, drafts, strict=False)
    ]
    sampled = model.run(*shares, repeats=repeats).sampled
    for talk, share, each in zip(talks, shares, sampled, strict=True):
        talk.take(share, each)
    return [1 + len(each.more) for each in sampled if each is not None]


def test_tokens_after_images_are_those_of_transformers_however_many_at_once(model: Model) -> None:
    """The kernels compute them in passes, and verify drafts: beside a text, whose positions are its
    indices."""
    has_kernels = isinstance(model.runner.ops, CpuOps)
    both = model.prompt(9, picture(20, 160, 160), 4, picture(21, 40, 200), 9), model.prompt(23)
    expected = [greedy(model, each, LONGEST) for each in both]
    assert layout_of(both[0], model.vision).shifts[-1] == 20
    assert all(len({*each}) > 4 for each in expected)

    one_by_one = [begun(model, each) for each in both]
    for _ in range(LONGEST - 1):
        assert go_on(model, one_by_one, both) == [1, 1]
    in_passes, counts = [begun(model, each) for each in both], set[int]()
    while len(in_passes[0].output) < LONGEST:
        counts |= {*go_on(model, in_passes, both, LONGEST - len(in_passes[0].output))}
    assert (max(counts) > 1) == has_kernels
    drafted = [begun(model, each) for each in both]
    stand_in = drafted[0].tokens[12]
    for wrong in ([], [(expected[0][8] + 1) % 250, 3], [stand_in, 7]):
        at, other = (len(each.output) for each in drafted)
        drafts = [expected[0][at : at + 3] + wrong, expected[1][other : other + 1]]
        assert go_on(model, drafted, both, 1, drafts) == ([4, 2] if has_kernels else [1, 1])
    assert stand_in >= FIRST_STAND_IN
    for talks in (one_by_one, in_passes, drafted):
        for talk, tokens in zip(talks, expected, strict=True):
            assert talk.output[:LONGEST] == tokens[: len(talk.output)]


def test_penalties_count_the_models_tokens(model: Model) -> None:
    images = model.prompt(12, picture(50), 9)
    logits = model.logits(images)[-1].clone()
    seen = torch.tensor(sorted({*expand(images, model.vision).tokens}))
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 9.0, logits[seen] * 9.0)
    talk, other = (begun(model, images, repetition_penalty=9.0) for _ in range(2))
    assert talk.output == [int(logits.argmax())]
    for _ in range(8):
        go_on(model, [talk], [images], drafts=[[talk.tokens[14], 3]])  # as n-grams find them
    while len(other.output) < len(talk.output):
        go_on(model, [other], [images], repeats=len(talk.output) - len(other.output))
    assert talk.output == other.output


def test_an_image_is_encoded_once(model: Model) -> None:
    images = model.prompt(5, picture(30), picture(31), picture(30), 6)
    tokens = model.named(images)
    seq = scheduled(tokens, 0, len(tokens), images, blocks_for(model, len(tokens)))
    first = model.runner.execute(Step(900, [seq]))
    assert first.images == {0: (2, 0)}
    done = first if not first.waiting else model.run(seq)
    again = model.run(scheduled(tokens, 0, len(tokens), images, blocks_for(model, len(tokens))))
    assert again.images == {0: (0, 2)}
    assert torch.equal(rows_of(done, 0), rows_of(again, 0))


def test_what_does_not_fit_its_prompt_is_refused(model: Model) -> None:
    images = model.prompt(5, picture(40), 6)
    tokens = model.named(images)
    other = Images(images.tokens, (Image.of(picture(40, 300, 300)),))
    wrong = scheduled(tokens, 0, len(tokens), other, blocks_for(model, len(tokens)))
    fine = model.prompt(20)
    beside = scheduled(model.named(fine), 0, 20, None, blocks_for(model, 20), name="s")
    done = model.runner.execute(Step(1000, [wrong, beside]))
    assert "6 tokens of its prompt stand for images, this model makes" in done.invalid[0]
    assert done.sampled[1] is not None
    with pytest.raises(ImageError, match="shows 1 of 2 images"):
        layout_of(Images(images.tokens, 2 * images.each), model.vision)
    with pytest.raises(ImageError, match="one side is 300 times as long as the other"):
        grid_of(3, 10, 3000, model.vision)


def test_settings_that_are_not_known_end_the_start(tmp_path: Path) -> None:
    import json

    from kvrelay.engine.model.checkpoint.families import read_config
    from kvrelay.engine.model.errors import ModelError

    tiny_qwen_vl.make(tmp_path)
    for changes, told in (
        ({"do_resize": False}, "do_resize False is not supported, only True"),
        ({"rescale_factor": 0.5}, "rescale_factor 0.5 is not 1 / 255"),
        ({"patch_size": 14}, "patch_size 14 is not supported, only 16"),
        ({"patch_size": None}, "patch_size 14, which it is where it is not stated, is not"),
        ({"image_mean": [0.5]}, "image_mean is 1 numbers, a list of 3 numbers is needed"),
    ):
        file = tmp_path / "preprocessor_config.json"
        file.write_text(json.dumps(PROCESSOR | changes))
        with pytest.raises(ModelError, match=told):
            read_config(tmp_path)
