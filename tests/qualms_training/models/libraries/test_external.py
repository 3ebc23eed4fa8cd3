"""Models of torchvision, timm and the user's modules are built by name; each failure is one sentence."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from qualms_training.errors import ExtraMissingError, ModelError
from qualms_training.models import build

SOURCE = """
import torch
from torch import nn

def sized(classes, height, depth=1):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * height * 4 * depth, classes))

def bare():
    return nn.Identity()

def broken(num_classes):
    raise ValueError(f"no {num_classes}")

def compiled(classes):
    return torch.nn.DataParallel(nn.Sequential(nn.Flatten(), torch.compile(nn.Linear(48, classes))))

network = nn.Identity()

def wordy(other):
    return nn.Identity()

def text():
    return "net"

not_callable = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory."""
    (tmp_path / "users_nets.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_nets", raising=False)
    return "users_nets"


def test_a_users_function_is_called_with_the_sizes_it_has_as_parameters(user_module: str) -> None:
    net = build(f"{user_module}:sized", 5, height=4, width=4)
    assert net(torch.zeros(2, 3, 4, 4)).shape == (2, 5)
    assert isinstance(build(f"{user_module}:bare", 5), nn.Identity)
    assert isinstance(build(f"{user_module}:network", 5), nn.Identity)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_wrappers_that_compute_the_same_are_removed(user_module: str) -> None:
    names = [name for name, _ in build(f"{user_module}:compiled", 5).named_parameters()]
    assert names == ["1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            "broken",
            "the function raised ValueError: no 5; it may take any of classes, num_classes, channels, height and width",
        ),
        ("wordy", "the function raised TypeError"),
        ("text", "the function returned str; it must return a torch.nn.Module"),
        ("sizde", "has no function 'sizde'; did you mean 'sized'"),
        ("not_callable", "has no function 'not_callable'"),
    ],
)
def test_the_error_of_a_users_function_names_it(user_module: str, function: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence) as caught:
        build(f"{user_module}:{function}", 5)
    assert f"Model '{user_module}:{function}'" in str(caught.value)


@pytest.mark.parametrize("module", ["no.such", "training.models.efficientnet"])
def test_a_module_that_cannot_be_imported_is_named(module: str) -> None:
    with pytest.raises(ModelError, match=f"module '{module}' cannot be imported"):
        build(f"{module}:lite0", 5)


NET = "from torch import nn\n\ndef net():\n    return nn.Linear({}, 1)\n"


def resolved(folder: Path, elsewhere: Path, spec: str) -> str:
    """The first weight's shape of the model `spec`, built in a new process with `folder` as its working directory."""
    program = f"""
import sys
sys.path = [*{[str(elsewhere)]!r}, *[path for path in sys.path if path]]
from qualms_training.models import build
print(next(build({spec!r}, 5).parameters()).shape[1])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("installed", [None, "package", "folder"])
@pytest.mark.parametrize("users", ["package", "folder"])
def test_a_module_in_the_working_directory_wins_over_an_installed_one(
    users: str, installed: str | None, tmp_path: Path
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for root, kind, width in ((here, users, 1), (elsewhere, installed, 2)):
        if kind is not None:
            (root / "training").mkdir(parents=True)
            (root / "training" / "nets.py").write_text(NET.format(width))
        if kind == "package":
            (root / "training" / "__init__.py").touch()
    assert resolved(here, elsewhere, "training.nets:net") == "1"


@pytest.mark.slow
def test_a_folder_in_the_working_directory_without_the_module_does_not_hide_an_installed_one(tmp_path: Path) -> None:
    (tmp_path / "here" / "nets").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "nets.py").write_text(NET.format(2))
    assert resolved(tmp_path / "here", tmp_path / "elsewhere", "nets:net") == "2"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["colorsys", "qualms_training"])
def test_the_standard_library_and_our_packages_are_not_hidden(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(NET.format(1))
    program = f"from qualms_training.models import build; build('{name}:net', 5)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert f"module '{name}' has no function 'net'" in done.stderr


def test_a_module_that_fails_in_the_working_directory_is_not_left_half_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "failing_nets.py").write_text("import no_such_package\n")
    with pytest.raises(ModelError, match="module 'failing_nets' cannot be imported .*no_such_package"):
        build("failing_nets:net", 5)
    assert "failing_nets" not in sys.modules


def test_torchvision_models_have_the_requested_number_of_classes() -> None:
    net = build("torchvision:resnet18", 7).eval()
    assert net(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


def test_unknown_torchvision_models_and_unsupported_channels_are_named() -> None:
    with pytest.raises(ModelError, match="torchvision has no classifier 'resnet19'; did you mean 'resnet18'"):
        build("torchvision:resnet19", 7)
    with pytest.raises(ModelError, match="'torchvision:resnet18' takes images of 3 channels, not 1"):
        build("torchvision:resnet18", 7, channels=1)


def test_the_error_without_timm_names_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ExtraMissingError, match="needs timm, which is not installed; `pip install timm`"):
        build("timm:vit", 7)


def test_timm_models_are_built_with_create_model(monkeypatch: pytest.MonkeyPatch) -> None:
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
