"""Converts the checkpoints of a worklist, several at a time. A later run converts what is not done yet."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import MANIFEST
from bf16kit.drift.verdicts import drift_rows, format_budget_ratio, tightest_of
from bf16kit.messages.errors import SourceError
from bf16kit.messages.wording import table
from converter.bulk.worklist import Item
from converter.process import children

RECORDS = ".bf16-convert"  # in the repository; servers ignore hidden names
FAILED, INTERRUPTED = 3, 130  # exit codes: a model that cannot be converted, or a process that died; after Ctrl-C
_ERROR = "bf16-convert: error: "
_SECONDS = 0.2  # between two looks at the event

# Runs a command line of this program, its output going to a file, and returns its exit code, soon after the event.
Run = Callable[[list[str], Path, threading.Event], int]


def run_here(command: list[str], log: Path, stop: threading.Event) -> int:
    """Run ``command`` as a process of this machine; ``stop`` is passed on as Ctrl-C."""
    process = start_process(command, log)
    while process.poll() is None:
        if stop.wait(_SECONDS):
            process.send_signal(signal.SIGINT)
            break
    return process.wait()


def start_process(command: list[str], log: Path, directory: str | None = None) -> subprocess.Popen[bytes]:
    """Start ``command``, which ends when this process does, in ``directory`` if given, its output going to ``log``."""
    command = [*children.command("bf16kit.system.exit_with_parent", str(os.getpid())), *command]
    environment = children.environment()
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, cwd=directory
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one checkpoint: ``detail`` is its drift or the error, ``code`` what converting it alone returns."""

    item: Item
    status: str
    code: int
    detail: str = ""
    version: int | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        version = "" if self.version is None else f" version {self.version}"
        return f"{self.item.model}{version}: {self.status}{f': {self.detail}' if self.detail else ''}"


def convert_all(
    items: Sequence[Item], repository: Path, run: Run, *, jobs: int, force: bool, notify: Callable[[str], None]
) -> list[Outcome]:
    """Convert ``items``, ``jobs`` at a time, reporting each result as it comes. Ctrl-C keeps what is done."""
    (repository / RECORDS).mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(convert, item, repository, run, stop, force=force) for item in items]
        try:
            for count, future in enumerate(as_completed(futures), 1):
                notify(f"[{count}/{len(items)}] {future.result()}")
        except BaseException as error:
            stop.set()
            pool.shutdown(cancel_futures=True)
            if not isinstance(error, KeyboardInterrupt):
                raise
    done = zip(items, futures, strict=True)
    return [Outcome(item, "interrupted", INTERRUPTED) if each.cancelled() else each.result() for item, each in done]


def convert(item: Item, repository: Path, run: Run, stop: threading.Event, *, force: bool = False) -> Outcome:
    """Convert ``item`` into the next version of its model in ``repository``, unless the newest was made of the same.

    With ``force``, the newest version is replaced, whatever it was made from. A record beside the models holds a digest
    of the files and options that a version was made from, and of that version's manifest.
    """
    if item.problem:
        return Outcome(item, "failed", 2, item.problem)
    try:
        digest = item.digest()
    except SourceError as error:
        return Outcome(item, "failed", 2, str(error).removeprefix(f"{item.source}: "))
    record, log = (repository / RECORDS / f"{item.model}.{ending}" for ending in ("sha256", "log"))
    versions = [int(path.name) for path in (repository / item.model).glob("[1-9]*") if path.name.isdecimal()]
    newest, began = max(versions, default=0), time.monotonic()
    target = repository / item.model / str(newest)
    if not force and record.is_file() and record.read_bytes() == _record(digest, target):
        return Outcome(item, "done before", 0, _drift(target), newest)
    version = max(newest, 1) if force else newest + 1
    target = target.with_name(str(version))
    command = children.command("converter.cli", "checkpoint", str(item.source), "--out", str(target), *item.arguments)
    code = run([*command, *(["--force"] if force else [])], log, stop)
    seconds = time.monotonic() - began
    if code == 0:
        record.write_bytes(_record(digest, target))
        return Outcome(item, "converted", 0, _drift(target), version, seconds)
    if code == INTERRUPTED or stop.is_set():  # a process that has just begun ends with another code
        return Outcome(item, "interrupted", INTERRUPTED, seconds=seconds)
    _, ours, message = log.read_text(errors="replace").rpartition(_ERROR)
    if ours and code > 0:
        return Outcome(item, "over budget" if code == 1 else "failed", code, message.splitlines()[0], seconds=seconds)
    cause = "killed by SIGKILL (out of memory?)" if code == -signal.SIGKILL else f"ended with exit code {code}"
    return Outcome(item, "failed", FAILED, f"{cause}; see {log}", seconds=seconds)  # 1 is Python's code of a crash


def _record(digest: str, version: Path) -> bytes:
    """Return what a record holds; a manifest, which has the digests of the other files, stands for its version."""
    manifest = version / MANIFEST
    return hashlib.sha256(digest.encode() + (manifest.read_bytes() if manifest.is_file() else b"")).hexdigest().encode()


def _drift(version: Path) -> str:
    """Return the largest share of the budget that each profile uses, in a few words."""
    manifest = Artifact.open(version, verify=False).manifest
    rows = [row for row in drift_rows(manifest) if row.used is not None]
    tightest = [tightest_of(row for row in rows if row.profile == name) for name in sorted(manifest.drift)]
    return ", ".join(f"{row.profile} {format_budget_ratio(row.used or 0)}" for row in tightest if row is not None)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return a table of all results."""
    columns = ("model", "version", "source", "result", "drift ÷ budget, or error", "seconds")
    rows = [(o.item.model, o.version, o.item.source.name, o.status, o.detail or None, o.seconds) for o in outcomes]
    return table(f"{sum(o.code == 0 for o in outcomes)} of {len(outcomes)} checkpoints converted", columns, rows)
