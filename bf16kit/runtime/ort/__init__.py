"""Running ONNX graphs with ONNX Runtime."""
