"""`python -m tests.fuzz.images`: configurations of the models that read images, drawn by a seed,
against transformers.

What is drawn beside the text (`families`): the tower's depth, widths, heads, patches and taps, how
pictures are prepared, the sections of the rotary embedding, and a prompt with images of any shape.
A tiny checkpoint with random weights has to give the log-probabilities of transformers, in float32,
after every token of that prompt, cut anywhere, by the kernels of the CPU and by torch, or be
refused by name.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from PIL import Image as Pictures

from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.images import Image, Images
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.model.vision.config import Vision
from kvrelay.engine.model.vision.layout import expand
from kvrelay.engine.step import Step
from tests.engine.model import tiny
from tests.engine.model.vision.test_images import rows_of, scheduled
from tests.fuzz.families import (
    TOLERANCE,
    Draw,
    Fields,
    Outcome,
    delta,
    delta_moe,
    dim_of,
    main,
    shape,
)
from tests.support.tiny_qwen_vl import picture

FIRST_MARK = tiny.VOCAB - 4
MARKS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
TOKENS = {mark: FIRST_MARK + index for index, mark in enumerate(MARKS)}
ENGINE = EngineSection(num_blocks=128, block_size=16, max_num_seqs=2, max_model_len=tiny.MAX_LEN)
LAST_BIT = 2.0**-24  # float32's, relative
LONGEST = 320  # prompt, in tokens


def section(draw: Draw, half: int) -> list[int]:
    """Frequencies of time, height and width: as published, about as many of each; or others."""
    third = half // 3
    height, width = draw.one((third, third), (draw.random.randint(0, third), third), (1, 1))
    return [half - height - width, height, width]


def dense_text(draw: Draw) -> Fields:
    made = shape(draw) | {"head_dim": draw.one(16, 32, 48)}
    made |= draw.some(attention_bias=(True, False))
    spec = {"rope_type": "default", "rope_theta": draw.one(1e4, 5e6), "mrope_interleaved": True}
    return made | {"rope_parameters": spec | _sections(draw, dim_of(made) // 2, 64)}


def hybrid_text(made: Fields, draw: Draw) -> Fields:
    part = draw.one(0.25, 0.5)
    spec = {"rope_type": "default", "rope_theta": draw.one(1e4, 1e7), "mrope_interleaved": True}
    spec |= {"partial_rotary_factor": part}
    spec |= _sections(draw, int(dim_of(made) * part) // 2, 32)
    return made | {"rope_parameters": spec}


def _sections(draw: Draw, half: int, usual: int) -> Fields:
    """They are left out where the model's own are as many."""
    return {} if half == usual else {"mrope_section": section(draw, half)}


def tower(draw: Draw, out_size: int, *, has_taps: bool) -> Fields:
    heads, dim = draw.one((1, 32), (2, 16), (4, 16), (3, 24), (2, 8))
    depth = draw.one(1, 2, 3, 9)
    made = {"depth": depth, "num_heads": heads, "hidden_size": heads * dim}
    made |= {"intermediate_size": draw.one(48, 96), "out_hidden_size": out_size}
    made |= {"initializer_range": 0.2}  # so that it matters what is seen
    made |= draw.some(
        patch_size=(8, 14, 16),
        spatial_merge_size=(1, 2, 3),
        temporal_patch_size=(1, 2, 3),
        num_position_embeddings=(4, 36, 49, 2304),
        hidden_act=("gelu_pytorch_tanh",) * 8 + ("gelu", "silu"),
        in_channels=(3,),
    )
    if has_taps:
        count = draw.random.randint(0, min(3, depth))
        some = sorted(draw.random.sample(range(depth), count))
        made |= draw.one({"deepstack_visual_indexes": some}, {"deepstack_visual_indexes": some}, {})
    return made


