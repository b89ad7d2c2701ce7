"""Converts a directory of checkpoints, each in a process of its own, on this machine or on a Ray cluster's nodes."""
