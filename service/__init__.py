"""`bf16-serve`: runs bf16 artifacts behind gRPC and measures their latency and accuracy drift live."""
