"""Plans and desired models: which versions of a model to serve, from which directory, and how.

They may be made in one process and applied in another, so they can be written as JSON.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from service.models.policy import Serving


@dataclass(frozen=True)
class Plan:
    """One version to serve. Equal plans load the same model.

    ``stamp`` changes if a file of the artifact changes; it is empty without a manifest. ``broken`` says why the version
    cannot be loaded, e.g. because of an invalid ``serving.yaml``.
    """

    version: int
    path: Path
    serving: Serving
    stamp: str = ""
    broken: str = ""

    @property
    def finished(self) -> bool:
        """Whether the directory holds an artifact. Without a manifest, it may still be being copied."""
        return bool(self.stamp)

    @cached_property
    def digest(self) -> str:
        """A SHA-256 in hexadecimal that is equal for equal plans, in every process."""
        return hashlib.sha256(json.dumps(_plan_to_dict(self), sort_keys=True).encode()).hexdigest()

    def without_labels(self) -> Plan:
        """Return the plan without the labels of classes, which are many, and only needed to answer requests."""
        return replace(self, serving=self.serving.model_copy(update={"labels": {}}))


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """The versions of one model to serve, ascending. Without plans, the model is to be unloaded."""

    name: str
    plans: tuple[Plan, ...] = ()

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(plan.version for plan in self.plans)

    def to_json(self) -> str:
        return json.dumps({"name": self.name, "plans": [_plan_to_dict(plan) for plan in self.plans]})

    @classmethod
    def from_json(cls, text: str) -> DesiredModel:
        """Return what :meth:`to_json` wrote. The text comes from a process of this server, and is trusted."""
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
