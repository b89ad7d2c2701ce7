"""Plans: which versions of a model to serve, and how, as its directory ``<repository>/<model>/`` asks for them.

A server may make them in one process and apply them in another, so they can be written as JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from bf16kit.artifact.manifest import MANIFEST
from bf16kit.messages.errors import ConfigError, NotFound
from bf16kit.messages.wording import os_error_text, quoted
from bf16kit.service.models.serving import Serving, load_serving

# Names become metric labels, health services and log lines.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
LONGEST_VERSION = 18  # digits: what fits 64 bits
_VERSION_NAME = re.compile(rf"[1-9][0-9]{{0,{LONGEST_VERSION - 1}}}")


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


# --- the repository on disk -------------------------------------------------------------------------------------------


class RepositoryScan(NamedTuple):
    """The result of one scan of the repository: desired models by name, and why other directories were passed over."""

    desired_models: dict[str, DesiredModel]
    notes: list[str]


class Directory:
    """Reads the repository. Nothing is cached: every method reads the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def versions(self) -> dict[str, list[int]]:
        """Return the versions of each model, servable or not. Raises ConfigError if the root cannot be listed."""
        found = {d.name: _any_versions_in(d) for d in directories_in(self.root) if _MODEL_NAME.fullmatch(d.name)}
        return {name: versions for name, versions in found.items() if versions}

    def nothing_to_serve(self, mode: str) -> str:
        """Return why no model is served, and a remedy, for the log. ``mode`` is the server's model_control."""
        found = "cannot be listed any more"
        with contextlib.suppress(OSError):  # it was listed a moment ago
            found = "holds no model" if any(self.root.iterdir()) else "is empty"
        if _holds_manifest(self.root):
            found = f"is an artifact itself, with its {MANIFEST}"
        restart = " and restart" if mode == "none" else ""
        return (
            f"repository {self.root} {found}: serving, but not ready; put artifacts under <model>/<version>/{restart}"
        )

    def desired_model(self, name: str) -> DesiredModel:
        """Return what model ``name`` asks for. Raises NotFound."""
        if not _MODEL_NAME.fullmatch(name) or not _any_versions_in(self.root / name):
            raise NotFound(f"the repository has no model {quoted(name)}")
        return desired_model_of(self.root / name)

    def older(self, desired: DesiredModel) -> Iterator[Plan]:
        """Yield the plans of the model's complete versions that are older than all of ``desired``, the newest first.

        Raises ConfigError if the model's directory cannot be listed.
        """
        directory, serving = self.root / desired.name, desired.plans[0].serving
        for version in reversed(versions_in(directory)):
            if version < min(desired.versions) and (plan := _plan(directory, version, serving)).finished:
                yield plan

    def scan(self, earlier: Mapping[str, DesiredModel] | None = None) -> RepositoryScan:
        """Return what all models ask for. ``earlier`` has the previous desired models by name.

        With ``earlier``, a version without a manifest is being copied or replaced, so its previous plan is kept. The
        same holds for a model whose directory cannot be read. Raises ConfigError if the root cannot be listed.
        """
        scan = RepositoryScan({}, [])
        for directory in directories_in(self.root):
            name = directory.name
            previous = None if earlier is None else earlier.get(name, DesiredModel(name))
            try:
                desired = desired_model_of(directory) if previous is None else _finished(directory, previous)
            except OSError as error:
                scan.notes.append(f"{directory} cannot be read now: {os_error_text(error)}")
                desired = previous or DesiredModel(name)
            except ConfigError as error:
                scan.notes.append(str(error))
                continue
            if desired.plans:
                scan.desired_models[name] = desired
        return scan


def directories_in(root: Path) -> list[Path]:
    """Return the models' directories, sorted by name. Raises ConfigError if ``root`` cannot be listed."""
    try:
        return [d for d in sorted(root.iterdir()) if d.is_dir() and not d.name.startswith(".")]
    except OSError as error:
        raise ConfigError(f"repository {root}: cannot be listed: {os_error_text(error)}") from None


