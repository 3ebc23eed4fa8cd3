"""Options of the command line: values that cannot be read are named, and the rest have defaults."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qualms_training.errors import RecipeError
from qualms_training.options import Form
from qualms_training.own_model.options import InputOptions, data_name, listed, model_name, parse_options


def parse(**given: Any) -> Any:
    return parse_options({"model": "torchvision:resnet50", "form": Form.worst, **given})


def test_only_the_model_is_needed() -> None:
    options = parse()
    assert (options.name, options.weights, options.taps, options.as_sent) == ("resnet50", None, None, ())
    assert options.input == InputOptions()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("timm:resnet50.a1_in1k", "resnet50.a1_in1k"),
        ("timm:hf_hub:timm/ViT_tiny", "vit_tiny"),
        ("models/My Net.pt2", "my-net"),
        ("package.module:net", "net"),
    ],
)
def test_the_served_name_comes_from_the_model(model: str, name: str) -> None:
    assert model_name(model) == name


def test_the_distance_is_used_unless_it_is_declined() -> None:
    assert parse().distance
    assert not parse(no_distance=True).distance


def test_size_mean_and_crop_are_read() -> None:
    given = parse(size="224x320", mean="0.5,0.4,0.3", std="1,1,1", crop=256, colour="RGB", resize="bicubic").input
    assert (given.height, given.width, given.fit, given.shorter_side) == (224, 320, "crop", 256)
    assert (given.mean, given.std, given.resize) == ((0.5, 0.4, 0.3), (1.0, 1.0, 1.0), "bicubic")


def test_a_crop_of_0_stretches() -> None:
    assert (parse(crop=0).input.fit, parse(crop=0).input.shorter_side) == ("stretch", None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": "big"}, "--size is 'big'; accepted are pixels such as 224"),
        ({"mean": "a,b", "std": "1,1"}, "--mean is 'a,b'; accepted is one number per channel"),
        ({"mean": "0.5"}, "must be given together"),
        ({"weights_saw": "some"}, "--weights-saw is 'some'; accepted are all, other-data"),
        ({"colour": "CMYK"}, "--colour is 'CMYK'; accepted are RGB, L"),
        ({"target_fpr": 5.0}, r"--target-fpr \(`target_fpr` in Python\) is 5; accepted are shares between 0 and 1"),
        ({"target_risk": 0.0}, "--target-risk .* is 0; accepted are shares between 0 and 1"),
        ({"resize": "cubic"}, "--resize is 'cubic'; accepted are nearest"),
    ],
)
def test_values_that_cannot_be_read_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse(**given)


def test_a_name_alone_is_a_list_of_one_and_other_objects_are_refused() -> None:
    assert listed("taps", "layer1") == ("layer1",)
    assert listed("ood", Path("photos")) == (Path("photos"),)
    assert data_name(Path("photos")) == "folder:photos"
    assert listed("taps", np.array(["layer1", "layer2"])) == ("layer1", "layer2")
    for wrong in ([np.zeros((2, 8, 8, 3))], {"svhn": 3}, 3):
        with pytest.raises(RecipeError, match="`ood` holds an object of type .*; accepted are names and folders"):
            listed("ood", wrong)


def test_lists_are_separated_by_commas(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    options = parse(tap="layer1, layer2", as_sent="png,jpeg:75-95", classes=tmp_path / "classes.txt")
    assert options.taps == ("layer1", "layer2")
    assert options.as_sent == ("png", "jpeg:75-95")
    assert options.classes == ("cat", "dog")
