import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pydantic import BaseModel, ConfigDict, ValidationError

from qualms.bundle.arrays import Float32Array, Float32Values, Int32Array, UInt64Array


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
def test_the_json_round_trip_of_a_finite_array_is_exact(values: Float32Values) -> None:
    decoded = Holder.model_validate_json(Holder(values=values).model_dump_json()).values
    assert decoded.dtype == np.float32
    assert decoded.shape == values.shape
    assert decoded.tobytes() == values.tobytes()


def test_json_has_the_shape_and_the_little_endian_bytes() -> None:
    values = np.array([[1.0, -2.5]], np.float32)
    document = json.loads(Holder(values=values).model_dump_json())["values"]
    assert document == {"shape": [1, 2], "float32": "AACAPwAAIMA="}


def test_strided_and_big_endian_arrays_are_encoded_by_value() -> None:
    strided = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    swapped = np.array([1.5, 2.5], ">f4")
    for values in (strided, swapped):
        decoded = Holder.model_validate_json(Holder(values=values).model_dump_json()).values
        assert decoded.tolist() == values.tolist()


def test_other_dtypes_are_converted_to_float32() -> None:
    assert Holder(values=np.array([3, 4])).values.dtype == np.float32


def test_a_validated_array_is_a_read_only_copy() -> None:
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
        (encoded([1], np.float32("nan").tobytes()), "non-finite"),
        (encoded([1], np.float32("inf").tobytes()), "non-finite"),
        (np.array([1, np.inf], np.float32), "non-finite"),
    ],
)
def test_invalid_arrays_are_refused_with_a_reason(value: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Holder(values=value)


# Integers


class Integers(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    classes: Int32Array
    fingerprints: UInt64Array


def integers(classes: Any, fingerprints: Any) -> Integers:
    return Integers(classes=np.array(classes, np.int32), fingerprints=np.array(fingerprints, np.uint64))


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20),
    st.lists(st.integers(0, 2**64 - 1), max_size=20),
)
def test_the_json_round_trip_of_integers_is_exact(classes: list[int], fingerprints: list[int]) -> None:
    decoded = Integers.model_validate_json(integers(classes, fingerprints).model_dump_json())
    assert decoded.classes.dtype == np.int32
    assert decoded.fingerprints.dtype == np.uint64
    assert decoded.classes.tolist() == classes
    assert decoded.fingerprints.tolist() == fingerprints


def test_integers_in_json_have_the_shape_and_the_little_endian_bytes() -> None:
    document = json.loads(integers([[1, -1]], [258]).model_dump_json())
    assert document == {
        "classes": {"shape": [1, 2], "int32": base64.b64encode(b"\1\0\0\0\xff\xff\xff\xff").decode()},
        "fingerprints": {"shape": [1], "uint64": base64.b64encode(b"\2\1" + bytes(6)).decode()},
    }


def test_int64_classes_are_converted_to_int32_and_the_copy_is_read_only() -> None:
    holder = Integers(classes=np.array([3, 4]), fingerprints=np.array([1], ">u8"))
    assert holder.classes.dtype == np.int32
    assert holder.classes.tolist() == [3, 4]
    assert holder.fingerprints.dtype == np.uint64
    assert holder.fingerprints.tolist() == [1]
    with pytest.raises(ValueError, match="read-only"):
        holder.classes[0] = 1


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (encoded([1], bytes(4)), "expected an object with the keys shape and int32"),
        ({"shape": [1], "int32": base64.b64encode(bytes(3)).decode()}, "the array cannot be decoded"),
        ({"shape": [2], "int32": base64.b64encode(bytes(4)).decode()}, "the array cannot be decoded"),
        ({"shape": [-1], "int32": base64.b64encode(bytes(4)).decode()}, "list of lengths"),
    ],
)
def test_invalid_integers_are_refused_with_a_reason(value: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Integers(classes=value, fingerprints=np.zeros(1, np.uint64))
