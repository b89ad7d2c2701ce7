"""Faults planted in a package, to see which its tests notice. ``python -m mutation``."""
