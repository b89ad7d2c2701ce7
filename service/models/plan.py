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
class FailedVersion:
    """A version that is wanted but cannot be loaded, and the reason."""

    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """The versions of one model to serve, ascending. Without plans, the model is to be unloaded.

    ``failed`` are versions that are not loaded, because that failed before: the plans serve instead. They are reported
    as unavailable, in every process.
    """

    name: str
    plans: tuple[Plan, ...] = ()
    failed: tuple[FailedVersion, ...] = ()

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(plan.version for plan in self.plans)

    @property
    def failed_versions(self) -> frozenset[int]:
        return frozenset(each.plan.version for each in self.failed)

    @property
    def reported_versions(self) -> frozenset[int]:
        return self.versions | self.failed_versions

    @property
    def instead(self) -> str:
        """Which versions serve instead of the failed ones, for logs and the status page."""
        served = ", ".join(map(str, sorted(self.versions)))
        return f"versions {served} serve instead" if len(self.plans) > 1 else f"version {served} serves instead"

    def to_json(self) -> str:
        failed = [{"plan": _plan_to_dict(each.plan), "reason": each.reason} for each in self.failed]
        return json.dumps({"name": self.name, "plans": [*map(_plan_to_dict, self.plans)], "failed": failed})

    @classmethod
    def from_json(cls, text: str) -> DesiredModel:
        """Return what :meth:`to_json` wrote. The text comes from a process of this server, and is trusted."""
        written = json.loads(text)
        failed = tuple(FailedVersion(_plan_of(each["plan"]), each["reason"]) for each in written["failed"])
        return cls(written["name"], tuple(map(_plan_of, written["plans"])), failed)


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
