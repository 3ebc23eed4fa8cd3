"""The manifest's calibration: scores of images that were not used for training, and how these images were sent."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from qualms.bundle.arrays import Float32Array, Int32Array, UInt64Array, is_ascending
from qualms.bundle.parts import ListOf, ManifestPart, Sha256, is_empty, is_none
from qualms.errors import EncodingError
from qualms.images.encodings import parse_encodings

CalibrationForm = Literal["mixture", "worst", "by-size"]
"""`mixture`: each image was sent in one encoding of the list, drawn at random, and the guarantee is for that mixture.
`worst`: each image was sent in every setting of the list, and the guarantee is for each setting and every mixture of them.
`by-size`: as `worst`, but images of the model's input size, larger and smaller ones each have their own thresholds."""

MAX_SETTINGS: Final = 1_000
"""settings of the encodings; dozens are usual"""
_MIN_SHARE = 0.01
"""share of the calibration images from which on their encoding counts as calibrated"""


class TrustGrid(ManifestPart):
    """Candidate thresholds of the trust score from the fit split."""

    levels: Float32Array
    """(J,) fraction of the fit split at or below each threshold, ascending"""
    thresholds: Float32Array
    """(J,) thresholds as uncertainty (`scores.as_uncertainty`), ascending"""
    accepted: ListOf[int] | None = Field(None, exclude_if=is_none)
    """(J,) calibration images whose uncertainty is at most the threshold; only in earlier bundles"""
    errors: ListOf[int] | None = Field(None, exclude_if=is_none)
    """(J,) wrong predictions among them; only in earlier bundles"""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        counts = [values for values in (self.accepted, self.errors) if values is not None]
        shapes = {self.levels.shape, self.thresholds.shape, *((len(values),) for values in counts)}
        if len(shapes) != 1 or self.levels.ndim != 1 or not self.levels.size:
            raise ValueError("levels, thresholds, accepted and errors must have the same length, at least 1")
        if not is_ascending(self.levels) or not is_ascending(self.thresholds):
            raise ValueError("levels and thresholds must be ascending")
        if self.levels[0] < 0 or self.levels[-1] > 1:
            raise ValueError("levels must be from 0 to 1")
        if len(counts) == 1:
            raise ValueError("accepted and errors belong together")
        if counts and any(not 0 <= errors <= accepted for accepted, errors in zip(*counts, strict=True)):
            raise ValueError("errors must lie between 0 and accepted")
        return self


class AsSent(ManifestPart):
    """The encodings in which the calibration images were sent (`qualms.images.encodings`)."""

    encodings: ListOf[str] = Field(min_length=1, max_length=MAX_SETTINGS)
    form: CalibrationForm
    seed: int = Field(ge=0, lt=2**63)
    """of the encodings, qualities and factors that were drawn"""

    @model_validator(mode="after")
    def _check_encodings(self) -> Self:
        try:
            parse_encodings(self.encodings)
        except EncodingError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def text(self) -> str:
        """The images that the guarantee is for, in words."""
        shares = Counter(self.encodings)
        weighted = self.form == "mixture" and len(set(shares.values())) > 1
        names = [f"{name} ({count} of {len(self.encodings)})" if weighted else name for name, count in shares.items()]
        listed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        return f"images sent as {listed}" + (", in the listed shares" if self.form == "mixture" else ", in any shares")

    @property
    def has_settings(self) -> bool:
        """Whether each image was sent in every setting."""
        return self.form != "mixture"


class PairedScores(ManifestPart):
    """The images of the calibration in one setting of its encodings; every array is in the order of the images."""

    encoding: str
    size: Literal["same", "larger", "smaller", "unknown"] | None = Field(None, exclude_if=is_none)
    """in the form `by-size`: the size of all images relative to the model's input (`qualms.images.observed.SIZES`)"""
    scores: dict[str, Float32Array]
    """by score: (n,) raw values of the flag score and the trust score of the default operating point"""
    predictions: Int32Array
    """(n,) predicted classes"""
    wrong: ListOf[int] | None = Field(None, exclude_if=is_none)
    """indices of the misclassified images, ascending; None without labels"""
    label_scores: Float32Array | None = Field(None, exclude_if=is_none)
    """(n,) score of the true class for prediction sets; None without labels"""


