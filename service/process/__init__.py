"""Configuration, logs and the signal to stop: what the process brings before any socket or model."""
