"""Damaged sources by the thousand: what is mutated, how a mutant is converted apart, and how its end is judged.

``python -m fuzzing`` (with ``tests/support`` on the path) runs a campaign; ``make fuzz`` is its door.
"""
