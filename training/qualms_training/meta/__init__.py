"""The modules of the exported graph: taps, meta-model, scores, density and fusion; and the ONNX export."""
