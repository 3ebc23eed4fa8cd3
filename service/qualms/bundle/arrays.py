"""Float32 arrays in the manifest's JSON: exact, compact and validated."""

import base64
import binascii
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, PlainSerializer

Float32Values = NDArray[np.float32]


def _decode(value: Any) -> Float32Values:
    if isinstance(value, np.ndarray):
        array = value.astype(np.float32)
    else:
        if not isinstance(value, dict) or set(value) != {"shape", "float32"}:
            raise ValueError("expected an object with the keys shape and float32")
        try:
            raw = base64.b64decode(value["float32"], validate=True)
            array = np.frombuffer(raw, "<f4").astype(np.float32).reshape(value["shape"])
        except (binascii.Error, TypeError, ValueError) as error:
            raise ValueError(f"the array cannot be decoded: {error}") from None
        if list(array.shape) != value["shape"]:  # reshape also accepts -1, null and a single number
            raise ValueError("the array cannot be decoded: shape must be a list of lengths")
    if not np.isfinite(array).all():
        raise ValueError("the array has non-finite values")
    array.setflags(write=False)
    return array


def _encode(array: Float32Values) -> dict[str, Any]:
    raw = np.ascontiguousarray(array, dtype="<f4").tobytes()
    return {"shape": list(array.shape), "float32": base64.b64encode(raw).decode("ascii")}


Float32Array = Annotated[Float32Values, BeforeValidator(_decode), PlainSerializer(_encode, when_used="json")]
"""A finite float32 array of any shape, in JSON as its shape and its little-endian bytes in base64."""
