"""The contract between training and serving: one ONNX file, one preprocessing path, one set of decisions."""

from service.bundle.errors import (
    BundleError,
    DataError,
    ExtraMissingError,
    ImageError,
    OperatingPointError,
    QualmsError,
)
from service.bundle.file import Bundle, open_bundle, write_bundle
from service.bundle.input_spec import InputSpec
from service.bundle.manifest import Manifest
from service.bundle.operate import accept_point, flag_point
from service.bundle.preprocess import preprocess, preprocess_array, preprocess_batch

__all__ = [
    "Bundle",
    "BundleError",
    "DataError",
    "ExtraMissingError",
    "ImageError",
    "InputSpec",
    "Manifest",
    "OperatingPointError",
    "QualmsError",
    "accept_point",
    "flag_point",
    "open_bundle",
    "preprocess",
    "preprocess_array",
    "preprocess_batch",
    "write_bundle",
]
