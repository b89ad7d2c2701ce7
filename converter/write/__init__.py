"""Writes the files of an artifact: weights, ONNX graphs, TorchScript, torch.export programs, safetensors exports."""
