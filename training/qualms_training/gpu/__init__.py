"""Which nodes of a graph ONNX Runtime can run on a GPU, from tables of kernels: no GPU is needed."""
