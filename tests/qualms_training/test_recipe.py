"""Errors in recipes name the key, the value and what is accepted; the recipes in the package are valid."""

import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qualms.bundle.manifest import SetMethod
from qualms.bundle.scores import DIRICHLET_SCORES, SCORES
from qualms.images.encodings import covers, parse_encoding, parse_encodings
from qualms_training.errors import RecipeError
from qualms_training.fitting.loop import make_optimizer
from qualms_training.meta.extractor import Reduce
from qualms_training.meta.meta_model import PooledMeta, PublishedMeta
from qualms_training.meta.taps.tapped import Tapped, choose_taps, tap_shapes
from qualms_training.models import build, freeze
from qualms_training.recipe import (
    REPORTED_ENCODINGS,
    Optimisation,
    Recipe,
    available,
    check_recipe,
    load_recipe,
    resolve_paths,
)

Alter = Callable[[Mapping[str, Any]], Recipe]

TINY = (resources.files("qualms_training") / "recipes" / "tiny.toml").read_text(encoding="utf-8")
CLASSES = {"shapes": 4, "mnist": 10, "cifar10": 10, "cifar100": 100}


@pytest.mark.parametrize("name", available())
def test_every_recipe_of_the_package_loads_under_its_own_name(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description.endswith(".")


@pytest.mark.parametrize("name", available())
def test_taps_and_branches_of_every_recipe_of_the_package_fit_its_base(name: str) -> None:
    recipe = load_recipe(name)
    spec, classes = recipe.input, CLASSES[recipe.data.id]
    base = freeze(build(recipe.base.model, classes, spec.channels, spec.height, spec.width))
    example = torch.zeros(2, spec.channels, spec.height, spec.width)
    taps = choose_taps(base, example) if recipe.base.taps == "auto" else recipe.base.taps
    Tapped(base, taps)
    reduce = (
        Reduce("flatten")
        if recipe.meta.form == "published"
        else Reduce("pool", recipe.meta.grid, recipe.meta.statistics)
    )
    widths = [reduce.output_shape(shape) for shape in tap_shapes(base, taps, example)]
    with torch.device("meta"):  # the published meta-models have hundreds of millions of weights
        if recipe.meta.form == "published":
            PublishedMeta(widths, classes, recipe.meta.branches)
        else:
            PooledMeta(widths, classes, recipe.meta.hidden)


def test_a_recipe_can_be_read_back_from_its_json() -> None:
    recipe = load_recipe("tiny")
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize(
    "key", ["colour", "data.augment", "data.splits.test", "input.dpi", "base.lrr", "meta.lambda", "operating.fpr"]
)
def test_an_unknown_key_is_named_at_any_depth(key: str, tiny: Alter) -> None:
    with pytest.raises(RecipeError, match=f"{key}: this field is unknown"):
        tiny({key: 1})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", "My Recipe!", "name: .*match"),
        ("data.splits.train", 0, r"data\.splits\.train: .*greater than 0"),
        ("data.splits.calibration", -1, r"data\.splits\.calibration"),
        ("data.splits.fit", 1.5, r"data\.splits\.fit: .*integer"),
        ("data.limit", 0, r"data\.limit"),
        ("data.held_out", "validation", r"data\.held_out: .*'train' or 'test'"),
        ("input.height", 0, r"input\.height"),
        ("input.colour", "CMYK", r"input\.colour"),
        ("input.mean", [0.5], "mean and std need 3 value"),
        ("input.colour", "L", "mean and std need 1 value"),
        ("input.std", [0.5, 0.5, 0.0], r"input\.std\.2: .*greater than 0"),
        ("input.mean", [0.5, 0.5, float("nan")], r"input\.mean\.2: .*finite"),
        ("input.std", [0.5, 0.5, float("inf")], r"input\.std\.2: .*finite"),
        ("base.lr", 0, r"base\.lr: .*greater than 0"),
        ("base.lr", float("nan"), r"base\.lr"),
        ("base.epochs", 0, r"base\.epochs"),
        ("base.optimizer", "lion", r"base\.optimizer: .*'sgd' or 'adam'"),
        ("base.schedule", "linear", r"base\.schedule"),
        ("base.milestones", [3], "milestones and factors must have the same length"),
        ("base.augment", "mixup", r"base\.augment"),
        ("base.weights", "base.pt", "weights and weights_saw belong together"),
        ("base.weights_saw", "all", "weights and weights_saw belong together"),
        ("base.weights_seed", 0, "'train-split' and weights_seed belong together"),
        ("base.weights_seed", -1, r"base\.weights_seed: .*greater than or equal to 0"),
        ("meta.kl_weight", 0, r"meta\.kl_weight: .*greater than 0"),
        ("meta.prior", -1, r"meta\.prior"),
        ("meta.form", "linear", r"meta\.form"),
        ("meta.statistics", ["median"], r"meta\.statistics"),
        ("meta.stop_noise", [], r"meta\.stop_noise"),
        ("meta.stop_noise", [[]], r"meta\.stop_noise"),
        (
            "meta.stop_noise",
            [["blur", "fog"]],
            r"meta\.stop_noise\.0\.1: noise 'fog' is not known; "
            "accepted are permutation, blur, contrast, shuffle, mosaic, blend",
        ),
        (
            "meta.stop_score",
            "mutual_informatoin",
            rf"meta\.stop_score is 'mutual_informatoin'; accepted are {', '.join(DIRICHLET_SCORES)}\.$",
        ),
        ("meta.stop_score", "fused", r"meta\.stop_score is 'fused'; accepted are entropy"),
        ("operating.score", "energy", rf"operating\.score is 'energy'; accepted are {', '.join(SCORES)}\.$"),
        (
            "operating.trust_score",
            "softmax",
            rf"operating\.trust_score is 'softmax'; accepted are {', '.join(SCORES)}\.$",
        ),
        ("distance", "yes please", "distance: .*boolean"),
        ("operating.target_fpr", 0, r"operating\.target_fpr"),
        ("operating.target_risk", 1, r"operating\.target_risk"),
        ("report_targets", [2.0], "report_targets"),
        (
            "calibration.as_sent",
            ["png", "jpg:75"],
            r"calibration\.as_sent: The encoding 'jpg:75' is unknown: 'jpg' is not",
        ),
        ("calibration.as_sent", ["jpeg:101"], r"calibration\.as_sent: The encoding 'jpeg:101' .*from 1 to 100"),
        ("calibration.as_sent", ["jpeg:95-75"], r"calibration\.as_sent: The encoding 'jpeg:95-75' is not accepted"),
        (
            "calibration.as_sent",
            ["png+jpeg:75"],
            r"The encoding 'png\+jpeg:75' goes on after png; a file format must be",
        ),
        (
            "calibration.as_sent",
            ["resize:1-8+jpeg:50-95"],
            r"as_sent: The encodings .* expand to \d+ settings; at most 64",
        ),
        ("calibration.as_sent", "png", r"calibration\.as_sent: .*list"),
        ("calibration.form", "best", r"calibration\.form: .*'mixture', 'worst' or 'by-size'"),
        ("calibration.sets", {"method": "aps"}, r"calibration\.sets\.method: .*'lac' or 'raps'"),
        (
            "calibration.sets",
            {"method": "raps", "penalty": -1},
            r"calibration\.sets\.penalty: .*greater than or equal to 0",
        ),
        ("calibration.sets", {"free_ranks": 0}, r"calibration\.sets\.free_ranks: .*greater than or equal to 1"),
        ("calibration.sets", {"lambda": 1}, r"calibration\.sets\.lambda: this field is unknown"),
        ("calibration.as_send", [], r"calibration\.as_send: this field is unknown"),
        ("report_encodings", ["png", "resize:9"], r"report_encodings: The encoding 'resize:9' .*from 0.1 to 8"),
        ("report_limit", 0, "report_limit: .*greater than 0"),
    ],
)
def test_an_invalid_value_is_named(key: str, value: object, message: str, tiny: Alter) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        tiny({key: value})
    assert "\n" not in str(caught.value)


