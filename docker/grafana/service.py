"""The dashboard *Service*: traffic, errors, latency, capacity and the models served."""

from typing import Any

from docker.grafana.panels import WINDOW, dashboard, heatmap, label_stat, query, stat, table, timeseries


def build() -> dict[str, Any]:
    """Return the dashboard as a JSON object."""
    predict = 'route="predict"'
    buckets = f"sum by (le) (rate(qualms_request_duration_seconds_bucket{{{predict}}}[{WINDOW}]))"

    def mean(metric: str) -> str:
        return f"sum(rate({metric}_sum[{WINDOW}])) / (sum(rate({metric}_count[{WINDOW}])) > 0)"

    return dashboard(
        "qualms-service",
        "Service",
        "Traffic, errors, latency, capacity and the models served.",
        [
            [
                stat(
                    "Up",
                    "Number of instances that Prometheus can scrape.",
                    "none",
                    'sum(up{job="qualms"})',
                    "up",
                    width=4,
                ),
                stat(
                    "Requests",
                    "Prediction requests per second.",
                    "reqps",
                    "job:qualms_predict_requests:rate5m",
                    "{{job}}",
                    width=4,
                ),
                stat(
                    "Errors, 5 minutes",
                    "Share of requests answered with 5xx or 429. The objective allows 0.1 %.",
                    "percentunit",
                    "job:qualms_predict_errors:ratio5m",
                    "{{job}}",
                    width=4,
                    limit=0.001,
                ),
                stat(
                    "Slow, 5 minutes",
                    "Share of requests that took more than 250 ms. The objective allows 1 %.",
                    "percentunit",
                    "job:qualms_predict_slow:ratio5m",
                    "{{job}}",
                    width=4,
                    limit=0.01,
                ),
                label_stat(
                    "Provider",
                    "The execution provider of each model. CUDAExecutionProvider is the GPU.",
                    "qualms_provider_info",
                    "{{provider}}",
                    width=4,
                ),
                stat("Queue", "Images waiting in the queue now.", "none", "sum(qualms_queue_depth)", "images", width=4),
            ],
            [
                timeseries(
                    "Traffic by status",
                    "Prediction requests by status code. 499: the client disconnected before the reply.",
                    "reqps",
                    query(f"sum by (code) (rate(qualms_requests_total{{{predict}}}[{WINDOW}]))", "{{code}}"),
                ),
                timeseries(
                    "Rejections by reason",
                    "Requests without a prediction. Overload, expired, loading and draining have their cause in the service.",
                    "reqps",
                    query(f"sum by (reason) (rate(qualms_rejected_total[{WINDOW}]))", "{{reason}}"),
                ),
            ],
            [
                timeseries(
                    "Connections",
                    "Open connections. QUALMS_MAX_CONNECTIONS limits them.",
                    "none",
                    query("sum by (instance) (qualms_connections)", "{{instance}}"),
                ),
                timeseries(
                    "Refused by the protocol",
                    "Requests and connections that the HTTP server refused or closed by itself, and lost log lines.",
                    "reqps",
                    query(f"sum by (reason) (rate(qualms_protocol_refusals_total[{WINDOW}]))", "{{reason}}"),
                    query(f"sum(rate(qualms_log_lines_dropped_total[{WINDOW}]))", "log lines dropped"),
                ),
            ],
            [
                timeseries(
                    "Latency",
                    "Time from the first byte of a request to the last byte of its reply.",
                    "s",
                    *(
                        query(f"histogram_quantile({share}, {buckets})", f"p{round(100 * share)}")
                        for share in (0.5, 0.9, 0.99)
                    ),
                    limit=0.25,
                ),
                heatmap(
                    "Latency, all requests",
                    "Distribution of request durations. Two bands mean two kinds of request.",
                    "s",
                    f"sum by (le) (increase(qualms_request_duration_seconds_bucket{{{predict}}}[{WINDOW}]))",
                ),
            ],
            [
                timeseries(
                    "Errors and slow requests against their budgets",
                    "Burn rate of the 30-day budgets over the last hour. 1 spends exactly the budget; 14.4 is critical.",
                    "none",
                    query("job:qualms_predict_errors:ratio1h / 0.001", "errors"),
                    query("job:qualms_predict_slow:ratio1h / 0.01", "latency"),
                    limit=14.4,
                ),
                timeseries(
                    "Where the time goes",
                    "Mean seconds per request in the queue and in decoding, and mean seconds per model run.",
                    "s",
                    query(mean("qualms_queue_duration_seconds"), "queue"),
                    query(mean("qualms_decode_duration_seconds"), "decoding"),
                    query(mean("qualms_inference_duration_seconds"), "inference"),
                ),
            ],
            [
                timeseries(
                    "Queue",
                    "Images waiting in the queue, by instance and model.",
                    "none",
                    query("sum by (instance, model) (qualms_queue_depth)", "{{instance}} {{model}}"),
                    width=8,
                ),
                timeseries(
                    "Batch size",
                    "Mean number of images per model run. It grows with the load.",
                    "none",
                    query(mean("qualms_batch_size"), "mean"),
                    width=8,
                ),
                timeseries(
                    "Model busy",
                    "Share of time in which the model was running. At 100 % no capacity is left.",
                    "percentunit",
                    query("model:qualms_busy:ratio5m", "{{instance}} {{model}}"),
                    width=8,
                ),
            ],
            [
                table(
                    "Models",
                    "The models served. Every reply contains the same digest.",
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
                    "The execution provider of each model.",
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
