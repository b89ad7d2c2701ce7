"""Knowledge on ONNX graphs in general: names, types, initializers, operators, and the base of conversion steps."""
