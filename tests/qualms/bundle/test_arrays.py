import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pydantic import BaseModel, ConfigDict, ValidationError

from qualms.bundle.arrays import Float32Array, Float32Values


class Holder(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    values: Float32Array


def encoded(shape: Any, raw: bytes) -> dict[str, Any]:
    return {"shape": shape, "float32": base64.b64encode(raw).decode()}


@given(
    arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=0, min_side=0),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_a_finite_array_survives_json_bit_for_bit(values: Float32Values) -> None:
    found = Holder.model_validate_json(Holder(values=values).model_dump_json()).values
    assert found.dtype == np.float32
    assert found.shape == values.shape
    assert found.tobytes() == values.tobytes()


def test_json_holds_shape_and_little_endian_bytes() -> None:
    values = np.array([[1.0, -2.5]], np.float32)
    document = json.loads(Holder(values=values).model_dump_json())["values"]
    assert document == {"shape": [1, 2], "float32": "AACAPwAAIMA="}


def test_a_strided_or_big_endian_array_is_written_by_value() -> None:
    strided = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    swapped = np.array([1.5, 2.5], ">f4")
    for values in (strided, swapped):
        found = Holder.model_validate_json(Holder(values=values).model_dump_json()).values
        assert found.tolist() == values.tolist()


def test_other_numbers_become_float32() -> None:
    assert Holder(values=np.array([3, 4])).values.dtype == np.float32


def test_what_was_read_or_given_cannot_be_changed_later() -> None:
    given_array = np.zeros(2, np.float32)
    holder = Holder(values=given_array)
    given_array[0] = 5
    assert holder.values[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        holder.values[0] = 1


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([1.0, 2.0], "keys shape and float32"),
        ({"shape": [1]}, "keys shape and float32"),
        ({"shape": [1], "float32": "AACAPw==", "more": 1}, "keys shape and float32"),
        (encoded([2], bytes(4)), "cannot be decoded"),
        (encoded([1], bytes(3)), "cannot be decoded"),
        (encoded([10**30], bytes(4)), "cannot be decoded"),
        (encoded("1", bytes(4)), "cannot be decoded"),
        (encoded([1.5], bytes(4)), "cannot be decoded"),
        (encoded([-1], bytes(4)), "list of lengths"),
        (encoded(None, bytes(4)), "list of lengths"),
        (encoded(1, bytes(4)), "list of lengths"),
        ({"shape": [1], "float32": "AACA*w=="}, "cannot be decoded"),
        ({"shape": [1], "float32": "AACAPw="}, "cannot be decoded"),
        ({"shape": [1], "float32": "é"}, "cannot be decoded"),
        ({"shape": [1], "float32": 7}, "cannot be decoded"),
        (encoded([1], np.float32("nan").tobytes()), "not finite"),
        (encoded([1], np.float32("inf").tobytes()), "not finite"),
        (np.array([1, np.inf], np.float32), "not finite"),
    ],
)
def test_anything_else_is_refused_with_a_reason(value: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Holder(values=value)
