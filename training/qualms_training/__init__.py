"""Turn a frozen classifier and its data into one calibrated ONNX file: the offline half of Qualms."""
