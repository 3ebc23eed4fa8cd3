"""What image a model takes: size, colour mode and how any image is brought there."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class InputSpec(BaseModel):
    """The one description of a model's input, shared by training, calibration and serving."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    height: int = Field(gt=0, le=4096)
    width: int = Field(gt=0, le=4096)
    colour: Literal["RGB", "L"] = "RGB"
    resize: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"
    fit: Literal["stretch", "crop"] = "stretch"
    """`stretch` ignores the aspect ratio; `crop` keeps it and cuts the centre."""
    shorter_side: int | None = Field(None, gt=0, le=4096, exclude_if=lambda side: side is None)
    """with `crop`: what the shorter side is brought to before the centre is cut out, as by torchvision's Resize and
    CenterCrop; where it is not given, it is not written either, so that older services read such a bundle"""

    @model_validator(mode="after")
    def _shorter_side_holds_the_centre(self) -> Self:
        if self.shorter_side is None:
            return self
        if self.fit != "crop":
            raise ValueError(f"shorter_side is for fit 'crop', not {self.fit!r}")
        if self.shorter_side < max(self.height, self.width):
            raise ValueError(
                f"shorter_side is {self.shorter_side}, and {self.height} × {self.width} pixels cannot be cut out of it: "
                f"at least {max(self.height, self.width)} is needed"
            )
        return self

    @property
    def channels(self) -> int:
        """3 for RGB, 1 for L."""
        return 3 if self.colour == "RGB" else 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        return self.height, self.width, self.channels
