"""`qualms fit`, `qualms init`, `qualms taps` and `qualms.fit` on a small network that was trained on drawn shapes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import qualms
from qualms.bundle.file import open_bundle
from qualms.cli import main
from qualms.errors import DataError
from qualms_training.data.sources.synthetic import draw
from qualms_training.errors import ExportError, ModelError, RecipeError
from qualms_training.models import build, load_weights

pytestmark = pytest.mark.slow

INPUT = {"size": 16, "mean": [0.5] * 3, "std": [0.5] * 3}
OPTIONS = ("--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5", "--target-fpr", "0.05")


@pytest.fixture(scope="module")
def weights(tiny_run: Path) -> Path:
    return next((tiny_run / "cache" / "bases").glob("*.pt"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shapes as PNG files in train and val, which the network has not been tested on."""
    root = tmp_path_factory.mktemp("photos")
    for split, source, count in (("train", "train", 600), ("val", "test", 700)):
        images = draw("shapes", source)
        for index in range(count):
            folder = root / split / images.classes[images.labels[index]]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.asarray(images.images[index])).save(folder / f"{index:04}.png")
    write_classes(root / "classes.txt", draw("shapes", "test").classes)
    return root


def write_classes(file: Path, names: Sequence[str]) -> None:
    file.write_text("\n".join(names), encoding="utf-8")


def network(weights: Path) -> nn.Module:
    model = build("small", 4, 3, 16, 16)
    load_weights(model, weights)
    return model.eval()


