"""What is known of ONNX graphs in general: names, types, initializers, operators, and what a step is."""
