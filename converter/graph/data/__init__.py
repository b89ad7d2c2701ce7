"""The bf16 kernels of each ONNX Runtime version, as :mod:`converter.graph.cuda_kernels` reads them."""
