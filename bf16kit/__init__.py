"""The library shared by converter and server: errors, numerics, tensors, drift, manifest, artifact and runtimes."""

__version__ = "0.1.0"
