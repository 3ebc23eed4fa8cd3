"""The modules of the exported graph: taps, meta-model, flag score, joined α and its scores; and the ONNX export."""
