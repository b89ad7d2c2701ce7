"""The CPU kernel against ONNX Runtime, OpenVINO and torch."""