def test_calibration_images_are_used_as_stored_unless_the_recipe_says_otherwise(tiny: Alter) -> None:
    section = tiny({}).calibration
    assert (section.as_sent, section.form, section.sets.method) == ([], "worst", "lac")
    document = load_recipe("tiny").model_dump(mode="json")
    for key in ("calibration", "report_encodings", "report_limit"):  # recipes that earlier versions recorded
        del document[key]
    earlier = check_recipe(document, "recorded earlier")
    assert earlier.calibration == section
    assert (earlier.report_encodings, earlier.report_limit) == (list(REPORTED_ENCODINGS), 10_000)


def test_a_recipe_can_name_encodings_form_and_method_of_prediction_sets(tiny: Alter) -> None:
    listed = ["png", "jpeg:75-95", "resize:1.5-3", "resize:2+jpeg:75-95"]
    section = tiny(
        {
            "calibration.as_sent": listed,
            "calibration.form": "mixture",
            "calibration.sets": {"method": "raps", "penalty": 0.1, "free_ranks": 2},
            "report_encodings": ["png"],
        }
    ).calibration
    assert (section.as_sent, section.form) == (listed, "mixture")
    assert section.sets == SetMethod(method="raps", penalty=0.1, free_ranks=2)


@pytest.mark.parametrize("name", ["mnist-lenet-pooled", "cifar10-resnet20"])
def test_the_recipes_of_the_embedded_models_calibrate_for_files_that_people_send(name: str) -> None:
    section = load_recipe(name).calibration
    for text in ("png", "jpeg:75", "jpeg:95", "webp:80", "resize:2:bilinear", "resize:2+jpeg:85"):
        sent = parse_encoding(text)
        assert any(covers(listed, sent) for listed in parse_encodings(section.as_sent)), text
    assert section.form != "mixture"


