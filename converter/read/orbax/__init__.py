"""Orbax checkpoints, JAX's own format: their layout, and the process that reads their arrays with tensorstore."""
