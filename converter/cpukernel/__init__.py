"""Products for bf16kit's CPU kernel: found in a graph, given to it, and defined in ONNX's own operators."""