@pytest.mark.parametrize("section", ["base", "meta"])
def test_milestones_must_ascend_and_need_the_schedule_steps(section: str, tiny: Alter) -> None:
    steps = {f"{section}.schedule": "steps", f"{section}.factors": [0.1, 0.01]}
    assert tiny({**steps, f"{section}.milestones": [1, 2]})
    with pytest.raises(RecipeError, match="milestones must be in ascending order"):
        tiny({**steps, f"{section}.milestones": [2, 1]})
    with pytest.raises(RecipeError, match="milestones need schedule 'steps', not 'cosine'"):
        tiny({**steps, f"{section}.milestones": [1, 2], f"{section}.schedule": "cosine"})


def test_nesterov_without_momentum_is_an_error(tiny: Alter) -> None:
    with pytest.raises(RecipeError, match="nesterov needs a momentum"):
        tiny({"base.nesterov": True, "base.momentum": 0})
    assert tiny({"base.nesterov": True})


def test_calibration_on_images_that_the_weights_were_trained_on_is_an_error(tiny: Alter) -> None:
    given = {"base.weights": "base.pt", "base.weights_saw": "all"}
    with pytest.raises(RecipeError, match="calibration on training images would be invalid"):
        tiny(given)
    assert tiny({**given, "data.held_out": "test"}).data.held_out == "test"
    assert tiny({**given, "base.weights_saw": "train-split", "base.weights_seed": 0}).data.held_out == "train"


def test_weights_trained_on_a_train_split_need_its_seed_and_run_with_no_other(tiny: Alter) -> None:
    given = {"base.weights": "base.pt", "base.weights_saw": "train-split"}
    with pytest.raises(RecipeError, match="weights_seed is the seed of"):
        tiny(given)
    recipe = tiny({**given, "base.weights_seed": 3})
    recipe.check_seed(3)
    for seed in (0, 4):
        with pytest.raises(RecipeError, match=f"train split of seed 3, and seed {seed} .*--seed 3 --seeds 1"):
            recipe.check_seed(seed)
    tiny({}).check_seed(7)


