"""The dashboard *Uncertainty*: does live traffic still look like the calibration images?"""

from typing import Any

from docker.grafana.panels import MODEL, WINDOW, bar_gauge, dashboard, heatmap, increase, query, stat, timeseries


def build() -> dict[str, Any]:
    """Return the dashboard as a JSON object."""
    version = "{{model}} {{version}}"
    classes = "model, version, class"
    flagged = increase("qualms_predictions_total", classes, MODEL + ', ood="true"')
    by_class = f"{flagged} / ({increase('qualms_predictions_total', classes)} > 0)"
    most_flagged = "sort_desc(topk(10, " + by_class.replace("[5m]", "[15m]") + "))"
    encodings = f"sum by (format, quality, size, calibrated) (encoding:qualms_images:increase15m{{{MODEL}}})"
    most_frequent = f"sort_desc(topk(10, {encodings} > 0))"
    return dashboard(
        "qualms-doubt",  # existing links use this uid, so it does not follow the title
        "Uncertainty",
        "Whether live images still look like the images the model was calibrated on.",
        [
            [
                stat(
                    "Flag rate, 5 minutes",
                    "Share of images flagged as out of distribution.",
                    "percentunit",
                    f"model:qualms_ood:ratio5m{{{MODEL}}}",
                ),
                stat(
                    "Guaranteed bound",
                    "For 99.9 % of calibration sets, the flag rate of in-distribution traffic stays below this bound.",
                    "percentunit",
                    f"model:qualms_ood_rate:bound{{{MODEL}}}",
                ),
                stat(
                    "Evidence against the guarantee",
                    "N·KL(observed ‖ bound) in nats. The alert fires above 20.7 if the flag rate is also above the bound.",
                    "none",
                    f"model:qualms_ood:evidence5m{{{MODEL}}}",
                    limit=20.72,
                ),
                stat(
                    "Rejected by trust, 5 minutes",
                    "Share of predictions that are flagged, or too uncertain for the error rate that trust guarantees.",
                    "percentunit",
                    f"model:qualms_untrusted:ratio5m{{{MODEL}}}",
                ),
            ],
            [
                timeseries(
                    "Flag rate against its guarantee",
                    "Flag rate by model version, its bound for in-distribution traffic, and the target rate.",
                    "percentunit",
                    query(f"model:qualms_ood:ratio5m{{{MODEL}}}", f"{version} flagged"),
                    query(f"model:qualms_ood_rate:bound{{{MODEL}}}", f"{version} bound"),
                    query(f"max by (model, version) (qualms_ood_target_rate{{{MODEL}}})", f"{version} target"),
                ),
                timeseries(
                    "Flag rate by predicted class",
                    "Share of images flagged as out of distribution, by predicted class.",
                    "percentunit",
                    query(by_class, f"{version} {{{{class}}}}"),
                ),
            ],
            [
                timeseries(
                    "Evidence against the guarantee",
                    "N·KL(observed ‖ bound). The alert fires above the dashed line if the flag rate is also above the bound.",
                    "none",
                    query(f"model:qualms_ood:evidence5m{{{MODEL}}}", version),
                    limit=20.72,
                ),
                bar_gauge(
                    "Most flagged classes",
                    "The ten predicted classes with the highest flag rate over 15 minutes.",
                    "percentunit",
                    query(most_flagged, f"{version} {{{{class}}}}"),
                ),
            ],
            [
                heatmap(
                    "p-values over time",
                    "In-distribution p-values are uniform: every bucket is equally dark. Drift moves them to the lowest buckets. "
                    "If the model was calibrated for the worst of several encodings, p-values of the others are larger.",
                    "none",
                    increase("qualms_p_value_bucket", "le", window=WINDOW),
                    width=10,
                ),
                bar_gauge(
                    "p-values, 5 minutes",
                    "Number of images by p-value. In-distribution traffic gives bars of equal length, if the model was calibrated "
                    "for one encoding.",
                    "short",
                    query(increase("qualms_p_value_bucket", "le"), "{{le}}", format="heatmap"),
                    width=6,
                ),
                timeseries(
                    "Distance of p-values from calibration",
                    "Largest gap between the distribution of live p-values and those of the calibration images in all mixtures of "
                    "their encodings, and the gap that chance can explain.",
                    "percentunit",
                    query(f"model:qualms_p_value:distance5m{{{MODEL}}}", f"{version} distance"),
                    query(f"model:qualms_p_value:distance_bound5m{{{MODEL}}}", f"{version} explained by chance"),
                    width=8,
                ),
            ],
            [
                heatmap(
                    "Epistemic uncertainty",
                    "Mutual information over time. Bucket bounds are quantiles of the calibration images.",
                    "none",
                    increase("qualms_epistemic_uncertainty_bucket", "le", window=WINDOW),
                    width=16,
                ),
                bar_gauge(
                    "Epistemic uncertainty, reference",
                    "The calibration images in the same buckets. In-distribution traffic has the same shape.",
                    "short",
                    query(
                        f"sum by (le) (qualms_epistemic_uncertainty_reference_bucket{{{MODEL}}})",
                        "{{le}}",
                        format="heatmap",
                    ),
                    width=8,
                ),
            ],
            [
                heatmap(
                    "Total uncertainty",
                    "Entropy over time. Bucket bounds are quantiles of the calibration images.",
                    "none",
                    increase("qualms_total_uncertainty_bucket", "le", window=WINDOW),
                    width=16,
                ),
                bar_gauge(
                    "Total uncertainty, reference",
                    "The calibration images in the same buckets. In-distribution traffic has the same shape.",
                    "short",
                    query(
                        f"sum by (le) (qualms_total_uncertainty_reference_bucket{{{MODEL}}})",
                        "{{le}}",
                        format="heatmap",
                    ),
                    width=8,
                ),
            ],
            [
                timeseries(
                    "Images by format and quality",
                    "Images answered per second, by file format and rough quality. The guarantees hold for images that come as the "
                    "calibration images did.",
                    "ops",
                    query(
                        f"sum by (format, quality) (rate(qualms_images_total{{{MODEL}}}[{WINDOW}])) > 0",
                        "{{format}} {{quality}}",
                    ),
                    width=8,
                ),
                bar_gauge(
                    "Most frequent encodings",
                    "The ten most frequent encodings over 15 minutes: format, quality, size relative to the model's input, and "
                    "whether the calibration contained such images.",
                    "short",
                    query(most_frequent, "{{format}} {{quality}}, {{size}} size, calibrated: {{calibrated}}"),
                    width=8,
                ),
                timeseries(
                    "Images in uncalibrated encodings",
                    "Share of images over 15 minutes in encodings that the calibration did not contain. The alert fires above the "
                    "dashed line, from 20 such images on. Models of earlier versions have no such record and no line.",
                    "percentunit",
                    query(f"model:qualms_uncalibrated:ratio15m{{{MODEL}}}", version),
                    limit=0.1,
                    width=8,
                ),
            ],
            [
                timeseries(
                    "Rejected by trust",
                    "Share of predictions that are flagged, or too uncertain for the error rate that trust guarantees.",
                    "percentunit",
                    query(f"model:qualms_untrusted:ratio5m{{{MODEL}}}", version),
                ),
                timeseries(
                    "Images",
                    "Images answered per second, by model version.",
                    "ops",
                    query(f"sum by (model, version) (rate(qualms_p_value_count{{{MODEL}}}[{WINDOW}]))", version),
                ),
            ],
        ],
        by_model=True,
    )
