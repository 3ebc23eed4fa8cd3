"""Bad input on the command line: one sentence on stderr, exit code 2, no traceback, and no files written."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle
from qualms.bundle.scores import DIRICHLET_SCORES, SCORES
from qualms.cli import main
from qualms.demo.digits import draw_many
from qualms_training.models import build

pytestmark = pytest.mark.slow

TINY = (resources.files("qualms_training") / "recipes" / "tiny.toml").read_text(encoding="utf-8")
SMALL_SPLITS = "splits = { train = 8, validation = 4, fit = 4, calibration = 8 }"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str
    folder: Path


def edited(*changes: tuple[str, str]) -> str:
    """The tiny recipe's text with some lines replaced."""
    text = TINY
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def folder_data(root: Path) -> str:
    """A recipe for two classes of images in folders in `root`."""
    rng = np.random.default_rng(0)
    for split, n in (("train", 12), ("test", 4)):
        for label in ("cat", "dog"):
            folder = root / split / label
            folder.mkdir(parents=True)
            for index in range(n):
                pixels = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index:02}.png")
    splits = next(line for line in TINY.splitlines() if line.startswith("splits"))
    return edited(
        ('id = "shapes"', f'id = "folder:{root}"'),
        ('ood = ["textures", "strokes"]', "ood = []"),
        (splits, SMALL_SPLITS),
        ("target_fpr = 0.05", "target_fpr = 0.5"),
    )


def unknown_key(_: Path) -> str:
    return edited(("kl_weight = 0.1", "kl_weight = 0.1\nkl_wieght = 0.2"))


def missing_data(_: Path) -> str:
    return edited(('id = "shapes"', 'id = "mnist"'))


def empty_class(root: Path) -> str:
    recipe = folder_data(root / "pets")
    (root / "pets" / "train" / "emu").mkdir()
    return recipe


def corrupt_image(root: Path) -> str:
    recipe = folder_data(root / "pets")
    file = root / "pets" / "train" / "dog" / "03.png"
    file.write_bytes(file.read_bytes()[:200])
    return recipe


def weights_with_nan(root: Path) -> str:
    state = build("small", 4, 3, 16, 16).state_dict()
    state["conv2.weight"][3, 2, 1, 0] = float("nan")
    torch.save(state, root / "base.pt")
    given = f'model = "small"\nweights = "{root / "base.pt"}"\nweights_saw = "train-split"\nweights_seed = 0'
    return edited(('model = "small"', given))


def tap_typo(_: Path) -> str:
    return edited(('taps = ["pool1", "pool2"]', 'taps = ["pool1", "poool2"]'))


def unsupported_target(_: Path) -> str:
    return edited(("target_fpr = 0.05", "target_fpr = 1e-4"))


def unknown_flag_score(_: Path) -> str:
    return edited(("target_fpr = 0.05", 'target_fpr = 0.05\nscore = "energy"'))


def unknown_trust_score(_: Path) -> str:
    return edited(("target_fpr = 0.05", 'target_fpr = 0.05\ntrust_score = "softmax"'))


def unknown_stop_score(_: Path) -> str:
    return edited(("grid = 2", 'grid = 2\nstop_score = "fused"'))


CASES: dict[Callable[[Path], str], tuple[str, ...]] = {
    unknown_key: ("meta.kl_wieght", "unknown"),
    missing_data: ("'mnist'", "qualms data mnist"),
    empty_class: ("emu", "no images"),
    corrupt_image: ("dog/03.png", "damaged or truncated"),
    weights_with_nan: ("'conv2.weight'", "1 of 1152", "not finite"),
    tap_typo: ("'poool2'", "did you mean", "'pool2'"),
    unsupported_target: ("0.0001", "29,956 calibration images", "1,000"),
    unknown_flag_score: ("operating.score is 'energy'; accepted are ", ", ".join(SCORES)),
    unknown_trust_score: ("operating.trust_score is 'softmax'; accepted are ", ", ".join(SCORES)),
    unknown_stop_score: ("meta.stop_score is 'fused'; accepted are ", ", ".join(DIRICHLET_SCORES)),
}


