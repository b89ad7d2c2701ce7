"""The wire messages of the Open Inference Protocol, generated from ``proto/inference.proto`` (``make proto``)."""
