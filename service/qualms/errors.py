"""The exceptions of Qualms. Each message is one sentence that names the thing, the value and what is accepted.

QualmsError
├── BundleError            the file is not a bundle, is damaged, or has a newer schema version
├── ImageError             the bytes or the array are not an accepted image
├── OperatingPointError    the calibration set cannot support the requested operating point
├── ExplanationError       the model has no terms of its flag score
├── ParameterError         an argument of `Model.predict` has a value that is not accepted
├── EncodingError          the description of an encoding, such as jpeg:75-95, is not accepted
├── DataError              a data set is missing, empty or malformed
├── ExtraMissingError      a command needs an optional dependency that is not installed
├── SettingsError          a setting is unknown or has an invalid value            (qualms.settings)
├── KeysError              a file of API keys cannot be read, or a line is not accepted   (qualms.access.keys)
├── TlsError               a certificate or its key cannot be used                 (qualms.access.certificates)
├── DeviceError            the requested device cannot be used                     (qualms.inference.engine)
├── NoWorkerError          no process can be started that decodes an image         (qualms.images.worker_pool)
├── ListenError            the server cannot listen on the address                 (qualms.http1.listener)
├── ScoreLogError          the file of scores cannot be written                    (qualms.telemetry.score_log)
├── SigningKeyError        a file of signing keys cannot be used                   (qualms.signing.keys)
├── ScoreError             files cannot be scored as requested                     (qualms.score.items)
├── ClusterError           a Ray cluster cannot be reached, or work on it failed    (qualms.cluster.connection)
├── BenchError             a benchmark cannot run with the given options           (qualms.bench.servers.processes)
├── TrafficError           the service cannot be reached or does not answer        (qualms.demo.traffic)
├── ClientError            a request of the client got no result; subclasses there    (qualms.client.errors)
├── RecipeError            a recipe has an unknown key or an invalid value         (qualms_training.errors)
├── ModelError             weights, taps or architecture are not usable            (qualms_training.errors)
├── ExportError            the exported graph does not agree with PyTorch          (qualms_training.errors)
├── ConversionError        a run folder is too old, damaged or unfinished          (qualms_training.errors)
└── NotApplicableError     a method does not apply to the data or the base model   (qualms_training.paper.method)

Invalid HTTP requests raise `qualms.web.problems.Problem`, which is not part of this tree.
"""

from typing import Any, Literal


class QualmsError(Exception):
    """An error the user can fix. The command line prints its message and exits with status 2."""

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: `Exception` would pass the message alone to subclasses that need other arguments."""
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[QualmsError], arguments: tuple[Any, ...]) -> QualmsError:
    error = kind.__new__(kind)
    error.args = arguments
    return error


class BundleError(QualmsError):
    """The file is not a bundle, is damaged, or has a newer schema version."""


class ImageError(QualmsError):
    """The bytes or the array are not an image the model accepts; `reason` is the kind of problem."""

    def __init__(
        self, message: str, *, reason: Literal["malformed", "unsupported", "too_large", "failed", "shape"] = "malformed"
    ) -> None:
        super().__init__(message)
        self.reason = reason


class OperatingPointError(QualmsError):
    """The score is unknown, or the calibration set cannot support the requested guarantee.

    `parameter` is the name of the query parameter or argument that is not supported.
    """

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class ExplanationError(QualmsError):
    """The model was made with an earlier version and has no terms of its flag score."""


class ParameterError(QualmsError):
    """An argument of `Model.predict` has a value that is not accepted."""


class EncodingError(QualmsError):
    """The description of an encoding is not accepted."""


class DataError(QualmsError):
    """A data set is missing, empty or malformed."""


class ExtraMissingError(QualmsError):
    """A command needs an optional dependency that is not installed."""


def first_line(error: Exception) -> str:
    """First line of a third-party error without its full stop, or the error's class name if there is no message."""
    return str(error).strip().partition("\n")[0].rstrip(" .") or type(error).__name__
