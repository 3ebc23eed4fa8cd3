"""Run a model for many requests: the ONNX Runtime engine, batching, admission and CPU limits."""
