"""Arrays in the manifest's JSON: exact, compact and validated."""

import base64
import binascii
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, PlainSerializer

Float32Values: TypeAlias = NDArray[np.float32]


class _Codec:
    """Reads and writes arrays of one type: in JSON, the shape and the little-endian bytes in base64."""

    def __init__(self, name: str) -> None:
        self.name, self.dtype = name, np.dtype(name)

    def decode(self, value: Any) -> NDArray[Any]:
        if isinstance(value, np.ndarray):
            array = value.astype(self.dtype)
        else:
            if not isinstance(value, dict) or set(value) != {"shape", self.name}:
                raise ValueError(f"expected an object with the keys shape and {self.name}")
            try:
                raw = base64.b64decode(value[self.name], validate=True)
                array = np.frombuffer(raw, self.dtype.newbyteorder("<")).astype(self.dtype).reshape(value["shape"])
            except (binascii.Error, TypeError, ValueError) as error:
                raise ValueError(f"the array cannot be decoded: {error}") from None
            if list(array.shape) != value["shape"]:  # reshape also accepts -1, null and a single number
                raise ValueError("the array cannot be decoded: shape must be a list of lengths")
        if not np.isfinite(array).all():
            raise ValueError("the array has non-finite values")
        array.setflags(write=False)
        return array

    def encode(self, array: NDArray[Any]) -> dict[str, Any]:
        raw = np.ascontiguousarray(array, dtype=self.dtype.newbyteorder("<")).tobytes()
        return {"shape": list(array.shape), self.name: base64.b64encode(raw).decode("ascii")}


_FLOAT32, _INT32, _UINT64 = _Codec("float32"), _Codec("int32"), _Codec("uint64")

Float32Array = Annotated[
    Float32Values, BeforeValidator(_FLOAT32.decode), PlainSerializer(_FLOAT32.encode, when_used="json")
]
"""A finite float32 array of any shape."""
Int32Array = Annotated[
    NDArray[np.int32], BeforeValidator(_INT32.decode), PlainSerializer(_INT32.encode, when_used="json")
]
"""An int32 array of any shape."""
UInt64Array = Annotated[
    NDArray[np.uint64], BeforeValidator(_UINT64.decode), PlainSerializer(_UINT64.encode, when_used="json")
]
"""A uint64 array of any shape."""


def is_ascending(values: Float32Values) -> bool:
    """Whether values (N,) are sorted."""
    return bool((values[1:] >= values[:-1]).all())
