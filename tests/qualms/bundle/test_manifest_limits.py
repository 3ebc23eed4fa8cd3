"""Manifests that would take much memory are refused with the limit."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from qualms.bundle import manifest as manifest_module
from qualms.bundle.checks import manifest_text
from qualms.bundle.manifest import Manifest
from qualms.errors import BundleError
from qualms.images.input_spec import InputSpec

Document = dict[str, Any]


def message(text: str) -> str:
    with pytest.raises(BundleError) as caught:
        Manifest.from_json(text)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix("The file has a damaged manifest: ")


# The text


def test_too_many_members_are_refused_before_they_are_parsed() -> None:
    text = '{"a":1' + ":" * 1_000_000  # not JSON, which is not noticed
    assert message(text) == "it has about 1,000,001 members of objects, and at most 1,000,000 are accepted."


def test_too_many_values_are_refused_before_they_are_parsed() -> None:
    assert message("[" + "," * 4_000_001) == "it has about 4,000,001 values, and at most 4,000,000 are accepted."


def test_an_object_with_too_many_members_is_refused(document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_text, "MAX_OBJECT_MEMBERS", 1000)
    document |= {f"f{index}": 1 for index in range(1000)}
    text = message(json.dumps(document))
    assert text.startswith("an object has 1,0")
    assert text.endswith("and at most 1,000 are accepted.")


def test_a_repeated_key_is_refused(manifest: Manifest) -> None:
    text = manifest.to_json()
    assert message('{"name": "other", ' + text[1:]) == "an object has two members of the same name."


@pytest.mark.parametrize(("part", "field"), [("calibration", "wrong"), ("evaluation", "ood"), ("reference", "levels")])
def test_validation_ends_at_the_first_invalid_item_of_a_list(document: Document, part: str, field: str) -> None:
    document[part][field] = [{}] * 1000
    with pytest.raises(ValidationError) as caught:
        Manifest.model_validate(document)
    assert caught.value.error_count() < 20


# Sizes


def test_a_deeply_nested_recipe_is_refused(document: Document) -> None:
    value: Any = 1
    for _ in range(30):
        value = [value]
    document["provenance"]["recipe"] = {"a": value}
    Manifest.from_json(json.dumps(document)).to_json()
    document["provenance"]["recipe"] = {"a": {"b": [value]}}
    assert message(json.dumps(document)) == "provenance.recipe: it is nested deeper than 32 levels."


def test_too_many_classes_are_refused(document: Document) -> None:
    document["classes"] = [str(index) for index in range(50_001)]
    assert message(json.dumps(document)).startswith("classes: List should have at most 50000 items")


def test_too_many_scores_are_refused(document: Document) -> None:
    document["scores"] |= {f"s{index}": document["scores"]["entropy"] for index in range(100)}
    assert message(json.dumps(document)).startswith("scores: Dictionary should have at most 100 items")


def test_too_many_settings_are_refused(worst_manifest: Manifest) -> None:
    document = json.loads(worst_manifest.to_json())
    document["calibration"]["settings"] = document["calibration"]["settings"][:1] * 1001
    assert message(json.dumps(document)).startswith("calibration.settings: List should have at most 1000 items")


def test_too_many_classes_in_too_many_settings_are_refused(
    worst_manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "MAX_CLASS_SETTINGS", 8)
    assert message(worst_manifest.to_json()) == (
        "the document: 3 classes in 3 settings are too many: at most 8 classes × settings are accepted."
    )


@pytest.mark.parametrize("size", [(4096, 4096), (1025, 1024), (4096, 257)])
def test_a_large_input_is_refused(document: Document, size: tuple[int, int]) -> None:
    document["input"] |= {"height": size[0], "width": size[1]}
    assert message(json.dumps(document)) == (
        f"input: an image of {size[0]} × {size[1]} pixels is too large: at most 1,048,576 pixels are accepted."
    )


def test_usual_and_long_inputs_are_accepted() -> None:
    for size in (224, 384, 518, 640, 1024):
        InputSpec(height=size, width=size, fit="crop", shorter_side=round(size / 0.7))
    InputSpec(height=256, width=4096)


def test_golden_images_of_too_many_pixels_are_refused(document: Document) -> None:
    document["input"] |= {"height": 1024, "width": 1024}
    document["golden"]["count"] = 64
    text = message(json.dumps(document))
    assert text.startswith("the document: golden.count is 64, which are 201,326,592 values of pixels")


def test_a_shorter_side_far_above_the_input_is_refused() -> None:
    InputSpec(height=6, width=5, fit="crop", shorter_side=256)
    with pytest.raises(ValidationError, match="for a crop of 224 × 200 pixels at most 896 is accepted"):
        InputSpec(height=224, width=200, fit="crop", shorter_side=897)
