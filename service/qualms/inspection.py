"""Print a bundle's manifest as tables: the command `qualms inspect`."""

from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qualms.bundle.calibration_data import Calibration
from qualms.bundle.evaluation_results import Evaluation
from qualms.bundle.file import Bundle
from qualms.bundle.manifest import Manifest
from qualms.bundle.signature import encode_key
from qualms.decisions.calibration_set import CalibrationSet
from qualms.decisions.verdicts import SIZE_TEXTS, guarantee_text
from qualms.errors import OperatingPointError


def print_bundle(bundle: Bundle, console: Console) -> None:
    """Print identity, input, scores, decisions, provenance and evaluation."""
    manifest = bundle.manifest
    console.print(_facts(bundle))
    console.print(_scores(manifest))
    console.print(_decisions(manifest))
    if manifest.evaluation:
        console.print(_evaluation(manifest.evaluation))
        if manifest.evaluation.probabilities:
            console.print(_probabilities(manifest.evaluation))
        if manifest.evaluation.encodings:
            console.print(_encodings(manifest.evaluation))
    else:
        console.print("Not evaluated.")


def _facts(bundle: Bundle) -> Table:
    manifest, spec = bundle.manifest, bundle.manifest.input
    origin, calibration = manifest.provenance, manifest.calibration
    table = _table(f"{manifest.name} {manifest.version}", "", "")
    size = len(bundle.graph) / 1e6
    _row(table, "digest", bundle.digest)
    _row(table, "graph", f"{size:.2f} MB, SHA-256 {manifest.graph_sha256[:16]}…, intact")
    if bundle.signature is not None:
        _row(table, "signature", f"with the key {encode_key(bundle.signature.key)}; qualms verify verifies it")
    _row(table, "schema", str(manifest.schema_version))
    crop = f" from a shorter side of {spec.shorter_side}" if spec.shorter_side else ""
    _row(table, "input", f"{spec.height} × {spec.width} {spec.colour}, {spec.resize}, {spec.fit}{crop}")
    _row(table, "classes", f"{len(manifest.classes)}: {_list_start(manifest.classes)}")
    _row(table, "prediction", f"by the {manifest.prediction} model")
    _row(table, "α", _alpha(manifest))
    _row(table, "base", _network(origin.base, "model"))
    _row(table, "meta-model", _network(origin.meta, "form"))
    recipe = f"{origin.recipe_name}, seed {origin.seed}, {origin.created}, qualms {origin.qualms}"
    _row(table, "recipe", recipe)
    _row(table, "libraries", ", ".join(f"{name} {version}" for name, version in origin.versions.items()))
    labels = "" if calibration.has_labels else ", without labels"
    trimmed = f", {100 * calibration.trimmed:g} % trimmed" if calibration.trimmed else ""
    images = f"{calibration.n:,} images of {calibration.data}, split {calibration.split}{labels}{trimmed}"
    _row(table, "calibration", images)
    _row(table, "as sent", _as_sent(calibration))
    if (kept := manifest.labelled_calibration) is not None:
        _row(table, "trust from", f"{kept.n:,} earlier images of {kept.data}, for images like those")
    return table


def _scores(manifest: Manifest) -> Table:
    quantiles = ("5 %", "median", "95 %", "99 %")
    table = _table("Scores and their in-distribution quantiles", "score", "kind", "uncertain if", *quantiles)
    reference = manifest.reference
    for name, spec in manifest.scores.items():
        values = np.interp((0.05, 0.5, 0.95, 0.99), reference.levels, reference.quantiles[name])
        _row(table, name, spec.kind, spec.direction, *(f"{value:.4g}" for value in values))
    return table


