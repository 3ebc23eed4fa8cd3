"""A requested device is used or refused, never replaced."""

from typing import Any, cast

import pytest
import torch

from qualms_training.errors import QualmsError
from qualms_training.run import pick_device


def test_auto_is_cuda_if_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == torch.device("cuda")
    assert pick_device("cuda") == torch.device("cuda")
    assert pick_device("cpu") == torch.device("cpu")


def test_without_cuda_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(("cuda", "reason"), [(None, "was built without CUDA"), ("13.0", "found no GPU")])
def test_unavailable_cuda_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(QualmsError, match=f"Device 'cuda' is not available: .*{reason}; use 'cpu' or 'auto'"):
        pick_device("cuda")


def test_unknown_device_names_are_refused() -> None:
    with pytest.raises(QualmsError, match="Device 'tpu' is unknown; accepted are 'auto', 'cpu' and 'cuda'"):
        pick_device(cast(Any, "tpu"))