def prepared(draw: Draw, vision: Fields) -> Fields:
    """preprocessor_config.json, for images of some tens of tokens."""
    patch, merge = vision.get("patch_size", 16), vision.get("spatial_merge_size", 2)
    unit = (patch * merge) ** 2
    least, most = draw.one((1, 40), (4, 9), (12, 40))
    sizes = {"shortest_edge": least * unit, "longest_edge": most * unit}
    pixels = {"min_pixels": sizes["shortest_edge"], "max_pixels": sizes["longest_edge"]}
    other = {key: 2 * number for key, number in sizes.items()}
    made = draw.one({"size": sizes}, {"size": sizes}, pixels, {**pixels, "size": other}, {})
    own = {"patch_size": patch, "merge_size": merge}
    own |= {"temporal_patch_size": vision.get("temporal_patch_size", 2)}
    own |= {"image_mean": draw.one([0.5] * 3, [0.48, 0.46, 0.41])}
    own |= {"image_std": draw.one([0.5] * 3, [0.27, 0.26, 0.28])}
    if draw.random.random() < 0.1:
        own.pop(draw.one(*own))
    made |= own
    made |= draw.some(
        do_resize=(True,),
        do_convert_rgb=(True,),
        rescale_factor=(1 / 255,),
        resample=(3,),
        image_processor_type=("Qwen2VLImageProcessorFast",),
    )
    return made


def asked(draw: Draw, vision: Vision) -> Images:
    """A prompt with up to three images: first, last, or one right behind the other."""
    while True:
        tokens, each = list[int](), list[Image]()
        for _ in range(draw.random.randint(1, 3)):
            tokens += text_of(draw, draw.one(0, 0, 1, 7, 30))
            height, width = (draw.one(9, 40, 64, 100, 233, 480) for _ in range(2))
            mode = draw.one("RGB", "RGB", "RGBA", "L")
            each.append(Image.of(picture(draw.random.randrange(1000), height, width, mode)))
            around = [TOKENS["vision_start_token_id"], TOKENS["vision_end_token_id"]]
            tokens += [around[0], vision.image_token, around[1]]
        tokens += text_of(draw, draw.one(0, 5, 20))
        images = Images(tuple(tokens), tuple(each))
        if len(expand(images, vision).tokens) <= LONGEST:
            return images


def text_of(draw: Draw, count: int) -> list[int]:
    return [draw.random.randrange(3, FIRST_MARK) for _ in range(count)]


T: Any = transformers
FAMILIES: dict[str, tuple[Any, Any, Callable[[Draw], Fields]]] = {
    "qwen3-vl": (T.Qwen3VLConfig, T.Qwen3VLForConditionalGeneration, dense_text),
    "qwen3.5": (
        T.Qwen3_5Config,
        T.Qwen3_5ForConditionalGeneration,
        lambda draw: hybrid_text(delta(draw), draw),
    ),
    "qwen3.5-moe": (
        T.Qwen3_5MoeConfig,
        T.Qwen3_5MoeForConditionalGeneration,
        lambda draw: hybrid_text(delta_moe(draw), draw),
    ),
}


def compare(family: str, seed: int, into: Outcome) -> None:
    """Draws configuration `seed` of `family` and notes what became of it."""
    draw = Draw(f"{family} {seed}")
    text = FAMILIES[family][2](draw)
    vision = tower(draw, text["hidden_size"], has_taps=family == "qwen3-vl")
    # As a file is published, or as transformers writes it, with all defaults.
    compare_fields(family, text, vision, draw, into, bool(seed % 2), str(seed))


