"""The Dirichlet meta-model and the graph around it: taps, scores, density, fusion and ONNX export."""