def qualms(*arguments: str, data: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "QUALMS_DATA": str(data), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", "from qualms.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def attempt(make: Callable[[Path], str], root: Path) -> Outcome:
    """Run `qualms train` on the recipe that `make` returns."""
    recipe, out, data = root / "recipe.toml", root / "out", root / "data"
    data.mkdir(parents=True)
    recipe.write_text(make(root), encoding="utf-8")
    done = qualms("train", str(recipe), "--out", str(out), "--device", "cpu", data=data)
    return Outcome(done.returncode, done.stdout, done.stderr, out)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The outcomes of all cases, run two at a time because each mostly waits for Python to start."""
    with ThreadPoolExecutor(2) as pool:
        started = {
            case.__name__: pool.submit(attempt, case, tmp_path_factory.mktemp(case.__name__) / "case") for case in CASES
        }
        return {name: future.result() for name, future in started.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bad_input_prints_one_sentence_and_writes_nothing(
    case: Callable[[Path], str], outcomes: dict[str, Outcome]
) -> None:
    outcome = outcomes[case.__name__]
    assert outcome.code == 2, outcome.err
    assert outcome.err.startswith("qualms: ")
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.endswith("\n")
    assert "Traceback" not in outcome.err + outcome.out
    for part in CASES[case]:
        assert part in outcome.err
    assert not outcome.folder.exists()


# qualms calibrate and qualms evaluate


def unknown_encoding(_: Path) -> list[str]:
    return ["digits", "--as-sent", "png,jpg:80"]


def quality_out_of_range(_: Path) -> list[str]:
    return ["digits", "--as-sent", "png", "--as-sent", "jpeg:75-101"]


def unknown_encoding_of_own_images(_: Path) -> list[str]:
    return ["--as-sent", "heic"]


def folder_of_one_image(root: Path) -> list[str]:
    (root / "one").mkdir()
    shutil.copy(next((root / "flat").iterdir()), root / "one")
    return ["one"]


def class_folder_of_one_image(root: Path) -> list[str]:
    (root / "one" / "3").mkdir(parents=True)
    shutil.copy(next((root / "flat").iterdir()), root / "one" / "3")
    return ["one"]


def folder_without_images(root: Path) -> list[str]:
    (root / "empty").mkdir()
    return ["empty", "--unlabelled"]


def images_and_folders(root: Path) -> list[str]:
    (root / "flat" / "more").mkdir()
    return ["flat"]


def damaged_image(root: Path) -> list[str]:
    (root / "digits" / "0" / "000.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    return ["digits", "--target-fpr", "0.1"]


def encodings_of_recorded_scores(root: Path) -> list[str]:
    (root / "scores.jsonl").touch()
    return ["--from-log", "scores.jsonl", "--as-sent", "png"]


def empty_log(root: Path) -> list[str]:
    (root / "scores.jsonl").touch()
    return ["--from-log", "scores.jsonl"]


def log_that_is_an_image(_: Path) -> list[str]:
    return ["--from-log", "flat/000.png"]


def missing_log(_: Path) -> list[str]:
    return ["--from-log", "nowhere.jsonl"]


def images_and_log(root: Path) -> list[str]:
    (root / "scores.jsonl").touch()
    return ["flat", "--from-log", "scores.jsonl"]


def no_labels_of_nothing(_: Path) -> list[str]:
    return ["--unlabelled"]


def missing_folder(_: Path) -> list[str]:
    return ["nowhere"]


def text_file(root: Path) -> list[str]:
    (root / "notes.txt").write_text("not images")
    return ["notes.txt"]


def trimmed_share_out_of_range(_: Path) -> list[str]:
    return ["flat", "--trim", "0.6"]


def trimmed_labels(_: Path) -> list[str]:
    return ["digits", "--trim", "0.05", "--target-fpr", "0.1"]


def trust_of_labelled_images(_: Path) -> list[str]:
    return ["digits", "--keep-trust", "--target-fpr", "0.1"]


def own_images_without_a_data_folder(_: Path) -> list[str]:
    return ["--as-sent", "jpeg:75"]


CALIBRATIONS: dict[Callable[[Path], list[str]], tuple[str, ...]] = {
    unknown_encoding: ("The encoding 'jpg:80' is unknown: 'jpg' is not one of png, ", "examples are png, jpeg:75-95"),
    quality_out_of_range: ("The encoding 'jpeg:75-101' is not accepted: jpeg takes a whole number from 1 to 100",),
    unknown_encoding_of_own_images: ("The encoding 'heic' is unknown",),
    folder_of_one_image: ("needs at least 299 calibration images; there are 1.",),
    class_folder_of_one_image: ("needs at least 299 calibration images; there are 1.",),
    folder_without_images: ("Folder empty has no images",),
    images_and_folders: ("Folder flat holds both images and the folder more", "--unlabelled"),
    damaged_image: ("File digits/0/000.png is not usable", "damaged"),
    encodings_of_recorded_scores: (
        "Recorded scores cannot be sent in another encoding",
        "--form and --seed, or --from-log",
    ),
    empty_log: ("Score log scores.jsonl has no records", "QUALMS_SCORE_LOG"),
    log_that_is_an_image: ("Score log flat/000.png cannot be read: it is not a text file",),
    missing_log: ("Score log nowhere.jsonl cannot be read: No such file",),
    images_and_log: ("Both the data 'flat' and the log 'scores.jsonl' are given",),
    no_labels_of_nothing: ("--unlabelled needs DATA",),
    missing_folder: ("There is no folder 'nowhere'", "NAME-SPLIT.npz"),
    text_file: ("Data 'notes.txt' is neither a folder of images", "NAME-SPLIT.npz"),
    trimmed_share_out_of_range: ("The share to trim must be from 0 to 0.5, not 0.6",),
    trimmed_labels: ("Only images without labels can be trimmed",),
    trust_of_labelled_images: ("--keep-trust is for images without labels",),
    own_images_without_a_data_folder: ("a data set of this name needs a data folder", "QUALMS_DATA"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with 60 drawn digits in class folders and others without labels."""
    for index, (label, pixels) in enumerate(draw_many(120, seed=4)):
        place = tmp_path / "digits" / str(label) if index < 60 else tmp_path / "flat"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{index % 60:03}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUALMS_DATA", raising=False)
    return tmp_path


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run a command in this process, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["qualms", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def assert_one_sentence(capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("qualms: "), captured.err
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.endswith(".\n")
    for part in parts:
        assert part in captured.err


@pytest.mark.parametrize("case", CALIBRATIONS, ids=lambda case: case.__name__)
def test_a_calibration_that_is_not_possible_prints_one_sentence_and_writes_nothing(
    case: Callable[[Path], list[str]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = case(folder)
    assert command(monkeypatch, "calibrate", "demo", *arguments, "--out", "made/new.onnx") == 2
    assert_one_sentence(capsys, *CALIBRATIONS[case])
    assert not (folder / "made").exists()


def test_a_calibration_in_a_run_folder_needs_another_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "seed-0").mkdir()
    model = Path(shutil.copy(resolve_model("demo"), folder / "seed-0" / "model.onnx"))
    (folder / "seed-0" / "stages.json").write_text("{}")
    before = model.read_bytes()
    options = ("calibrate", "seed-0/model.onnx", "digits", "--target-fpr", "0.1")
    assert command(monkeypatch, *options) == 2
    assert_one_sentence(capsys, "seed-0/model.onnx is the product of a run", "--out")
    assert model.read_bytes() == before
    assert command(monkeypatch, *options, "--out", "new.onnx") == 0
    assert open_bundle(folder / "new.onnx").manifest.calibration.n == 60
    assert model.read_bytes() == before


def test_evaluating_on_the_images_of_the_calibration_prints_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for labels in ((), ("--unlabelled",)):
        options = ("calibrate", "demo", "digits", "--target-fpr", "0.1", "--out", "new.onnx", *labels)
        assert command(monkeypatch, *options) == 0
        capsys.readouterr()
        before = (folder / "new.onnx").read_bytes()
        assert command(monkeypatch, "evaluate", "new.onnx", "--test", "digits", "--write") == 2
        assert_one_sentence(capsys, "60 of the 60 test images of 'digits' were used to calibrate demo", "other images")
        assert (folder / "new.onnx").read_bytes() == before


@pytest.mark.parametrize(
    ("test", "part"),
    [("flat", "labels are needed here"), ("nowhere", "There is no folder"), ("notes.txt", "is neither a folder")],
)
def test_test_images_that_cannot_be_used_print_one_sentence(
    test: str, part: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "notes.txt").write_text("not images")
    assert command(monkeypatch, "evaluate", "demo", "--test", test) == 2
    assert_one_sentence(capsys, test, part)
