"""Where training runs: a GPU where there is one, else the CPU, and never silently another than asked for."""

from typing import Literal

import torch

from qualms_training.errors import QualmsError


def pick_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The torch device for `name`; `auto` is CUDA where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise QualmsError(f"Device {name!r} is not known; accepted are 'auto', 'cpu' and 'cuda'.")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if name == "cuda":
        built = "found no GPU" if torch.version.cuda else "was built without CUDA"
        raise QualmsError(f"Device 'cuda' was asked for, but PyTorch {torch.__version__} {built}; use 'cpu' or 'auto'.")
    return torch.device("cpu")
