"""Converts one checkpoint of many, in a process of its own, so that a crash or its memory does not affect the others.

A record beside the models says for which bytes and options a version was started, and which manifest existed then. It
is written first, so that the next run can tell what a killed run did. If the version now has another manifest, the
killed run published it; otherwise it is converted again. When a version is published, the record names its manifest.
When it fails, the previous record is restored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import MANIFEST
from bf16kit.drift.verdicts import drift_rows, format_budget_ratio, tightest_of
from bf16kit.messages.errors import ArtifactError
from converter.bulk.executor import Process, start_process
from converter.bulk.worklist import Item
from converter.process import children

RECORDS = ".bf16-convert"  # in the repository; servers ignore hidden names
_VERSION = re.compile(r"[1-9][0-9]*")
_ERROR = "error: "
_LONGEST = 2000  # characters of an error
_OVER_BUDGET = 1  # also Python's exit code for a program that crashed, so the message must be checked too
_FAILED = 3  # the exit code for a model that cannot be converted; also used for a process that died

Status = Literal["converted", "done before", "over budget", "failed", "interrupted"]
Start = Callable[[list[str], Path], Process]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of converting one checkpoint.

    ``detail`` is its drift, or the error. ``code`` is the exit code that converting it alone would have.
    """

    model: str
    source: str
    status: Status
    code: int
    version: int | None = None
    detail: str = ""
    seconds: float = 0.0


def convert(item: Item, repository: Path, *, force: bool = False, start: Start | None = None) -> Outcome:
    """Convert ``item`` into the next version of its model in ``repository``, unless the same was converted before.

    With ``force``, the newest version is replaced, whatever it was made from. ``start`` starts the process; its output
    goes to a log beside the record. Raises OSError if the repository cannot be written to.
    """
    if item.problem:
        return Outcome(item.model, item.source.name, "failed", 2, detail=item.problem)
    began = time.monotonic()
    try:
        digest = item.digest()
    except OSError as error:
        where = "" if error.filename in (None, str(item.source)) else f"{error.filename} "
        message = f"{where}cannot be read: {error.strerror or error}"
        return Outcome(item.model, item.source.name, "failed", 2, detail=message)
    records = repository / RECORDS
    records.mkdir(parents=True, exist_ok=True)
    record = records / f"{item.model}.json"
    previous = _read(record)
    done = _converted_version(repository, item.model, previous, digest)
    if done is not None and not force:
        return Outcome(item.model, item.source.name, "done before", 0, done, _drift(repository, item.model, done))
    version = _next_version(repository, item.model, force=force)
    target = repository / item.model / str(version)
    started: dict[str, object] = {"digest": digest, "version": version}
    before = _fingerprint(target)
    _write(record, {**started, "instead_of": before})
    command = children.command("converter.cli", "checkpoint", str(item.source), "--out", str(target))
    log = record.with_suffix(".log")
    process = (start or start_process)([*command, *(["--force"] if force else []), *item.arguments], log)
    code = process.wait()
    now = _fingerprint(target)
    if code == 0:
        _write(record, {**started, "manifest": now})
    elif now == before:
        _restore(record, previous)
    return _outcome(item, repository, version, code, log, time.monotonic() - began)


def _outcome(item: Item, repository: Path, version: int, code: int, log: Path, seconds: float) -> Outcome:
    name = item.source.name
    if code == 0:
        return Outcome(item.model, name, "converted", 0, version, _drift(repository, item.model, version), seconds)
    if code in (130, -signal.SIGINT):
        return Outcome(item.model, name, "interrupted", 130, seconds=seconds)
    detail, ours = _error_message(log)
    over = code == _OVER_BUDGET and ours
    status: Status = "over budget" if over else "failed"
    if code == _OVER_BUDGET and not over:
        detail = f"ended without a message, exit code 1; see {log}"
        code = _FAILED
    if code < 0:
        killed = f"killed by {signal.Signals(-code).name}"
        detail = f"{killed} (out of memory?)" if code == -signal.SIGKILL else f"{killed}; see {log}"
        code = _FAILED
    return Outcome(item.model, name, status, code, None, detail or f"exit code {code}; see {log}", seconds)


def _error_message(log: Path) -> tuple[str, bool]:
    """Return the message of the error that ended the process, and whether this program wrote it."""
    text = log.read_text(errors="replace")
    _, own, message = text.rpartition(f"bf16-convert: {_ERROR}")
    if own:
        return message.strip()[:_LONGEST], True
    _, found, message = text.rpartition(_ERROR.capitalize())  # click's for a wrong option, or that of a crash
    return message.strip()[:_LONGEST] if found else "", False


def _converted_version(repository: Path, model: str, previous: dict[str, object], digest: str) -> int | None:
    """Return the version that was made with this ``digest``, if it exists and nothing has replaced it; else None."""
    version = previous.get("version")
    if previous.get("digest") != digest or type(version) is not int:
        return None
    path = repository / model / str(version)
    now = _fingerprint(path)
    published = previous["manifest"] == now if "manifest" in previous else previous.get("instead_of", now) != now
    if now is None or not published:
        return None
    try:
        Artifact.open(path, verify=False)
    except ArtifactError:
        return None
    return version


def _fingerprint(version: Path) -> str | None:
    """Return the sha256 of the manifest, which holds the digests of all other files; None if there is no manifest."""
    try:
        return hashlib.sha256((version / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return None


def _next_version(repository: Path, model: str, *, force: bool) -> int:
    """Return the version to write: the one after the newest published or, with ``force``, the newest itself."""
    directory = repository / model
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    newest = max((int(name) for name in names if _VERSION.fullmatch(name)), default=0)
    return max(newest, 1) if force else newest + 1


def _drift(repository: Path, model: str, version: int) -> str:
    """Return the largest share of the budget that each profile uses, in a few words."""
    manifest = Artifact.open(repository / model / str(version), verify=False).manifest
    rows = list(drift_rows(manifest))
    tightest = {name: tightest_of([row for row in rows if row.profile == name]) for name in sorted(manifest.drift)}
    return ", ".join(
        f"{name} {format_budget_ratio(row.used)}"
        for name, row in tightest.items()
        if row is not None and row.used is not None
    )


def _read(record: Path) -> dict[str, object]:
    try:
        found = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(record: Path, fields: dict[str, object]) -> None:
    """Write the record atomically."""
    temporary = record.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(fields, sort_keys=True) + "\n")
    temporary.replace(record)


def _restore(record: Path, previous: dict[str, object]) -> None:
    if previous:
        _write(record, previous)
    else:
        record.unlink(missing_ok=True)
