"""The bf16 kernels of each ONNX Runtime version, as :mod:`converter.graph.cuda_support` reads them."""
