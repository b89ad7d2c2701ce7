"""Presents what an artifact holds and what was measured: as text and as an HTML page."""
