"""Converting one checkpoint of many, in a process of its own: its crash, and its memory, are its own affair.

A record beside the models says for which bytes and options a version was begun. It is written first, so that a run that
is killed at any moment is found again: where the version is there, it is done, and where it is not, it is begun anew.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bf16kit.artifact import Artifact
from bf16kit.errors import ArtifactError
from bf16kit.verdicts import drift_rows, share, tightest_of
from converter.bulk.worklist import Item

RECORDS = ".bf16-convert"  # in the repository; servers pass over hidden names
_VERSION = re.compile(r"[1-9][0-9]*")
_ERROR = "error: "
_LONGEST = 2000  # characters of what went wrong
_CANNOT = 3  # the exit code of a model that cannot be converted: what a process that died counts as

Status = Literal["converted", "done before", "over budget", "failed", "interrupted"]
Start = Callable[[list[str], Path], "subprocess.Popen[bytes]"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the conversion of one checkpoint ended. ``detail``: its drift, or what went wrong; ``code``: as the process
    that converts it alone exits."""

    model: str
    source: str
    status: Status
    code: int
    version: int | None = None
    detail: str = ""
    seconds: float = 0.0


def convert(item: Item, repository: Path, *, force: bool = False, start: Start | None = None) -> Outcome:
    """Convert ``item`` into the next version of its model in ``repository``, unless one was made of the same before.

    With ``force`` the newest version is replaced, whatever it was made of. What the process says goes to a log beside
    the record; ``start`` starts it. Raises OSError when the repository cannot be written to.
    """
    if item.refused:
        return Outcome(item.model, item.source.name, "failed", 2, detail=item.refused)
    began = time.monotonic()
    try:
        digest = item.digest()
    except OSError as error:
        return Outcome(item.model, item.source.name, "failed", 2, detail=f"cannot be read: {error.strerror or error}")
    records = repository / RECORDS
    records.mkdir(parents=True, exist_ok=True)
    record = records / f"{item.model}.json"
    done = _done(repository, item.model, record, digest)
    if done is not None and not force:
        return Outcome(item.model, item.source.name, "done before", 0, done, _drift(repository, item.model, done))
    version = _version(repository, item.model, force=force)
    _write(record, {"digest": digest, "version": version})
    target = repository / item.model / str(version)
    command = [sys.executable, "-m", "converter.cli", "checkpoint", str(item.source), "--out", str(target)]
    log = record.with_suffix(".log")
    process = (start or start_process)([*command, *(["--force"] if force else []), *item.arguments], log)
    code = process.wait()
    return _outcome(item, repository, version, code, log, time.monotonic() - began)


def start_process(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """``command`` started, with all that it says going to ``log``."""
    with log.open("wb") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)


def _outcome(item: Item, repository: Path, version: int, code: int, log: Path, seconds: float) -> Outcome:
    name = item.source.name
    if code == 0:
        return Outcome(item.model, name, "converted", 0, version, _drift(repository, item.model, version), seconds)
    if code in (130, -signal.SIGINT):
        return Outcome(item.model, name, "interrupted", 130, seconds=seconds)
    status: Status = "over budget" if code == 1 else "failed"
    detail = _said(log)
    if code < 0:
        killed = f"killed by {signal.Signals(-code).name}"
        detail = f"{killed} (out of memory?)" if code == -signal.SIGKILL else f"{killed}; {log} has what it said"
        code = _CANNOT
    return Outcome(item.model, name, status, code, None, detail or f"exit code {code}; {log} has what it said", seconds)


def _said(log: Path) -> str:
    """The message of the error that the process ended with."""
    text = log.read_text(errors="replace")
    _, found, message = text.rpartition(f"bf16-convert: {_ERROR}")
    if not found:
        _, found, message = text.rpartition(_ERROR.capitalize())  # click's own, of a wrong option
    return message.strip()[:_LONGEST] if found else ""


def _done(repository: Path, model: str, record: Path, digest: str) -> int | None:
    """The version that was made of what has this ``digest``, if it is there."""
    kept = _read(record)
    version = kept.get("version")
    if kept.get("digest") != digest or type(version) is not int:
        return None
    try:
        Artifact.open(repository / model / str(version), verify=False)
    except ArtifactError:
        return None
    return version


def _version(repository: Path, model: str, *, force: bool) -> int:
    """The version to write: the next, which one that was begun and never published is again; or the newest there is."""
    directory = repository / model
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    newest = max((int(name) for name in names if _VERSION.fullmatch(name)), default=0)
    return max(newest, 1) if force else newest + 1


def _drift(repository: Path, model: str, version: int) -> str:
    """The bound that each profile comes nearest to, in a few words."""
    manifest = Artifact.open(repository / model / str(version), verify=False).manifest
    rows = list(drift_rows(manifest))
    tightest = {name: tightest_of([row for row in rows if row.profile == name]) for name in sorted(manifest.drift)}
    return ", ".join(
        f"{name} {share(row.used)}" for name, row in tightest.items() if row is not None and row.used is not None
    )


def _read(record: Path) -> dict[str, object]:
    try:
        found = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(record: Path, fields: dict[str, object]) -> None:
    """Whole or not at all."""
    beside = record.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(json.dumps(fields, sort_keys=True) + "\n")
    beside.replace(record)
