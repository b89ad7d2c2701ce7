"""Benchmarks for every number the project promises. ``python -m bench`` runs them; ``bench/results`` holds the last."""
