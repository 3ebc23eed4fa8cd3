"""torchvision can be imported with a CPU or a CUDA torch; otherwise the error names the extra to install."""

import importlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from qualms_training.errors import ExtraMissingError
from qualms_training.models.libraries.torchvision_compat import import_torchvision

pytestmark = pytest.mark.slow

WORKS = """
import torch
from qualms_training.models.libraries.torchvision_compat import import_torchvision

torchvision = import_torchvision()
assert import_torchvision() is torchvision
from torchvision import datasets
from torchvision.transforms import v2

image = torch.zeros(3, 40, 40, dtype=torch.uint8)
assert v2.Resize(32)(image).shape == (3, 32, 32)
assert len(datasets.FakeData(size=3, image_size=(3, 8, 8))) == 3
with torch.inference_mode():
    assert torchvision.models.resnet18(num_classes=7).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 7)
"""


def test_datasets_transforms_and_models_work_in_a_fresh_interpreter() -> None:
    done = subprocess.run([sys.executable, "-c", WORKS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("failure", [ModuleNotFoundError("No module named 'torch'"), RuntimeError("Wrong CUDA.\nMore")])
def test_the_error_for_a_failed_import_names_the_extra(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def refuse(name: str, package: Any = None) -> ModuleType:
        raise failure

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ExtraMissingError, match=r"pip install 'qualms\[train\]'") as caught:
        import_torchvision()
    assert "\n" not in str(caught.value)
