"""Benchmarks of what is deployed: images and containers."""
