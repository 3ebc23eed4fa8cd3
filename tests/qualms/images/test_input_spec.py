"""`shorter_side` is written only if it is set, so that older services can read other bundles."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from pydantic import ValidationError
from rich.console import Console

from qualms.bundle.file import Bundle, write_bundle
from qualms.bundle.manifest import Manifest
from qualms.images.input_spec import InputSpec
from qualms.inspection import print_bundle

CROPPED = InputSpec(height=6, width=5, fit="crop", shorter_side=8)
WITHOUT_SHORTER_SIDE = {"height": 6, "width": 5, "colour": "RGB", "resize": "bilinear", "fit": "crop"}


def test_an_unset_shorter_side_is_not_written() -> None:
    spec = InputSpec(height=6, width=5, fit="crop")
    assert spec.model_dump() == spec.model_dump(mode="json") == WITHOUT_SHORTER_SIDE
    assert spec.model_dump_json() == '{"height":6,"width":5,"colour":"RGB","resize":"bilinear","fit":"crop"}'
    assert InputSpec(height=6, width=5, fit="crop", shorter_side=None).model_dump() == WITHOUT_SHORTER_SIDE


def test_a_shorter_side_is_written_and_read() -> None:
    assert CROPPED.model_dump() == {**WITHOUT_SHORTER_SIDE, "shorter_side": 8}
    assert InputSpec.model_validate_json(CROPPED.model_dump_json()) == CROPPED


def test_a_manifest_has_the_shorter_side_only_if_it_is_set(manifest: Manifest) -> None:
    assert "shorter_side" not in manifest.to_json()
    cropped = manifest.model_copy(update={"input": CROPPED})
    assert Manifest.from_json(cropped.to_json()).input == CROPPED


def test_inspection_prints_the_shorter_side(graph: bytes, manifest: Manifest) -> None:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    print_bundle(
        Bundle(Path("cropped.onnx"), manifest.model_copy(update={"input": CROPPED}), graph, "ab" * 32), console
    )
    assert isinstance(console.file, io.StringIO)
    assert "6 × 5 RGB, bilinear, crop from a shorter side of 8" in console.file.getvalue()


def test_the_models_route_returns_the_shorter_side_as_in_the_openapi_document(
    start_service: Callable[..., httpx.Client], graph: bytes, manifest: Manifest, tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path / "cropped.onnx", graph, manifest.model_copy(update={"input": CROPPED}))
    client = start_service(bundle.path)
    openapi: dict[str, Any] = client.get("/openapi.json").json()
    reply = client.get("/models").json()
    assert reply["models"][0]["input"] == CROPPED.model_dump()
    schema = openapi["paths"]["/models"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema_rs.Draft202012Validator({**schema, "components": openapi["components"]}).validate(reply)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"fit": "stretch", "shorter_side": 8}, "shorter_side needs fit 'crop', not 'stretch'"),
        ({"shorter_side": 5}, "shorter_side is 5, but a crop of 6 × 5 pixels needs at least 6"),
        ({"shorter_side": 0}, "greater than 0"),
        ({"shorter_side": 10_000}, "less than or equal to 4096"),
    ],
)
def test_an_invalid_shorter_side_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        InputSpec.model_validate({**WITHOUT_SHORTER_SIDE, **changes})
