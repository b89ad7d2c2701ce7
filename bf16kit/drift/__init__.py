"""Drift: its metrics, the budget, and the verdict on measurements."""
