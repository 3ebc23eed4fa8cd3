"""The dashboard *Service*: are requests answered, quickly, and by what?"""

from typing import Any

from docker.grafana.panels import WINDOW, dashboard, heat, lines, names, number, query, table


def build() -> dict[str, Any]:
    """Is the service well?"""
    predict = 'route="predict"'
    buckets = f"sum by (le) (rate(qualms_request_duration_seconds_bucket{{{predict}}}[{WINDOW}]))"

    def mean(metric: str) -> str:
        return f"sum(rate({metric}_sum[{WINDOW}])) / (sum(rate({metric}_count[{WINDOW}])) > 0)"

    return dashboard(
        "qualms-service",
        "Service",
        "Whether requests are answered, quickly, and by what.",
        [
            [
                number("Up", "Instances that answer Prometheus.", "none", 'sum(up{job="qualms"})', "up", width=4),
                number(
                    "Requests",
                    "Requests for predictions a second.",
                    "reqps",
                    "job:qualms_predict_requests:rate5m",
                    "{{job}}",
                    width=4,
                ),
                number(
                    "Errors, 5 minutes",
                    "Share of requests that ended in 5xx or 429; the objective allows 0.1 %.",
                    "percentunit",
                    "job:qualms_predict_errors:ratio5m",
                    "{{job}}",
                    width=4,
                    limit=0.001,
                ),
                number(
                    "Slow, 5 minutes",
                    "Share of requests that took more than 250 ms; the objective allows 1 %.",
                    "percentunit",
                    "job:qualms_predict_slow:ratio5m",
                    "{{job}}",
                    width=4,
                    limit=0.01,
                ),
                names(
                    "Provider",
                    "Where the model runs: CUDAExecutionProvider is the GPU.",
                    "qualms_provider_info",
                    "{{provider}}",
                    width=4,
                ),
                number(
                    "Queue", "Images waiting for the model now.", "none", "sum(qualms_queue_depth)", "images", width=4
                ),
            ],
            [
                lines(
                    "Traffic by status",
                    "Requests for predictions by status code; 499 is a client that left first.",
                    "reqps",
                    query(f"sum by (code) (rate(qualms_requests_total{{{predict}}}[{WINDOW}]))", "{{code}}"),
                ),
                lines(
                    "Rejections by reason",
                    "Requests that got no prediction: what was wrong with them, or with us (overload, expired, loading, draining).",
                    "reqps",
                    query(f"sum by (reason) (rate(qualms_rejected_total[{WINDOW}]))", "{{reason}}"),
                ),
            ],
            [
                lines(
                    "Latency",
                    "From the first byte of a request to the last of its reply.",
                    "s",
                    *(
                        query(f"histogram_quantile({share}, {buckets})", f"p{round(100 * share)}")
                        for share in (0.5, 0.9, 0.99)
                    ),
                    limit=0.25,
                ),
                heat(
                    "Latency, all requests",
                    "How requests spread over durations; two bands are two kinds of request.",
                    "s",
                    f"sum by (le) (increase(qualms_request_duration_seconds_bucket{{{predict}}}[{WINDOW}]))",
                ),
            ],
            [
                lines(
                    "Errors and slow requests against their budgets",
                    "How fast the 30-day budgets were spent in the last hour: 1 is exactly the budget, 14.4 wakes somebody.",
                    "none",
                    query("job:qualms_predict_errors:ratio1h / 0.001", "errors"),
                    query("job:qualms_predict_slow:ratio1h / 0.01", "latency"),
                    limit=14.4,
                ),
                lines(
                    "Where the time goes",
                    "Mean seconds a request waits and is decoded, and a run takes.",
                    "s",
                    query(mean("qualms_queue_duration_seconds"), "queue"),
                    query(mean("qualms_decode_duration_seconds"), "decoding"),
                    query(mean("qualms_inference_duration_seconds"), "inference"),
                ),
            ],
            [
                lines(
                    "Queue",
                    "Images waiting, by instance.",
                    "none",
                    query("sum by (instance, model) (qualms_queue_depth)", "{{instance}} {{model}}"),
                    width=8,
                ),
                lines(
                    "Batch size",
                    "Images in one run, on average: it grows with the load.",
                    "none",
                    query(mean("qualms_batch_size"), "mean"),
                    width=8,
                ),
                lines(
                    "Model busy",
                    "Share of time in which the model was running; at 100 % there is nothing left.",
                    "percentunit",
                    query("model:qualms_busy:ratio5m", "{{instance}} {{model}}"),
                    width=8,
                ),
            ],
            [
                table(
                    "Models",
                    "What is served, by digest: the same in every reply.",
                    "qualms_model_info",
                    "instance",
                    "model",
                    "version",
                    "digest",
                    width=12,
                    height=6,
                ),
                table(
                    "Providers",
                    "Where each model runs.",
                    "qualms_provider_info",
                    "instance",
                    "model",
                    "version",
                    "provider",
                    width=12,
                    height=6,
                ),
            ],
        ],
        by_model=False,
    )
