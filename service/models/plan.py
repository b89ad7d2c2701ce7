"""Plans and desired models: which versions of a model to serve, from which directory, and how.

They may be made in one process and applied in another, so they can be written as JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter

from service.models.serving import Serving


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
        return hashlib.sha256(json.dumps(_PLAN.dump_python(self, mode="json"), sort_keys=True).encode()).hexdigest()

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
        return _DESIRED.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> DesiredModel:
        """Return what :meth:`to_json` wrote. The text comes from a process of this server, and is trusted."""
        return _DESIRED.validate_json(text)


_DESIRED = TypeAdapter(DesiredModel)
_PLAN = TypeAdapter(Plan)


def complete(futures: Iterable[Future[None]], error: BaseException | None) -> None:
    """End the futures of callers: with ``error``, or successfully for None."""
    for future in futures:
        if not future.set_running_or_notify_cancel():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