def arrays(split: str, count: int) -> tuple[Any, Any]:
    images = draw("shapes", split)
    return np.asarray(images.images)[:count], images.labels[:count]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["qualms", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_one_command_gives_a_calibrated_bundle_with_the_classes_of_the_network(
    weights: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ood = tmp_path / "ood"
    ood.mkdir()
    for index, image in enumerate(np.asarray(draw("textures", "test").images)[:50]):
        Image.fromarray(image).save(ood / f"{index}.png")
    out = tmp_path / "run"
    arguments = (
        "--model",
        "small",
        "--weights",
        weights,
        "--data",
        photos,
        "--out",
        out,
        "--epochs",
        3,
        "--ood",
        f"folder:{ood}",
    )
    assert run(monkeypatch, "fit", *arguments, "--classes", photos / "classes.txt", *OPTIONS) == 0
    printed = capsys.readouterr().out
    assert f"so fit, calibration and test images come from {photos}/val" in printed
    assert "Size: 16 × 16 pixels, as the images." in printed
    assert "4 classes in the given order." in printed
    assert "accuracy of the base on" in printed
    assert "estimate:" in printed
    assert "identical predictions" in printed
    model = qualms.open_model(out / "seed-0" / "model.onnx")
    images, _ = arrays("test", 500)
    with torch.inference_mode():
        logits = network(weights)((torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
    results = model.predict(list(images))
    assert [result.prediction.index for result in results] == logits.argmax(1).tolist()
    served = [result.prediction.probability for result in results]
    np.testing.assert_allclose(served, logits.softmax(1).amax(1).numpy(), atol=1e-4)
    evaluation = open_bundle(out / "seed-0" / "model.onnx").manifest.evaluation
    assert evaluation is not None
    assert f"folder:{ood}" in {row.data for row in evaluation.ood}
    assert (out / "recipe.toml").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_a_torchscript_file_is_fitted_whose_weights_have_gradients(
    weights: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit: Any = torch.jit  # its functions have no types
    jit.save(jit.trace(network(weights), torch.zeros(2, 3, 16, 16)), str(tmp_path / "net.pt"))
    arguments = ("--model", tmp_path / "net.pt", "--data", photos, "--classes", photos / "classes.txt", "--epochs", 1)
    assert run(monkeypatch, "fit", *arguments, "--out", tmp_path / "run", *OPTIONS) == 0


def test_init_writes_the_recipe_that_fit_would_use(
    weights: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.toml"
    arguments = ("--model", "small", "--weights", weights, "--data", photos, "--out", file)
    assert run(monkeypatch, "init", *arguments, *OPTIONS) == 0
    assert 'weights_saw = "all"' in file.read_text()
    assert run(monkeypatch, "init", *arguments, *OPTIONS) == 2  # an existing file is not overwritten
    assert (
        run(monkeypatch, "init", *arguments[:-1], tmp_path / "mine", *OPTIONS) == 2
    )  # `qualms train` takes .toml files
    assert not (tmp_path / "mine").exists()
    assert run(monkeypatch, "init", *arguments[:-1], weights / "mine.toml", *OPTIONS) == 2  # the folder is a file


def test_taps_lists_the_choice_without_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "taps", "small", "--size", 16) == 0
    short = capsys.readouterr().out
    assert "Chosen: relu2,pool2" in short
    assert "conv1" not in short
    assert run(monkeypatch, "taps", "small", "--size", 16, "--all") == 0
    assert "conv1" in capsys.readouterr().out


def failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The text that a failing command prints to standard error."""
    assert run(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return " ".join(error.split())


def test_a_model_without_weights_is_refused(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", "torchvision:resnet18", "--data", photos, "--out", tmp_path / "run")
    assert "--weights" in failure(monkeypatch, capsys, "fit", *arguments)
    assert not (tmp_path / "run").exists()


def test_a_wrong_class_order_is_refused_before_anything_is_written(
    weights: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    classes = tmp_path / "classes.txt"
    write_classes(classes, draw("shapes", "test").classes[::-1])
    arguments = (
        "--model",
        "small",
        "--weights",
        weights,
        "--data",
        photos,
        "--out",
        tmp_path / "run",
        "--classes",
        classes,
    )
    error = failure(monkeypatch, capsys, "fit", *arguments, *OPTIONS)
    assert "Most confused:" in error
    assert "--classes FILE" in error
    assert not (tmp_path / "run").exists()


def test_other_classes_than_the_data_s_are_announced_as_transfer(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "two" / name).mkdir(parents=True)
        for index in range(400):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "two" / name / f"{index}.png")
    arguments = ("--model", "small", "--weights", weights, "--data", tmp_path / "two", "--out", tmp_path / "mine.toml")
    assert run(monkeypatch, "init", *arguments, *OPTIONS) == 0
    assert "Transfer: the model has 4 logits and the data have 2 classes" in capsys.readouterr().out
    assert 'prediction = "meta"' in (tmp_path / "mine.toml").read_text()


def test_too_few_images_are_refused_with_the_number_that_is_needed(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / "few" / name).mkdir(parents=True)
        for index in range(4):
            Image.new("RGB", (16, 16), (index, 0, 0)).save(tmp_path / "few" / name / f"{index}.png")
    arguments = ("--model", "small", "--weights", weights, "--data", tmp_path / "few", "--out", tmp_path / "run")
    assert "are needed" in failure(monkeypatch, capsys, "fit", *arguments, *OPTIONS)


def test_four_lines_of_python_fit_report_save_and_predict(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = network(weights).train()
    fitted = qualms.fit(
        model, arrays("train", 600), arrays("test", 700), input=INPUT, target_fpr=0.05, epochs=3, out=tmp_path / "run"
    )
    assert model.training  # the user's object stays as it is
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert "identical predictions" not in capsys.readouterr().out, "the report is printed once, when it is asked for"
    fitted.report()
    assert "false alarms" in capsys.readouterr().out
    file = fitted.save(tmp_path / "model.onnx")
    images, _ = arrays("test", 20)
    results = fitted(list(images))
    assert [one.prediction.index for one in results] == [
        one.prediction.index for one in qualms.open_model(file).predict(list(images))
    ]
    assert fitted(images[0], target_fpr=0.2).ood.target_fpr == 0.2


def test_a_network_that_computes_in_another_type_is_refused_with_what_to_remove(weights: Path) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(weights)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(x)

    given: dict[str, Any] = {"classes": draw("shapes", "test").classes, "input": INPUT, "target_fpr": 0.05}
    with pytest.raises(ExportError, match=r"cannot load the graph.*remove conversions .* torch\.autocast"):
        qualms.fit(Cast(), arrays("train", 600), arrays("test", 700), **given)


def test_objects_that_cannot_be_used_are_refused_with_the_remedy(weights: Path) -> None:
    model, held_out = network(weights), arrays("test", 700)
    floats = torch.utils.data.TensorDataset(torch.zeros(8, 3, 16, 16), torch.zeros(8, dtype=torch.int64))
    with pytest.raises(DataError, match=r"float32.*normalises images itself"):
        qualms.fit(model, floats, held_out, input=INPUT)
    with pytest.raises(DataError, match="held_out is missing"):
        qualms.fit(model, arrays("train", 600), input=INPUT)
    with pytest.raises(ModelError, match=r"The model is str; accepted is a torch\.nn\.Module"):
        qualms.fit("resnet50", arrays("train", 600), held_out)
    with pytest.raises(RecipeError, match="`input` has the key 'heigth'"):
        qualms.fit(model, arrays("train", 600), held_out, input={"heigth": 16})
    with pytest.raises(RecipeError, match="`classes` is 'classes.txt'; accepted is a list of names"):
        qualms.fit(model, arrays("train", 600), held_out, input=INPUT, classes="classes.txt")
    with pytest.raises(RecipeError, match="`seed` is -1; accepted are 0 and larger"):
        qualms.fit(model, arrays("train", 600), held_out, input=INPUT, seed=-1)
