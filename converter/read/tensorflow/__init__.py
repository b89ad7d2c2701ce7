"""TensorFlow models: checked without TensorFlow, which then translates and runs them in a separate process."""
