"""Configuration, logs and the stop signal: everything a process needs before it opens a socket or loads a model."""
