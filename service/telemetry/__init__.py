"""Metrics, statistics and traces: for Prometheus, for Triton's statistics RPC and for OpenTelemetry."""
