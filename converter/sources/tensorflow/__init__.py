"""TensorFlow models: looked at without TensorFlow, which then translates and answers in a process of its own."""
