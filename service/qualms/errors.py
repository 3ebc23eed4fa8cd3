"""Every error a user can cause, each a sentence that names the thing, the value and what is accepted.

Those that only one part of the program raises stand there; what is wrong with a request is a `qualms.web.problems.Problem`.

QualmsError
├── BundleError            the file is not a bundle, is damaged, or is newer than this program
├── ImageError             the bytes are not an image we take
├── OperatingPointError    the calibration set cannot support what was asked
├── DataError              a data set is missing, empty or malformed
├── ExtraMissingError      a command needs an optional dependency that is not installed
├── SettingsError          a setting is unknown or has an impossible value         (qualms.settings)
├── DeviceError            the device that was asked for cannot be used            (qualms.inference.engine)
├── ListenError            the address cannot be listened on                       (qualms.web.listener)
├── BenchError             a benchmark cannot be made as it was asked for          (qualms.bench.processes)
├── TrafficError           there is nowhere to send to, or no answer               (qualms.demo.traffic)
├── RecipeError            a recipe has an unknown key or an impossible value      (qualms_training.errors)
├── ModelError             weights, taps or architecture are not usable            (qualms_training.errors)
├── ExportError            the exported graph does not agree with PyTorch          (qualms_training.errors)
└── NotApplicableError     a method makes no sense for these data or this base     (qualms_training.paper.method)
"""

from typing import Literal


class QualmsError(Exception):
    """Anything a user can put right; the command line prints it as one sentence and exits with 2."""


class BundleError(QualmsError):
    """The file is not a bundle, is damaged, or was written by a newer version."""


class ImageError(QualmsError):
    """The bytes or the array are not an image this model takes; `reason` says in which way."""

    def __init__(
        self, message: str, *, reason: Literal["malformed", "unsupported", "too_large", "shape"] = "malformed"
    ) -> None:
        super().__init__(message)
        self.reason = reason


class OperatingPointError(QualmsError):
    """The calibration set is too small, or the score unknown, for the guarantee that was asked for."""


class DataError(QualmsError):
    """A data set is missing, empty or malformed."""


class ExtraMissingError(QualmsError):
    """A command needs an optional dependency that is not installed."""


def first_line(error: Exception) -> str:
    """What somebody else's error says, to end a sentence of ours: without its full stop, and never nothing."""
    return str(error).strip().partition("\n")[0].rstrip(" .") or type(error).__name__
