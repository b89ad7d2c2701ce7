"""What is counted and timed, for Prometheus and for Triton's statistics RPC."""
