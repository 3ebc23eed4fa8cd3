"""What image a model takes: size, colour mode and how any image is brought there."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class InputSpec(BaseModel):
    """The one description of a model's input, shared by training, calibration and serving."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    height: int = Field(gt=0, le=4096)
    width: int = Field(gt=0, le=4096)
    colour: Literal["RGB", "L"] = "RGB"
    resize: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"
    fit: Literal["stretch", "crop"] = "stretch"
    """`stretch` ignores the aspect ratio; `crop` keeps it and cuts the centre."""

    @property
    def channels(self) -> int:
        """3 for RGB, 1 for L."""
        return 3 if self.colour == "RGB" else 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        return self.height, self.width, self.channels
