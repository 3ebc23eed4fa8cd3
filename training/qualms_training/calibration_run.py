"""Run the exported graph on calibration images as they will be sent: for `qualms train` and `qualms calibrate`."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.calibration_data import AsSent, Calibration
from qualms.bundle.manifest import OperatingDefaults, Reference, SetMethod
from qualms.bundle.runtime import Outputs
from qualms.bundle.scores import ScoreSpec, as_uncertainty
from qualms.decisions.calibration import CalibrationSource, calibrate, calibrate_worst, reference
from qualms.decisions.flag import rank
from qualms.images.encodings import all_settings, parse_encodings
from qualms.images.fingerprints import fingerprints
from qualms.images.input_spec import InputSpec
from qualms.images.observed import ObservedEncoding
from qualms_training.console import Display
from qualms_training.data.dataset import Selection
from qualms_training.errors import DataError
from qualms_training.reporting.graph_runs import Runner, received_chunks, stored_fingerprints

Grid = tuple[NDArray[np.float32], NDArray[np.float32]]
"""levels and thresholds of a `trust_grid`"""
STORED = "stored"
"""key of the outputs of images that were not sent in several settings"""


@dataclass(frozen=True)
class CalibrationPlan:
    """What a calibration needs to know of the model, beside its graph."""

    input: InputSpec
    scores: Mapping[str, ScoreSpec]
    classes: int
    operating: OperatingDefaults
    sets: SetMethod
    grid: Grid

    @property
    def outputs(self) -> tuple[str, ...]:
        """Outputs of the graph that the calibration needs; at K = 1000, all others would take three times their memory."""
        return ("prediction", "probabilities", *self.scores)

    def calibrate(
        self,
        settings: Mapping[str, Outputs],
        labels: NDArray[np.int64] | None,
        source: CalibrationSource,
        sizes: Mapping[str, str] | None = None,
    ) -> tuple[Calibration, Reference]:
        """Calibration and reference from the graph's outputs in every setting, or in the one setting STORED.

        `sizes` has the size of each setting's images, for the form `by-size`.
        """
        if source.as_sent is not None and source.as_sent.has_settings:
            paired = dict.fromkeys((self.operating.score, self.operating.trust_score))
            calibration = calibrate_worst(
                settings, labels, self.scores, self.grid, paired=paired, sizes=sizes, source=source, sets=self.sets
            )
        else:
            calibration = calibrate(settings[STORED], labels, self.scores, self.grid, source=source, sets=self.sets)
        return calibration, reference(settings.values(), self.scores, self.classes)

    def check_count(self, n: int) -> None:
        """OperatingPointError if n images cannot support the default false-alarm rate."""
        rank(n, self.operating.target_fpr, self.operating.guarantee)

    def trimmed(self, settings: Mapping[str, Outputs], share: float) -> NDArray[np.intp]:
        """Indices of the images without the `share` of them that have the highest flag scores in any setting."""
        score = self.operating.score
        uncertainty = np.max(
            [as_uncertainty(outputs[score], self.scores[score].direction) for outputs in settings.values()], axis=0
        )
        kept = len(uncertainty) - math.floor(share * len(uncertainty))
        return np.sort(np.argsort(uncertainty, kind="stable")[:kept])


def run_calibration(
    runner: Runner,
    images: Selection,
    labels: NDArray[np.int64] | None,
    plan: CalibrationPlan,
    source: CalibrationSource,
    display: Display,
) -> tuple[Calibration, Reference]:
    """Send the images as `source.as_sent` says, run the graph on them, and calibrate; fields of `source` that follow are filled in.

    With `source.trimmed`, that share of the images is left out; they must have no labels.
    """
    share = source.trimmed or 0.0
    if share and labels is not None:
        raise DataError(
            "Only images without labels can be trimmed; images with labels are known to be in distribution."
        )
    plan.check_count(len(images) - math.floor(share * len(images)))
    settings, stored, observed = _send(runner, images, plan, source.as_sent, display)
    by_size = source.as_sent is not None and source.as_sent.form == "by-size"
    sizes = {name: encodings[0].size for name, encodings in observed.items()} if by_size else None
    if share:
        kept = plan.trimmed(settings, share)
        settings = {name: {key: values[kept] for key, values in one.items()} for name, one in settings.items()}
    counts = Counter(one.text for encodings in observed.values() for one in encodings)
    filled: dict[str, Any] = {"observed": dict(counts.most_common()), "fingerprints": stored}
    return plan.calibrate(settings, labels, CalibrationSource(**{**source.fields(), **filled}), sizes)


def _check_size(setting: str, observed: list[ObservedEncoding]) -> None:
    """DataError if the images of a setting have several sizes."""
    sizes = Counter(one.size for one in observed)
    if len(sizes) > 1:
        counts = ", ".join(f"{count:,} {size}" for size, count in sizes.most_common())
        raise DataError(
            f"The form 'by-size' needs calibration images of one size, but sent as {setting} they are of several, relative to the "
            f"model's input: {counts}; use the form 'worst'."
        )


def _send(
    runner: Runner, images: Selection, plan: CalibrationPlan, as_sent: AsSent | None, display: Display
) -> tuple[dict[str, Outputs], NDArray[np.uint64], dict[str, list[ObservedEncoding]]]:
    """Outputs by setting, the fingerprints (N,) of the images as stored, and the encodings of the images by setting."""
    encodings = [] if as_sent is None else parse_encodings(as_sent.encodings)
    seed = 0 if as_sent is None else as_sent.seed
    several = as_sent is not None and as_sent.has_settings
    plans = {one.text: [one] for one in all_settings(encodings)} if several else {STORED: encodings}
    settings, observed = dict[str, Outputs](), dict[str, list[ObservedEncoding]]()
    stored = stored_fingerprints(images, plan.input) if encodings else None
    with display.bar("calibrating", len(images) * len(plans)) as advance:
        for name, encoding in plans.items():
            parts, prints, observed[name] = [], [], []
            for chunk, seen in received_chunks(images, plan.input, encoding, seed):
                outputs = runner(chunk)
                parts.append({key: outputs[key] for key in plan.outputs})
                prints += [] if encodings else [fingerprints(chunk)]
                observed[name] += seen
                advance(len(chunk))
            settings[name] = {key: np.concatenate([part[key] for part in parts]) for key in plan.outputs}
            stored = np.concatenate(prints) if stored is None else stored
            if as_sent is not None and as_sent.form == "by-size":
                _check_size(name, observed[name])
    assert stored is not None  # there is at least one setting
    return settings, stored, observed
