"""The dashboard *Doubt*: is the traffic still what the model was calibrated for?"""

from typing import Any

from docker.grafana.panels import MODEL, WINDOW, bars, dashboard, heat, increase, lines, number, query


def build() -> dict[str, Any]:
    """Is the traffic still what the model was calibrated for?"""
    version = "{{model}} {{version}}"
    classes = "model, version, class"
    flagged = increase("qualms_predictions_total", classes, MODEL + ', ood="true"')
    by_class = f"{flagged} / ({increase('qualms_predictions_total', classes)} > 0)"
    most_doubted = "sort_desc(topk(10, " + by_class.replace("[5m]", "[15m]") + "))"
    return dashboard(
        "qualms-doubt",
        "Doubt",
        "Whether images still look like those the model was calibrated on.",
        [
            [
                number(
                    "Flag rate, 5 minutes",
                    "Share of images flagged as out of distribution.",
                    "percentunit",
                    f"model:qualms_ood:ratio5m{{{MODEL}}}",
                ),
                number(
                    "Promised bound",
                    "In-distribution traffic stays below this rate for 99.9 % of calibration sets.",
                    "percentunit",
                    f"model:qualms_ood_rate:bound{{{MODEL}}}",
                ),
                number(
                    "Evidence against the promise",
                    "N·KL(observed ‖ bound) in nats; above 20.7 with a rate above the bound, chance is ruled out.",
                    "none",
                    f"model:qualms_ood:evidence5m{{{MODEL}}}",
                    limit=20.72,
                ),
                number(
                    "Rejected by trust, 5 minutes",
                    "Share of predictions too uncertain for the error rate that trust promises.",
                    "percentunit",
                    f"model:qualms_untrusted:ratio5m{{{MODEL}}}",
                ),
            ],
            [
                lines(
                    "Flag rate against its promise",
                    "The flagged share by model version, the bound that in-distribution traffic keeps, and the target.",
                    "percentunit",
                    query(f"model:qualms_ood:ratio5m{{{MODEL}}}", f"{version} flagged"),
                    query(f"model:qualms_ood_rate:bound{{{MODEL}}}", f"{version} bound"),
                    query(f"max by (model, version) (qualms_ood_target_rate{{{MODEL}}})", f"{version} target"),
                ),
                lines(
                    "Flag rate by predicted class",
                    "Which classes the strange images are taken for.",
                    "percentunit",
                    query(by_class, f"{version} {{{{class}}}}"),
                ),
            ],
            [
                lines(
                    "Evidence against the promise",
                    "N·KL(observed ‖ bound); the dashed line is where the alert fires if the rate is above the bound.",
                    "none",
                    query(f"model:qualms_ood:evidence5m{{{MODEL}}}", version),
                    limit=20.72,
                ),
                bars(
                    "Most doubted classes",
                    "Flagged share of each predicted class in 15 minutes, the largest ten.",
                    "percentunit",
                    query(most_doubted, f"{version} {{{{class}}}}"),
                ),
            ],
            [
                heat(
                    "p-values over time",
                    "In-distribution, p-values are uniform: every bucket is equally dark. Drift gathers them at the bottom.",
                    "none",
                    increase("qualms_p_value_bucket", "le", window=WINDOW),
                    width=10,
                ),
                bars(
                    "p-values, 5 minutes",
                    "Images by p-value: even bars are in-distribution traffic.",
                    "short",
                    query(increase("qualms_p_value_bucket", "le"), "{{le}}", format="heatmap"),
                    width=6,
                ),
                lines(
                    "Distance of p-values from calibration",
                    "Largest gap between the distributions of live and of calibration p-values, and what chance explains.",
                    "percentunit",
                    query(f"model:qualms_p_value:distance5m{{{MODEL}}}", f"{version} distance"),
                    query(f"model:qualms_p_value:distance_bound5m{{{MODEL}}}", f"{version} explained by chance"),
                    width=8,
                ),
            ],
            [
                heat(
                    "Epistemic uncertainty",
                    "Mutual information over time; buckets end at quantiles of the calibration images.",
                    "none",
                    increase("qualms_epistemic_uncertainty_bucket", "le", window=WINDOW),
                    width=16,
                ),
                bars(
                    "Epistemic uncertainty, reference",
                    "The calibration images in the same buckets: what the heat map should look like.",
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
                heat(
                    "Total uncertainty",
                    "Entropy over time; buckets end at quantiles of the calibration images.",
                    "none",
                    increase("qualms_total_uncertainty_bucket", "le", window=WINDOW),
                    width=16,
                ),
                bars(
                    "Total uncertainty, reference",
                    "The calibration images in the same buckets: what the heat map should look like.",
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
                lines(
                    "Rejected by trust",
                    "Share of predictions that are not to be trusted at the promised error rate.",
                    "percentunit",
                    query(f"model:qualms_untrusted:ratio5m{{{MODEL}}}", version),
                ),
                lines(
                    "Images",
                    "Images answered a second, by model version.",
                    "ops",
                    query(f"sum by (model, version) (rate(qualms_p_value_count{{{MODEL}}}[{WINDOW}]))", version),
                ),
            ],
        ],
        by_model=True,
    )
