"""What is wanted of one model: which versions of it, from where, and how each is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from service.models.policy import Serving


@dataclass(frozen=True, slots=True)
class Plan:
    """One version to serve. Equal plans load the same: ``stamp`` changes whenever the artifact is replaced.

    ``broken`` says why nothing can be loaded, e.g. for a ``serving.yaml`` that is wrong.
    """

    version: int
    path: Path
    serving: Serving
    stamp: tuple[int, ...] = ()
    broken: str = ""


@dataclass(frozen=True, slots=True)
class Wish:
    """The versions of one model to serve, ascending; none of them: the model is to be unloaded."""

    name: str
    plans: tuple[Plan, ...] = ()

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(plan.version for plan in self.plans)
