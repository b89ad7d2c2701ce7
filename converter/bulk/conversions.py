"""Finds the checkpoints of a directory and converts them, several at a time, unless an earlier run has done it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
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
from bf16kit.messages.errors import NoCheckpoint, SourceError, UsageError
from bf16kit.messages.wording import table
from converter.process import program
from converter.read.detect import Kind, recognise
from converter.read.safetensors_file import read_sharded
from converter.source import digest_files

RECORDS = ".bf16-convert"  # in the repository; servers ignore hidden names
FAILED, INTERRUPTED = 3, 130  # exit codes: a model that cannot be converted, or a process that died; after Ctrl-C
_ERROR = "bf16-convert: error: "
_SECONDS = 0.2  # between two looks at the event

# Runs a command line of this program, its output going to a file, and returns its exit code, soon after the event.
Run = Callable[[list[str], Path, threading.Event], int]


@dataclass(slots=True)
class Conversion:
    """One checkpoint to convert, with its files and those that its arguments name; afterwards, what came of it.

    ``detail`` is its drift or the error, ``code`` what converting it alone returns.
    """

    model: str
    source: Path
    arguments: list[str]
    files: list[Path]
    status: str = "interrupted"
    code: int = INTERRUPTED
    detail: str = ""
    version: int | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        version = "" if self.version is None else f" version {self.version}"
        return f"{self.model}{version}: {self.status}{f': {self.detail}' if self.detail else ''}"


def checkpoints(directory: Path, repository: Path) -> tuple[dict[Path, list[Path]], list[str]]:
    """Return the checkpoints directly in ``directory`` with their files, and why each other file is not one.

    A ``repository`` inside it is ignored, and so are hidden names. Raises :class:`UsageError` if there is none.
    """
    found: dict[Path, list[Path]] = {}
    skipped: dict[Path, str] = {}
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or path.resolve() == repository.resolve():
            continue
        try:
            recognise(path)
            found[path] = files_of(path)
        except NoCheckpoint as error:
            skipped[path] = str(error).removeprefix(f"{path}: ")
        except SourceError:  # it is damaged, or of a format that is not converted: its conversion says so
            found[path] = []
    parts = {part for files in found.values() for part in files[1:]}
    reasons = [f"{path.name}: {reason}" for path, reason in skipped.items() if path not in parts]
    if not found:
        raise UsageError("\n  ".join([f"{directory}: holds no checkpoint", *reasons[:5]]))
    return {path: files for path, files in found.items() if path not in parts}, reasons


def files_of(path: Path) -> list[Path]:
    """Return every file of the checkpoint at ``path``, the main one first; or of the rules or samples there."""
    if path.is_dir():
        return _files_in(path)
    kind = None
    with contextlib.suppress(SourceError):
        kind = recognise(path)
    if kind is Kind.SHARDED:
        return read_sharded(path)[1]
    if kind is not Kind.ONNX:
        return [path]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as graph:
        # A graph names the files of its external data; one file too many only converts once too often.
        return [path, *(one for one in _files_in(path.parent) if one != path and graph.find(one.name.encode()) >= 0)]


def _files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


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
    command = [*program.command("bf16kit.system.exit_with_parent", str(os.getpid())), *command]
    environment = program.environment()
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, cwd=directory
        )


def convert_all(
    items: Sequence[Conversion], repository: Path, run: Run, *, jobs: int, force: bool, notify: Callable[[str], None]
) -> None:
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


def convert(item: Conversion, repository: Path, run: Run, stop: threading.Event, *, force: bool = False) -> Conversion:
    """Convert ``item`` into the next version of its model, unless the newest was made of the same; return it.

    With ``force``, the newest version is replaced, whatever it was made from. A record beside the models holds a digest
    of the files and options that a version was made from, and of that version's manifest.
    """
    record, log = (repository / RECORDS / f"{item.model}.{ending}" for ending in ("sha256", "log"))
    versions = [int(path.name) for path in (repository / item.model).glob("[1-9]*") if path.name.isdecimal()]
    newest, began = max(versions, default=0), time.monotonic()
    target = repository / item.model / str(newest)
    try:
        files = digest_files(item.files, lambda _: None)
    except SourceError as error:  # without a digest nobody could tell later whether it has changed
        item.status, item.code, item.detail = "failed", 2, str(error).removeprefix(f"{item.source}: ")
        return item
    made_from = f"{json.dumps(item.arguments)} {files}"  # code that an argument names is included by name only
    if not force and record.is_file() and record.read_bytes() == _record(made_from, target):
        item.status, item.code, item.detail, item.version = "done before", 0, _drift(target), newest
        return item
    version = max(newest, 1) if force else newest + 1
    target = target.with_name(str(version))
    command = program.command("converter.cli", "checkpoint", str(item.source), "--out", str(target), *item.arguments)
    code = run([*command, *(["--force"] if force else [])], log, stop)
    item.seconds = time.monotonic() - began
    if code == 0:
        record.write_bytes(_record(made_from, target))
        item.status, item.code, item.detail, item.version = "converted", 0, _drift(target), version
        return item
    if code == INTERRUPTED or stop.is_set():  # a process that has just begun ends with another code
        return item
    _, ours, message = log.read_text(errors="replace").rpartition(_ERROR)
    if ours and code > 0:
        item.status, item.code = "over budget" if code == 1 else "failed", code
        item.detail = message.splitlines()[0].removeprefix(f"{item.source}: ")
    else:  # 1 is Python's code of a crash
        cause = "killed by SIGKILL (out of memory?)" if code == -signal.SIGKILL else f"ended with exit code {code}"
        item.status, item.code, item.detail = "failed", FAILED, f"{cause}; see {log}"
    return item


def _record(made_from: str, version: Path) -> bytes:
    """Return what a record holds; a manifest, which has the digests of the other files, stands for its version."""
    manifest = version / MANIFEST
    digest = hashlib.sha256(made_from.encode()).hexdigest().encode()
    return hashlib.sha256(digest + (manifest.read_bytes() if manifest.is_file() else b"")).hexdigest().encode()


def _drift(version: Path) -> str:
    """Return the largest share of the budget that each profile uses, in a few words."""
    manifest = Artifact.open(version, verify=False).manifest
    tightest = [tightest_of(r for r in drift_rows(manifest) if r.profile == name) for name in sorted(manifest.drift)]
    return ", ".join(f"{row.profile} {format_budget_ratio(row.used or 0)}" for row in tightest if row is not None)


def summary(items: Sequence[Conversion]) -> str:
    """Return a table of all results."""
    columns = ("model", "version", "source", "result", "drift ÷ budget, or error", "seconds")
    rows = [(i.model, i.version, i.source.name, i.status, i.detail or None, i.seconds) for i in items]
    return table(f"{sum(i.code == 0 for i in items)} of {len(items)} checkpoints converted", columns, rows)
