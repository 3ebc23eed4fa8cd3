"""Bad input on the command line: one sentence on stderr, exit code 2, no traceback, and no files written."""

import os
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

from qualms.bundle.scores import DIRICHLET_SCORES, SCORES
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
