"""The bundle: one ONNX file that holds the graph and its manifest."""
