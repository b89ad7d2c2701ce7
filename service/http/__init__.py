"""The HTTP port: metrics, probes and the status page."""