def test_an_unset_weights_seed_is_not_written(tiny: Alter) -> None:
    assert "weights_seed" not in tiny({}).model_dump(mode="json")["base"]


def test_weights_trained_on_other_data_allow_calibration_on_training_images(tiny: Alter) -> None:
    recipe = tiny({"base.weights": "base.pt", "base.weights_saw": "other-data"})
    assert recipe.data.held_out == "train"
    assert recipe.base.weights_file == Path("base.pt")


def test_included_weights_need_a_model_given_as_a_function(tiny: Alter) -> None:
    given = {"base.weights": "included", "base.weights_saw": "other-data"}
    assert tiny({**given, "base.model": "mine.models:pretrained"}).base.weights_file is None
    for model in ("small", "torchvision:resnet18", "timm:vit"):
        with pytest.raises(RecipeError, match=f"package.module:function or as a file, not '{model}'"):
            tiny({**given, "base.model": model})


def test_the_default_scores_are_the_flag_score_and_the_error_that_the_classifier_predicts(tiny: Alter) -> None:
    document = load_recipe("tiny").model_dump(mode="json")
    assert "score" not in tomllib.loads(TINY)["operating"]
    for form in ("pooled", "published"):
        meta = {**document["meta"], "form": form, "branches": ["8-4"] * 2}
        operating = check_recipe({**document, "meta": meta, "operating": {}}, "mine").operating
        assert (operating.score, operating.trust_score) == ("fused", "predicted_error")
    named = {"operating.score": "meta_mutual_information", "operating.trust_score": "max_probability"}
    assert (tiny(named).operating.score, tiny(named).operating.trust_score) == tuple(named.values())


def test_the_distance_is_used_by_default_only_if_the_taps_are_pooled(tiny: Alter) -> None:
    published = {"meta.form": "published", "meta.branches": ["8-4", "8-4"]}
    assert tiny({}).uses_distance
    assert not tiny(published).uses_distance
    assert tiny({**published, "distance": True}).uses_distance
    without = tiny({"distance": False})
    assert not without.uses_distance
    assert without.scores == [name for name in SCORES if name != "distance"]
    assert tiny({}).scores == list(SCORES)
    with pytest.raises(RecipeError, match=r"operating\.score is 'distance'; accepted are entropy, .*, fused\.$"):
        tiny({"distance": False, "operating.score": "distance"})


@pytest.mark.parametrize("fuse", [None, True, False])
def test_fuse_is_read_as_the_former_name_of_distance(fuse: bool | None) -> None:
    document = load_recipe("tiny").model_dump(mode="json")
    del document["distance"]
    recipe = check_recipe({**document, "fuse": fuse}, "recorded earlier")
    assert recipe.distance is fuse
    assert "fuse" not in recipe.model_dump()
    with pytest.raises(RecipeError, match="fuse: this field is unknown"):
        check_recipe({**document, "fuse": fuse, "distance": fuse}, "mine")


def test_the_default_kl_weight_follows_the_number_of_classes(tiny: Alter) -> None:
    section = tiny({"meta.kl_weight": None}).meta
    for classes in (2, 10, 100, 1000):
        assert 1 / section.kl_weight_for(classes) == pytest.approx(100 * classes)
    assert section.kl_weight_for(10) == pytest.approx(1e-3)  # the paper's
    assert tiny({"meta.kl_weight": 0.2}).meta.kl_weight_for(1000) == 0.2
    document = load_recipe("tiny").model_dump(mode="json")
    del document["meta"]["kl_weight"]
    assert check_recipe(document, "mine").meta.kl_weight is None


def test_stopping_by_misclassification_needs_a_base_that_predicts(tiny: Alter) -> None:
    assert tiny({}).prediction == "base"
    assert tiny({"prediction": "meta"}).prediction == "meta"
    with pytest.raises(RecipeError, match="needs errors of the base.*set meta.stop_task to 'ood'"):
        tiny({"prediction": "meta", "meta.stop_task": "misclassification"})


