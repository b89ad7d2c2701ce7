"""The kernels that a release of ONNX Runtime for CUDA registers, asked of the release itself, with no device."""
