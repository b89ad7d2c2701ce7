"""From a torch module to an ONNX graph whose weights are views of the checkpoint."""
