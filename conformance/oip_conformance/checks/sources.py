"""The sources of rules."""

OIP = "Open Inference Protocol, gRPC"
OBSERVED = "Triton 2.51, as observed"
GRPC = "gRPC"
HEALTH = "gRPC health checking protocol"


def extension(name: str) -> str:
    """Return the source for a rule of one of Triton's extensions."""
    return f"Triton's extension {name}"
