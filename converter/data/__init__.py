"""The bf16 kernels of each ONNX Runtime version, as :mod:`converter.kernels` reads them."""
