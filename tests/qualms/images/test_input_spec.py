"""What a model takes is written as older services read it, unless it needs what only newer ones can do."""

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
from qualms.inspection import show

CUT = InputSpec(height=6, width=5, fit="crop", shorter_side=8)
OLD = {"height": 6, "width": 5, "colour": "RGB", "resize": "bilinear", "fit": "crop"}


def test_a_shorter_side_that_is_not_given_is_not_written() -> None:
    spec = InputSpec(height=6, width=5, fit="crop")
    assert spec.model_dump() == spec.model_dump(mode="json") == OLD
    assert spec.model_dump_json() == '{"height":6,"width":5,"colour":"RGB","resize":"bilinear","fit":"crop"}'
    assert InputSpec(height=6, width=5, fit="crop", shorter_side=None).model_dump() == OLD


def test_a_shorter_side_that_is_given_is_written_and_read() -> None:
    assert CUT.model_dump() == {**OLD, "shorter_side": 8}
    assert InputSpec.model_validate_json(CUT.model_dump_json()) == CUT


def test_a_manifest_has_the_shorter_side_only_where_it_is_given(manifest: Manifest) -> None:
    assert "shorter_side" not in manifest.to_json()
    cut = manifest.model_copy(update={"input": CUT})
    assert Manifest.from_json(cut.to_json()).input == CUT


def test_a_person_is_shown_the_shorter_side(graph: bytes, manifest: Manifest) -> None:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    show(Bundle(Path("cut.onnx"), manifest.model_copy(update={"input": CUT}), graph, "ab" * 32), console)
    assert isinstance(console.file, io.StringIO)
    assert "6 × 5 RGB, bilinear, crop from a shorter side of 8" in console.file.getvalue()


def test_an_application_is_told_the_shorter_side_as_described(
    start_service: Callable[..., httpx.Client], graph: bytes, manifest: Manifest, tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path / "cut.onnx", graph, manifest.model_copy(update={"input": CUT}))
    client = start_service(bundle.path)
    described: dict[str, Any] = client.get("/openapi.json").json()
    reply = client.get("/models").json()
    assert reply["models"][0]["input"] == CUT.model_dump()
    schema = described["paths"]["/models"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema_rs.Draft202012Validator({**schema, "components": described["components"]}).validate(reply)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"fit": "stretch", "shorter_side": 8}, "shorter_side is for fit 'crop', not 'stretch'"),
        ({"shorter_side": 5}, "shorter_side is 5, and 6 × 5 pixels cannot be cut out of it: at least 6 is needed"),
        ({"shorter_side": 0}, "greater than 0"),
        ({"shorter_side": 10_000}, "less than or equal to 4096"),
    ],
)
def test_a_shorter_side_that_cannot_be_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        InputSpec.model_validate({**OLD, **changes})
