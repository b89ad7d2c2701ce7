"""One profile of a model in all processes of a server: two would answer the same request differently.

Which one is fastest is measured, and two measurements need not agree. So the first counts for all.
"""

from __future__ import annotations

from typing import Protocol


class Agreement(Protocol):
    """About one model, as one plan has it."""

    def known(self) -> str:
        """The profile that was chosen already; "" where none was."""
        ...

    def settle(self, profile: str) -> str:
        """Choose ``profile``, unless another was meanwhile, which is returned then."""
        ...


class OwnChoice:
    """The agreement of a process that serves alone."""

    def known(self) -> str:
        return ""

    def settle(self, profile: str) -> str:
        return profile


OWN_CHOICE = OwnChoice()
