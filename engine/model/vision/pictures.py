"""Files of images to pixels, and to what a vision tower reads.

Prepared as transformers does with Pillow (`Qwen2VLImageProcessorPil`), to the bit: stretched
bicubically to whole tokens, in bytes, then scaled and normalized.
"""

from __future__ import annotations

import logging
import math
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrelay.engine.images import Image
from kvrelay.engine.model.vision.config import RESCALED, Vision

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

log = logging.getLogger(__name__)

MAX_PIXELS = 64_000_000  # an image takes 256 MB then, as it is read
MAX_RATIO = 200  # one side is so many times as long as the other


class ImageError(Exception):
    """An image that cannot be read; one line, for clients."""


def why_no_pillow() -> str:
    """Why no image can be read here; "": they can."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return "reading images needs Pillow: pip install 'kvrelay[images]'"
    return ""


def _opened(index: int, image: Image) -> Picture:
    """Its size is known then, and no more. Raises ImageError, and what Pillow raises."""
    from PIL import Image as Pictures

    picture = Pictures.open(BytesIO(image.data))
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"image {index} has {width} x {height} pixels, more than {MAX_PIXELS:,}: make it"
            " smaller"
        )
    return picture


def read(index: int, image: Image) -> Any:
    """A picture in RGB, on white where nothing covers it. Raises ImageError."""
    from PIL import Image as Pictures
    from PIL import UnidentifiedImageError

    try:
        picture = _opened(index, image)
        if picture.mode == "RGB":
            picture.load()
            return picture
        with_alpha = picture.convert("RGBA")
    except (UnidentifiedImageError, OSError, ValueError, Pictures.DecompressionBombError) as error:
        log.info("image %d cannot be read: %r", index, error)
        what = f"image {index}, of {len(image.data)} bytes, cannot be read"
        raise ImageError(f"{what}; PNG, JPEG, WebP and GIF can") from error
    white = Pictures.new("RGBA", with_alpha.size, (255, 255, 255, 255))
    return Pictures.alpha_composite(white, with_alpha).convert("RGB")


def size_of(index: int, image: Image) -> tuple[int, int]:
    """Height and width in pixels, of what `read` has read before. Raises ImageError."""
    try:
        width, height = _opened(index, image).size
    except (OSError, ValueError) as error:
        raise ImageError(f"image {index} cannot be read: {error}") from error
    return height, width


def grid_of(index: int, height: int, width: int, vision: Vision) -> tuple[int, int]:
    """Patches in height and width of a picture of so many pixels: whole tokens, and about its
    shape. Raises ImageError."""
    unit, ratio = vision.unit, max(height, width) / min(height, width)
    if ratio > MAX_RATIO:
        raise ImageError(
            f"image {index} has {width} x {height} pixels: one side is {ratio:.0f} times as long as"
            f" the other, at most {MAX_RATIO} is read"
        )
    sides = [round(side / unit) * unit for side in (height, width)]
    if math.prod(sides) > vision.most_pixels:
        shrink = math.sqrt(height * width / vision.most_pixels)
        sides = [max(unit, math.floor(s / shrink / unit) * unit) for s in (height, width)]
    elif math.prod(sides) < vision.least_pixels:
        grow = math.sqrt(vision.least_pixels / (height * width))
        sides = [math.ceil(side * grow / unit) * unit for side in (height, width)]
    return sides[0] // vision.patch_size, sides[1] // vision.patch_size


def patches_of(index: int, image: Image, vision: Vision) -> tuple[np.ndarray, tuple[int, int]]:
    """Patches [n, patch_numbers] float32, token by token, and how many in height and width. Raises
    ImageError."""
    from PIL.Image import Resampling

    picture = read(index, image)
    grid = rows, columns = grid_of(index, picture.height, picture.width, vision)
    size, merge = vision.patch_size, vision.merge_size
    shape = columns * size, rows * size
    pixels = np.asarray(picture.resize(shape, Resampling.BICUBIC))
    scaled = (pixels.astype(np.float64) * RESCALED).astype(np.float32)
    mean, spread = (np.array(each, np.float32) for each in (vision.mean, vision.spread))
    colours = ((scaled - mean) / spread).transpose(2, 0, 1)
    cut = colours.reshape(3, rows // merge, merge, size, columns // merge, merge, size)
    patches = cut.transpose(1, 4, 2, 5, 0, 3, 6)  # [rows, columns, merge, merge, 3, size, size]
    patches = np.repeat(patches[:, :, :, :, :, np.newaxis], vision.frames, axis=5)
    return np.ascontiguousarray(patches.reshape(rows * columns, vision.patch_numbers)), grid