def _decisions(manifest: Manifest) -> Table:
    table = _table("Default decisions", "decision", "score", "threshold", "guarantee")
    operating = manifest.operating
    calibration = CalibrationSet(manifest)
    try:
        point = calibration.flag_point()
        guarantee = f"{guarantee_text(point, manifest.calibration)} ({point.guarantee}; k = {point.k}, n = {point.n:,})"
        _row(table, "flag as OOD", point.score, f"{point.threshold:.6g}", guarantee)
        for size in manifest.calibration.sizes:
            sized = CalibrationSet(manifest, size).flag_point()
            _row(table, "", sized.score, f"{sized.threshold:.6g}", f"for images of {SIZE_TEXTS[size]}")
    except OperatingPointError as error:
        _row(table, "flag as OOD", operating.score, "–", str(error))
    try:
        trust = calibration.trust_point()
        which = "of the accepted" if trust.joint else "of those up to the threshold, flagged or not"
        guarantee = f"errors ≤ {100 * trust.target_risk:g} % {which} ({100 * trust.accepted:.1f} % of the images)"
        _row(table, "trust", trust.score, f"{trust.threshold:.6g}", f"{trust.condition}: {guarantee}")
    except OperatingPointError as error:
        _row(table, "trust", operating.trust_score, "–", str(error))
    return table


def _as_sent(calibration: Calibration) -> str:
    """The encodings of the calibration images."""
    as_sent = calibration.as_sent
    if as_sent is not None:
        settings = f", {len(calibration.settings)} settings" if calibration.settings else ""
        return f"{', '.join(as_sent.encodings)} ({as_sent.form}{settings}, seed {as_sent.seed})"
    if not calibration.observed:
        return "not recorded"
    return "as they came: " + ", ".join(f"{text} ({count:,})" for text, count in calibration.observed.items())


def _alpha(manifest: Manifest) -> str:
    if manifest.alpha == "meta":
        return "of the meta-model"
    return f"joined: tempered softmax, evidence by the fused score = {' + '.join(manifest.flag_terms)}"


def _evaluation(evaluation: Evaluation) -> Table:
    sets = list(dict.fromkeys(row.data for row in evaluation.ood))
    title = f"Evaluation on {evaluation.n:,} images of {evaluation.test_data} ({evaluation.protocol})"
    table = _table(f"{title}: accuracy {evaluation.accuracy:.2f} %, AUROC in %", "score", *sets)
    for score in dict.fromkeys(row.score for row in evaluation.ood):
        by_set = {row.data: f"{row.auroc:.1f}" for row in evaluation.ood if row.score == score}
        _row(table, score, *(by_set.get(name, "–") for name in sets))
    return table


def _probabilities(evaluation: Evaluation) -> Table:
    table = _table("Class probabilities on the same images", "distribution", "ECE in %", "NLL in nats")
    for row in evaluation.probabilities:
        _row(table, row.distribution, f"{row.ece:.2f}", f"{row.nll:.4f}")
    return table


def _encodings(evaluation: Evaluation) -> Table:
    targets = list(dict.fromkeys(row.target for row in evaluation.encodings[0].realised))
    names = {"false_alarm_rate": "false alarms", "selective_risk": "risk"}
    columns = [(promise, target) for promise in names for target in targets]
    titles = [f"{names[promise]} ≤ {100 * target:g} %" for promise, target in columns]
    table = _table("The same images by encoding, in %", "sent as", "calibrated", "accuracy", *titles)
    for row in evaluation.encodings:
        rates: dict[tuple[str, float], float | None] = {(one.promise, one.target): one.realised for one in row.realised}
        cells = ["–" if (rate := rates[column]) is None else f"{100 * rate:.2f}" for column in columns]
        _row(table, row.encoding, "yes" if row.calibrated else "no", f"{row.accuracy:.1f}", *cells)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=Text(title, "table.title"),
        title_justify="left",
        header_style="bold",
        show_header=any(columns),
        box=box.HEAVY_HEAD if any(columns) else None,  # without borders, a digest fits into 80 columns
    )
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def _row(table: Table, *cells: str) -> None:
    """Add cells as plain text, because rich would interpret a class name like `[/b]` as markup."""
    table.add_row(*(Text(cell) for cell in cells))


def _network(facts: dict[str, Any], name_key: str) -> str:
    """One line about a network from its provenance, whose entries are all optional and of any type."""
    parts = [str(facts.get(name_key, "unknown"))]
    if "parameters" in facts:
        count = facts["parameters"]
        parts.append(f"{count:,} parameters" if isinstance(count, int) else f"{count} parameters")
    if "taps" in facts:
        taps = facts["taps"]
        parts.append(f"taps {', '.join(map(str, taps)) if isinstance(taps, list) else taps}")
    return ", ".join(parts)


def _list_start(names: list[str], max_names: int = 12) -> str:
    return ", ".join(names[:max_names]) + (", …" if len(names) > max_names else "")
