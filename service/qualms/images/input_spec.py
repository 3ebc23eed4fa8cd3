"""The input of a model: size, colour mode, and how images are resized."""

from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_PIXELS: Final = 2**20
"""of one image, such as 1024 × 1024: a batch of 64 takes 200 MB, and classifiers use up to 640 × 640"""
_MAX_SHORTER_SIDE = 4
"""times the longer side of the input; usual is up to 1.5, and the memory of a long image grows with its square"""

_MIN_SCALED_RATIO = 2
"""times the longer side of the input: resizing then averages over enough pixels to hide how they were decoded"""
_MIN_SCALED_SIDE = 64


class InputSpec(BaseModel):
    """Description of a model's input, shared by training, calibration and serving."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    height: int = Field(gt=0, le=4096)
    width: int = Field(gt=0, le=4096)
    colour: Literal["RGB", "L"] = "RGB"
    resize: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"
    fit: Literal["stretch", "crop"] = "stretch"
    """`stretch` ignores the aspect ratio; `crop` preserves it and crops the centre."""
    shorter_side: int | None = Field(None, gt=0, le=4096, exclude_if=lambda side: side is None)
    """With `crop`: length of the shorter side before the centre crop, as in torchvision's Resize and CenterCrop. None is
    not written to the manifest, so that older services can read the bundle."""

    scaled_jpeg: bool = Field(False, exclude_if=lambda scaled: not scaled)
    """Whether JPEG files far larger than the input are decoded at 1/2, 1/4 or 1/8 of their size, which is faster and changes
    the pixels slightly. False is not written to the manifest, so that older services can read the bundle."""

    @model_validator(mode="after")
    def _check_pixels(self) -> Self:
        if self.height * self.width > MAX_PIXELS:
            raise ValueError(
                f"an image of {self.height} × {self.width} pixels is too large: at most {MAX_PIXELS:,} pixels are accepted"
            )
        return self

    @model_validator(mode="after")
    def _check_shorter_side(self) -> Self:
        if self.shorter_side is None:
            return self
        if self.fit != "crop":
            raise ValueError(f"shorter_side needs fit 'crop', not {self.fit!r}")
        if self.shorter_side < max(self.height, self.width):
            raise ValueError(
                f"shorter_side is {self.shorter_side}, but a crop of {self.height} × {self.width} pixels needs at least "
                f"{max(self.height, self.width)}"
            )
        largest = _MAX_SHORTER_SIDE * max(self.height, self.width, 64)
        if self.shorter_side > largest:
            raise ValueError(
                f"shorter_side is {self.shorter_side}, but for a crop of {self.height} × {self.width} pixels at most "
                f"{largest} is accepted"
            )
        return self

    @property
    def channels(self) -> int:
        """3 for RGB, 1 for L."""
        return 3 if self.colour == "RGB" else 1

    @property
    def min_jpeg_side(self) -> int | None:
        """With `scaled_jpeg`: the shorter side that a JPEG must have when it is decoded, else None."""
        if not self.scaled_jpeg:
            return None
        return max(_MIN_SCALED_SIDE, _MIN_SCALED_RATIO * max(self.shorter_side or 0, self.height, self.width))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        return self.height, self.width, self.channels