def compare_fields(
    family: str,
    text: Fields,
    vision: Fields,
    draw: Draw,
    into: Outcome,
    as_given: bool = True,
    name: str = "",
) -> None:
    """as_given: config.json has these fields alone. `name`: what it is called where it differs."""
    kind, whole, _ = FAMILIES[family]
    fields = {"text_config": text, "vision_config": vision, **TOKENS}
    fields["tie_word_embeddings"] = text.get("tie_word_embeddings", False)
    processor = prepared(draw, vision)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "preprocessor_config.json").write_text(json.dumps(processor))
        try:
            torch.manual_seed(7)
            model = whole._from_config(kind(**deepcopy(fields)), dtype=torch.float32).eval()
            tiny.vary(model)
            model.save_pretrained(path)
        except Exception as error:  # whatever a configuration does to transformers
            into.impossible[f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"] += 1
            return
        if as_given:
            named = {"architectures": [whole.__name__], "model_type": kind.model_type}
            (path / "config.json").write_text(json.dumps({**fields, **named}))
        try:
            read = read_config(path).vision
        except ModelError as error:
            into.refused[str(error).replace(folder, "")[:100]] += 1
            return
        assert read is not None
        images = asked(draw, read)
        cuts = sorted(draw.random.sample(range(1, 60), draw.random.randint(0, 3)))
        _compare(name, path, model, images, (cuts, {**fields, **processor}), into)


def _compare(
    name: str,
    path: Path,
    model: Any,
    images: Images,
    how: tuple[list[int], Fields],
    into: Outcome,
) -> None:
    cuts, fields = how
    try:
        wanted = expected(model, path, images, torch.float32)
    except Exception as error:
        into.impossible[f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"] += 1
        return
    into.compared += 1
    for ops in ("cpu", "torch"):
        try:
            worst = float((got(path, ops, images, cuts) - wanted).abs().max())
        except Exception as error:
            into.different.append(f"{name} {ops}: {type(error).__name__}: {error}\n  {fields}")
            continue
        if not worst <= TOLERANCE:  # where rounding decides, transformers differs from itself
            own = own_error(model, path, images, wanted)
            if own > TOLERANCE / 4:
                into.impossible[f"transformers differs from itself: {own:.0e}"] += 1
                continue
            into.different.append(f"{name} {ops}: {worst:.1e} (own {own:.0e})\n  {fields}")
        into.worst = max(into.worst, worst)


def own_error(model: Any, path: Path, images: Images, wanted: torch.Tensor) -> float:
    """By how much transformers differs from itself: in float64, with its experts one by one, and
    with weights whose last bits are others."""
    model.set_experts_implementation("eager")
    found = [expected(model, path, images, torch.float64)]
    model.float()
    for seed in range(4):
        other = deepcopy(model)
        torch.manual_seed(seed)
        with torch.no_grad():
            for each in other.parameters():
                each.mul_(1 + (torch.randint(3, each.shape) - 1) * LAST_BIT)
        found.append(expected(other, path, images, torch.float32))
    return max(float((each - wanted).abs().max()) for each in found)


def expected(model: Any, path: Path, images: Images, dtype: torch.dtype) -> torch.Tensor:
    """Log-probabilities after each token, [n, vocab]."""
    vision = read_config(path).vision
    assert vision is not None
    tokens = torch.tensor([expand(images, vision).tokens])
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(path)
    pictures = [Pictures.open(BytesIO(each.data)) for each in images.each]
    given = dict(processor(images=pictures, return_tensors="pt"))
    given["pixel_values"] = given["pixel_values"].to(dtype)
    given["mm_token_type_ids"] = (tokens == vision.image_token).int()
    model.model.rope_deltas = None
    with torch.inference_mode():
        logits: torch.Tensor = model.to(dtype)(input_ids=tokens, **given).logits[0]
    return logits.double().log_softmax(-1)


def got(path: Path, ops: str, images: Images, cuts: Sequence[int]) -> torch.Tensor:
    """A runner's, whose steps end at `cuts`."""
    with ExitStack() as stack:
        if ops == "torch":
            none = kernels.KernelsUnavailable("none here")
            stack.enter_context(mock.patch.object(kernels, "load", side_effect=none))
        runner = ModelRunner(path, ModelSection(device="cpu", dtype="float32"), ENGINE)
    vision = runner.config.vision
    assert vision is not None
    assert not runner.no_images, runner.no_images
    tokens = [*expand(images, vision).named(images.each)]
    ends = [*(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    blocks, rows, kept = [*range(runner._limits.entries(len(tokens)))], [], dict[str, Any]()
    for start, end in pairwise([0, *ends]):
        seq = scheduled(tokens, start, end, images, blocks, kept=kept)
        done = runner.execute(Step(0, [seq]))
        while done.waiting:
            done = runner.execute(Step(0, [seq]))
        assert not done.has_faults, done
        rows.append(rows_of(done, 0))
    return torch.cat(rows).double()


if __name__ == "__main__":
    main(FAMILIES, compare, __doc__ or "")
