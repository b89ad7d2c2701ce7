"""Batching: joins requests into batches for one runtime."""
