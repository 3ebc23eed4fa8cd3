"""The device that training runs on."""

from typing import Literal

import torch

from qualms_training.errors import QualmsError


def pick_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The torch device for `name`; `auto` is CUDA if it is available, else the CPU."""
    if name not in ("auto", "cpu", "cuda"):
        raise QualmsError(f"Device {name!r} is unknown; accepted are 'auto', 'cpu' and 'cuda'.")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if name == "cuda":
        reason = "found no GPU" if torch.version.cuda else "was built without CUDA"
        raise QualmsError(f"Device 'cuda' is not available: PyTorch {torch.__version__} {reason}; use 'cpu' or 'auto'.")
    return torch.device("cpu")
