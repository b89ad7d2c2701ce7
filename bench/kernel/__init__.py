"""The CPU kernel against ONNX Runtime, OpenVINO, torch, and torch with AMD's zentorch."""
