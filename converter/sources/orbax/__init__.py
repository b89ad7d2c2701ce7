"""Orbax checkpoints, JAX's own: where their arrays lie, and the process that reads them with tensorstore."""
