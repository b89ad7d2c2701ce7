"""What the converter and the server agree on: errors, numerics, tensors, drift, manifest, artifact, runtime."""

__version__ = "0.1.0"
