"""What every test needs: property tests that do not judge a busy machine by its speed."""

from __future__ import annotations

from hypothesis import settings

# A deadline per example fails on a machine that is busy with something else, and says nothing about the code.
settings.register_profile("bf16kit", deadline=None)
settings.load_profile("bf16kit")
