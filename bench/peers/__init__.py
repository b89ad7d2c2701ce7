"""`bf16-serve` beside MLServer and PyTriton: the same ONNX file, the same requests, one run, in turns."""
