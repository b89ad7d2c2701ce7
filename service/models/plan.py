"""What is wanted of one model: which versions of it, from where, and how each is served.

Whoever makes wishes and whoever fulfils them may be different processes: a wish can be written as JSON.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.models.policy import Serving


@dataclass(frozen=True, slots=True)
class Plan:
    """One version to serve. Equal plans load the same: ``stamp`` changes whenever one of the artifact's files does, and
    is empty while there is no manifest.

    ``broken`` says why nothing can be loaded, e.g. for a ``serving.yaml`` that is wrong.
    """

    version: int
    path: Path
    serving: Serving
    stamp: str = ""
    broken: str = ""

    @property
    def finished(self) -> bool:
        """Whether there is an artifact, and not only a directory into which one may be on its way."""
        return bool(self.stamp)

    def key(self) -> str:
        """The same for equal plans, in every process."""
        return json.dumps(_plan_to_dict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        """The same, short."""
        return hashlib.sha256(self.key().encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Wish:
    """The versions of one model to serve, ascending; none of them: the model is to be unloaded."""

    name: str
    plans: tuple[Plan, ...] = ()

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(plan.version for plan in self.plans)

    def to_json(self) -> str:
        return json.dumps({"name": self.name, "plans": [_plan_to_dict(plan) for plan in self.plans]})

    @classmethod
    def from_json(cls, text: str) -> Wish:
        """The wish that :meth:`to_json` wrote: for processes of one server, which trust each other."""
        written = json.loads(text)
        return cls(written["name"], tuple(_plan_of(plan) for plan in written["plans"]))


def _plan_to_dict(plan: Plan) -> dict[str, Any]:
    return {
        "version": plan.version,
        "path": str(plan.path),
        "serving": plan.serving.model_dump(mode="json"),
        "stamp": plan.stamp,
        "broken": plan.broken,
    }


def _plan_of(written: dict[str, Any]) -> Plan:
    serving = Serving.model_validate(written["serving"])
    return Plan(written["version"], Path(written["path"]), serving, written["stamp"], written["broken"])