class Calibration(ManifestPart):
    """Scores of the exported graph on images that were not used to train the base or the meta-model.

    There are three kinds. Usually the scores are in the order of the images, so that flag, trust, classes and errors can be
    counted together. In the forms `worst` and `by-size`, `settings` has such scores for every setting, and `scores` their
    envelope: the j-th value is the largest of the j-th smallest uncertainties of all settings. In earlier bundles each score
    is sorted, and `trust` has counts of the trust score alone.
    """

    n: int = Field(gt=0)
    split: str
    data: str
    data_sha256: Sha256
    scores: dict[str, Float32Array]
    """by score: (n,) raw values; in the order of the images, or sorted if there are `settings` and in earlier bundles"""
    wrong: ListOf[int] | None = Field(None, exclude_if=is_none)
    """indices of the misclassified images, ascending; None without labels"""
    trust: TrustGrid
    predictions: Int32Array | None = Field(None, exclude_if=is_none)
    """(n,) predicted classes"""
    label_scores: Float32Array | None = Field(None, exclude_if=is_none)
    """(n,) score of the true class for prediction sets"""
    as_sent: AsSent | None = Field(None, exclude_if=is_none)
    """None if the images were used as they are stored"""
    settings: ListOf[PairedScores] = Field([], exclude_if=is_empty, max_length=MAX_SETTINGS)
    """the images in every setting, in the forms `worst` and `by-size`"""
    observed: dict[str, Annotated[int, Field(ge=0)]] = Field({}, exclude_if=is_empty)
    """number of images by encoding (`qualms.images.observed`); an image counts once in every setting"""
    fingerprints: UInt64Array | None = Field(None, exclude_if=is_none)
    """(n,) fingerprints of the images as they are stored (`qualms.images.fingerprints`), and those of trimmed images"""
    trimmed: float | None = Field(None, exclude_if=is_none, ge=0, lt=1)
    """share of the images with the highest flag scores that were left out, as presumably out of distribution"""

    @property
    def is_sorted(self) -> bool:
        """Whether this is the calibration of an earlier bundle."""
        return self.trust.accepted is not None

    @property
    def seen_encodings(self) -> frozenset[str] | None:
        """Encodings of at least 1 % of the images, as texts of ObservedEncoding; None in bundles of earlier versions."""
        if not self.observed:
            return None
        return frozenset(text for text, count in self.observed.items() if count >= _MIN_SHARE * self.n)

    @property
    def sizes(self) -> list[str]:
        """The sizes of images that have thresholds of their own, in the form `by-size`."""
        by_size = self.as_sent is not None and self.as_sent.form == "by-size"
        return list(dict.fromkeys(one.size for one in self.settings if one.size is not None)) if by_size else []

    @property
    def has_labels(self) -> bool:
        """Whether errors of the predictions are known."""
        return self.is_sorted or self.wrong is not None or (bool(self.settings) and self.settings[0].wrong is not None)

    @model_validator(mode="after")
    def _check_scores(self) -> Self:
        for name, values in self.scores.items():
            if values.shape != (self.n,):
                raise ValueError(f"the calibration scores of {name} must be {self.n} values")
            if self.is_sorted and not is_ascending(values):
                raise ValueError(f"the calibration scores of {name} must be {self.n} ascending values")
        return self

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        parts: Iterable[tuple[str, Any]] = [
            ("", self),
            *((f"settings.{i}.", one) for i, one in enumerate(self.settings)),
        ]
        for prefix, part in parts:
            arrays = {"predictions": part.predictions, "label_scores": part.label_scores}
            arrays |= {} if part is self else part.scores
            for name, values in arrays.items():
                if values is not None and values.shape != (self.n,):
                    raise ValueError(f"{prefix}{name} must be {self.n} values")
            if part.wrong is None and part.label_scores is not None:
                raise ValueError(f"{prefix}label_scores need wrong")
            if part.wrong is not None and any(
                not index < following for index, following in pairwise((-1, *part.wrong, self.n))
            ):
                raise ValueError(f"{prefix}wrong must be strictly ascending indices from 0 to {self.n - 1}")
        return self

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.trust.accepted is not None:
            if max(self.trust.accepted) > self.n:
                raise ValueError(f"trust.accepted must be at most n, {self.n}")
            if self.wrong is not None or self.settings:
                raise ValueError("with wrong or settings, trust must not have accepted and errors")
            if self.predictions is not None:
                raise ValueError("predictions need scores in the order of the images")
        if self.fingerprints is not None and (self.fingerprints.ndim != 1 or len(self.fingerprints) < self.n):
            raise ValueError(f"fingerprints must be at least {self.n} values")
        if bool(self.settings) != (self.as_sent is not None and self.as_sent.has_settings):
            raise ValueError("settings and the form 'worst' or 'by-size' of as_sent belong together")
        if (
            self.as_sent is not None
            and self.as_sent.form == "by-size"
            and any(one.size is None for one in self.settings)
        ):
            raise ValueError("in the form 'by-size', every setting must have a size")
        if self.settings and (self.wrong is not None or self.predictions is not None or self.label_scores is not None):
            raise ValueError("with settings, wrong, predictions and label_scores belong to each setting")
        if len({one.wrong is None for one in self.settings}) > 1:
            raise ValueError("either all settings or none have labels")
        return self