@pytest.mark.parametrize("missing", ["name", "data", "input", "base", "meta"])
def test_a_missing_section_is_named(missing: str) -> None:
    document = load_recipe("tiny").model_dump(mode="json")
    del document[missing]
    with pytest.raises(RecipeError, match=f"{missing}: Field required"):
        check_recipe(document, "mine")


def test_invalid_toml_is_an_error_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ndata = ?\n')
    with pytest.raises(RecipeError, match=r"mine\.toml is not valid TOML: .*line 2") as caught:
        load_recipe(str(file))
    assert "\n" not in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"absent\.toml cannot be read"):
        load_recipe(str(tmp_path / "absent.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"binary\.toml cannot be read"):
        load_recipe(str(tmp_path / "binary.toml"))
    with pytest.raises(RecipeError, match="cannot be read"):
        (tmp_path / "folder.toml").mkdir()
        load_recipe(str(tmp_path / "folder.toml"))


def test_the_error_for_an_unknown_name_lists_the_recipes() -> None:
    with pytest.raises(RecipeError, match=r"no recipe 'tinny'.*tiny"):
        load_recipe("tinny")


def test_a_recipe_can_be_loaded_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TINY)
    assert load_recipe(str(tmp_path / "mine.toml")) == load_recipe("tiny")


def test_the_input_spec_of_the_manifest_has_no_normalisation() -> None:
    spec = load_recipe("tiny").input.spec
    assert (spec.height, spec.width, spec.colour) == (16, 16, "RGB")
    assert not hasattr(spec, "mean")


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_optimizer_has_the_settings_of_the_recipe(name: str) -> None:
    section = Optimisation.model_validate(
        {"epochs": 1, "lr": 0.3, "optimizer": name, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01}
    )
    model = nn.Linear(2, 3)
    optimizer = make_optimizer(model, section)
    (group,) = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.Adam if name == "adam" else torch.optim.SGD)
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.01)
    assert {id(parameter) for parameter in group["params"]} == {id(parameter) for parameter in model.parameters()}
    if name == "sgd":
        assert (group["momentum"], group["nesterov"]) == (0.8, True)


def test_a_partial_last_batch_counts_as_a_step_of_the_schedule() -> None:
    section = Optimisation.model_validate(
        {"epochs": 4, "batch": 10, "lr": 1.0, "schedule": "steps", "milestones": [1], "factors": [0.5]}
    )
    rate = section.rate(examples=21)  # three steps per epoch
    assert [rate(step) for step in range(5)] == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_unknown_keys_are_named_before_missing_ones() -> None:
    document = {"name": "mine", "base": {"modell": "small"}, "data": {}}
    with pytest.raises(RecipeError, match=r"base\.modell: this field is unknown; did you mean 'model'\?"):
        check_recipe(document, "mine.toml")


def test_paths_of_a_recipe_file_are_relative_to_it(tmp_path: Path) -> None:
    text = TINY.replace('id = "shapes"', 'id = "folder:photos"').replace('"textures"', '"folder:/other/photos"')
    text = text.replace("[base]", '[base]\nweights = "w.pt"\nweights_saw = "other-data"')
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    recipe = load_recipe(str(tmp_path / "mine.toml"))
    assert recipe.data.id == f"folder:{tmp_path}/photos"
    assert recipe.data.ood == ["folder:/other/photos", "strokes"]
    assert recipe.base.weights_file == tmp_path / "w.pt"


def test_names_of_weights_and_models_are_not_paths(tmp_path: Path) -> None:
    document: dict[str, Any] = {"base": {"model": "torchvision:resnet50", "weights": "IMAGENET1K_V2"}}
    resolve_paths(document, tmp_path)
    assert document == {"base": {"model": "torchvision:resnet50", "weights": "IMAGENET1K_V2"}}
    document = {"base": {"model": "net.pt2", "weights": "included"}}
    resolve_paths(document, tmp_path)
    assert document == {"base": {"model": str(tmp_path / "net.pt2"), "weights": "included"}}
