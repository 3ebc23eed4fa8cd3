"""Other people's models come by name too, and every way in which they may be missing is a sentence."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from qualms_training.errors import ExtraMissingError, ModelError
from qualms_training.models import build

SOURCE = """
from torch import nn

def sized(classes, height, depth=1):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * height * 4 * depth, classes))

def bare():
    return nn.Identity()

def broken(num_classes):
    raise ValueError(f"no {num_classes}")

def wordy(other):
    return nn.Identity()

def text():
    return "net"

not_callable = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that lies in the working directory, as a user's does."""
    (tmp_path / "users_nets.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_nets", raising=False)
    return "users_nets"


def test_a_users_function_gets_the_sizes_that_it_names(user_module: str) -> None:
    net = build(f"{user_module}:sized", 5, height=4, width=4)
    assert net(torch.zeros(2, 3, 4, 4)).shape == (2, 5)
    assert isinstance(build(f"{user_module}:bare", 5), nn.Identity)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("broken", "the function raised ValueError: no 5; it may take any of classes, num_classes, channels"),
        ("wordy", "the function raised TypeError"),
        ("text", "the function returned str; it must return a torch.nn.Module"),
        ("sizde", "has no function 'sizde'; did you mean 'sized'"),
        ("not_callable", "has no function 'not_callable'"),
    ],
)
def test_a_users_function_that_fails_is_named(user_module: str, function: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence) as caught:
        build(f"{user_module}:{function}", 5)
    assert f"Model '{user_module}:{function}'" in str(caught.value)


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ModelError, match=r"module 'no\.such' cannot be imported"):
        build("no.such:thing", 5)


def test_torchvision_models_have_the_asked_number_of_classes() -> None:
    net = build("torchvision:resnet18", 7).eval()
    assert net(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


def test_what_torchvision_lacks_is_named() -> None:
    with pytest.raises(ModelError, match="torchvision has no classifier 'resnet19'; did you mean 'resnet18'"):
        build("torchvision:resnet19", 7)
    with pytest.raises(ModelError, match="'torchvision:resnet18' takes images of 3 channels, not 1"):
        build("torchvision:resnet18", 7, channels=1)


def test_timm_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ExtraMissingError, match="needs timm, which is not installed; `pip install timm`"):
        build("timm:vit", 7)


def test_timm_models_are_made_through_its_own_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = ModuleType("timm")

    def create_model(name: str, *, pretrained: bool, num_classes: int, in_chans: int) -> nn.Module:
        assert (name, pretrained) == ("tiny", False)
        return nn.Linear(in_chans, num_classes)

    monkeypatch.setattr(timm, "create_model", create_model, raising=False)
    monkeypatch.setattr(timm, "list_models", lambda: ["tiny"], raising=False)
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert build("timm:tiny", 7, channels=2)(torch.zeros(1, 2)).shape == (1, 7)
    with pytest.raises(ModelError, match="timm has no model 'tine'; did you mean 'tiny'"):
        build("timm:tine", 7)
