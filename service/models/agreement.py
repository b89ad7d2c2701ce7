"""One profile per model in all processes of a server: two profiles would answer the same request differently.

The fastest profile is found by measurement, and two measurements may disagree. So the first process to choose decides
for all.
"""

from __future__ import annotations

from typing import Protocol


class Agreement(Protocol):
    """The choice of a profile for one plan, shared by the processes."""

    def known(self) -> str:
        """Return the profile that was chosen already, or ""."""
        ...

    def settle(self, profile: str) -> str:
        """Choose ``profile``, unless another one was chosen meanwhile. Returns the profile that counts."""
        ...


class OwnChoice:
    """The agreement of a process that serves alone: its own choice counts."""

    def known(self) -> str:
        return ""

    def settle(self, profile: str) -> str:
        return profile


OWN_CHOICE = OwnChoice()
