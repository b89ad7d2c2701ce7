"""Requests into batches, before one runtime."""
