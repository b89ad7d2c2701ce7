"""Verifies what a conversion cost: samples are run, on the reference and on each profile, and compared."""
