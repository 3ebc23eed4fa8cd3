"""The contract between training and serving: one ONNX file, one preprocessing path, one set of decisions."""

from qualms.bundle.file import Bundle, open_bundle, write_bundle
from qualms.bundle.manifest import Manifest
from qualms.decisions.operating_point import flag_point, trust_point
from qualms.errors import (
    BundleError,
    DataError,
    ExtraMissingError,
    ImageError,
    OperatingPointError,
    QualmsError,
)
from qualms.images.input_spec import InputSpec
from qualms.images.preprocess import preprocess, preprocess_array, preprocess_batch

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
    "flag_point",
    "open_bundle",
    "preprocess",
    "preprocess_array",
    "preprocess_batch",
    "trust_point",
    "write_bundle",
]
