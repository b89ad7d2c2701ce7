"""The system under a process: memory, control groups, parents, versions."""