def versions_in(directory: Path) -> list[int]:
    """Return the versions in a model's directory, ascending, usable or not.

    Raises ConfigError if the directory cannot be listed.
    """
    try:
        return _versions_in(directory)
    except OSError as error:
        raise ConfigError(f"{directory} is skipped: it cannot be listed: {os_error_text(error)}") from None


def desired_model_of(directory: Path) -> DesiredModel:
    """Return what a model's directory asks for.

    Raises ConfigError if it is not a model's directory, which is passed over then.
    """
    return _desired_model(directory, _check(directory, versions_in(directory)))


def with_serving(desired: DesiredModel, serving: Serving) -> DesiredModel:
    """Return ``desired``, whose directory was just read, with other settings; they choose its versions anew.

    Raises ConfigError for a version that does not exist, or if the model's directory cannot be listed.
    """
    directory = desired.plans[0].path.parent
    versions = serving.version_policy.choose(versions_in(directory))
    return DesiredModel(desired.name, tuple(_plan(directory, version, serving) for version in versions))


def _finished(directory: Path, previous: DesiredModel) -> DesiredModel:
    """Return the desired model with the versions that are complete or were wanted before.

    A version that was wanted before keeps its previous plan while it has no manifest. Raises OSError if the directory
    cannot be listed.
    """
    wanted = {plan.version: plan for plan in previous.plans}
    versions = _check(directory, _versions_in(directory))
    usable = [version for version in versions if version in wanted or stamp_of(directory / str(version))]
    if not usable:
        for version in reversed(versions):
            if not os.access(path := directory / str(version), os.R_OK | os.X_OK, effective_ids=True):
                raise ConfigError(f"{directory} is skipped: user {os.geteuid()} may not read {path}")
        raise ConfigError(f"{directory} is skipped: none of its versions has a {MANIFEST} yet")
    desired = _desired_model(directory, usable)
    plans = (plan if plan.finished else wanted.get(plan.version, plan) for plan in desired.plans)
    return DesiredModel(desired.name, tuple(plans))


def _check(directory: Path, versions: list[int]) -> list[int]:
    if not _MODEL_NAME.fullmatch(directory.name):
        raise ConfigError(f"{directory} is skipped: a model's name may contain only letters, digits and . _ + -")
    if versions:
        return versions
    if not _holds_manifest(directory):
        raise ConfigError(f"{directory} is skipped: it has no version directory (a positive integer)")
    raise ConfigError(
        f"{directory} is skipped: it is an artifact, and not at <model>/<version>/ of the repository {directory.parent}"
    )


def _desired_model(directory: Path, versions: list[int]) -> DesiredModel:
    serving, broken = Serving(), ""
    try:
        serving = load_serving(directory)
        versions = serving.version_policy.choose(versions)
    except ConfigError as error:
        broken, versions = str(error), versions[-1:]
    return DesiredModel(directory.name, tuple(_plan(directory, version, serving, broken) for version in versions))


def _plan(directory: Path, version: int, serving: Serving, broken: str = "") -> Plan:
    path = directory / str(version)
    return Plan(version, path, serving, stamp_of(path), broken)


def stamp_of(path: Path) -> str:
    """Return a digest that changes if a file of the artifact is replaced, grows or shrinks; "" without a manifest."""
    digest, manifest = hashlib.sha256(), False
    try:
        for file in sorted(path.iterdir()):
            name = file.name
            try:
                status = file.stat()
            except FileNotFoundError:  # a dangling link
                status = file.lstat()
            digest.update(f"{name}\0{status.st_ino} {status.st_size} {status.st_mtime_ns}\0".encode(errors="replace"))
            manifest = manifest or name == MANIFEST
    except OSError:  # removed meanwhile: the next scan will see that
        return ""
    return digest.hexdigest() if manifest else ""


def _holds_manifest(directory: Path) -> bool:
    try:
        return (directory / MANIFEST).is_file()
    except OSError:  # the directory may be listed and not entered
        return False


def _any_versions_in(directory: Path) -> list[int]:
    """Return the versions in a model's directory, none if it cannot be listed."""
    try:
        return _versions_in(directory)
    except OSError:
        return []


def _versions_in(directory: Path) -> list[int]:
    return sorted(int(d.name) for d in directory.iterdir() if _VERSION_NAME.fullmatch(d.name) and d.is_dir())
