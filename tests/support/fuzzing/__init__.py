"""Fuzzing of the converter: mutate valid sources, convert each mutant in its own process, and judge the outcome.

``make fuzz`` runs a campaign. It calls ``python -m fuzzing`` with ``tests/support`` on the path.
"""
