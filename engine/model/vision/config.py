"""The shape of a vision tower, and of what it reads. Numbers alone: no files are read here."""

from __future__ import annotations

from dataclasses import dataclass

RESCALED = 1 / 255  # bytes of a picture become numbers up to 1
ENCODING_ROWS = 20  # a patch takes so many numbers of hidden_size at the peak: measured
THETA = 10000.0  # the base of the tower's rotary embedding


@dataclass(frozen=True, slots=True)
class Vision:
    """A vision tower, and what it reads. Sizes are in pixels or numbers."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    merge_size: int  # so many patches in each direction are one token
    frames: int  # a patch has so many; of a picture they are alike
    out_size: int  # the language model's hidden size
    side: int  # learned positions are a square of side * side, which is stretched
    taps: tuple[int, ...]  # layers whose outputs are added behind the first layers of the text's
    image_token: int  # stands for each token of an image in what the template writes
    section: tuple[int, ...]  # frequencies of the text's rotation by time, height and width
    least_pixels: int  # pictures are stretched to this many,
    most_pixels: int  # or shrunk to these
    mean: tuple[float, ...]  # is subtracted from each colour,
    spread: tuple[float, ...]  # and what is left divided by this
    bytes_per_number: int = 2  # as the tower's files have it

    @property
    def unit(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.merge_size

    @property
    def patch_numbers(self) -> int:
        return 3 * self.frames * self.patch_size**2

    @property
    def tower_bytes(self) -> int:
        """What its weights take, once they are read."""
        width, wide = self.hidden_size, self.intermediate_size
        merged = width * self.merge_size**2
        block = 4 * width * width + 2 * width * wide + 9 * width + wide
        merger = merged * (merged + self.out_size + 1) + self.out_size
        first = width * (self.patch_numbers + 1 + self.side**2)
        norms = 2 * width + 2 * merged * len(self.taps)
        total = first + self.depth * block + (1 + len(self.taps)) * merger + norms
        return total * self.bytes_per_number

    @property
    def most_encoding_bytes(self) -> int:
        """What the largest picture takes while it is encoded, about, in float32."""
        patches = self.most_pixels // self.patch_size**2
        return 4 * patches * (self.patch_numbers + ENCODING_ROWS * self.hidden_size)

    @property
    def bytes_per_token(self) -> int:
        """What an image's embeddings take, in float32."""
        return 4 * self.out_size * (1 + len(self.taps))
