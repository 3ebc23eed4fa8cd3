"""The ONNX file of a graph: its export, and its comparison with PyTorch."""
