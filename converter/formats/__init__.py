"""What an artifact is written as: weights, ONNX graphs, TorchScript."""
