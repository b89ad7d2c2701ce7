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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from bf16kit.artifact.manifest import MANIFEST
from bf16kit.converter.process import program
from bf16kit.converter.read.detect import Kind, recognise
from bf16kit.converter.read.safetensors_file import read_sharded
from bf16kit.converter.source import digest_files
from bf16kit.messages.errors import NoCheckpoint, SourceError, UsageError

RECORDS = ".bf16-convert"  # in the repository; servers ignore hidden names
FAILED, INTERRUPTED = 3, 130  # exit codes: a model that cannot be converted, or a process that died; after Ctrl-C
_ERROR = "bf16-convert: error: "
_SECONDS = 0.2  # between two looks at the event

# Runs a command line of this program, its output going to a file, and returns its exit code, soon after the event.
Run = Callable[[list[str], Path, threading.Event], int]


@dataclass(slots=True)
class Conversion:
    """One checkpoint to convert, with its files and those that its arguments name; afterwards, what came of it."""

    model: str
    source: Path
    arguments: list[str]
    files: list[Path]
    result: str = "interrupted"
    code: int = INTERRUPTED
    version: int | None = None

    def __str__(self) -> str:
        version = "" if self.version is None else f" version {self.version}"
        return f"{self.model}{version}: {self.result}"


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
    kind = None
    with contextlib.suppress(SourceError):
        kind = recognise(path)
    if kind is Kind.SHARDED and path.is_file():
        return read_sharded(path)[1]
    if kind is not Kind.ONNX or path.is_dir():
        return _files_in(path) if path.is_dir() else [path]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as graph:
        # A graph names the files of its external data; one file too many only converts once too often.
        return [path, *(one for one in _files_in(path.parent) if one != path and graph.find(one.name.encode()) >= 0)]


def _files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def run_here(command: list[str], log: Path, stop: threading.Event, directory: str | None = None) -> int:
    """Run ``command`` in a process that ends when this one does; ``stop`` is passed on as Ctrl-C."""
    command = [*program.command("bf16kit.system.exit_with_parent", str(os.getpid())), *command]
    environment, nothing = program.environment(), subprocess.DEVNULL
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=nothing, stdout=out, stderr=out, env=environment, cwd=directory)
    while process.poll() is None:
        if stop.wait(_SECONDS):
            process.send_signal(signal.SIGINT)
            break
    return process.wait()


def convert_all(
    items: Sequence[Conversion], repository: Path, run: Run, *, jobs: int, force: bool, notify: Callable[[str], None]
) -> None:
    """Convert ``items``, ``jobs`` at a time, reporting each result as it comes. Ctrl-C keeps what is done."""
    (repository / RECORDS).mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    with contextlib.suppress(KeyboardInterrupt), ThreadPoolExecutor(jobs) as pool:
        try:
            futures = [pool.submit(convert, item, repository, run, stop, force=force) for item in items]
            for count, future in enumerate(as_completed(futures), 1):
                notify(f"[{count}/{len(items)}] {future.result()}")
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def convert(item: Conversion, repository: Path, run: Run, stop: threading.Event, *, force: bool = False) -> Conversion:
    """Convert ``item`` into its next version, or with ``force`` the newest, unless that was made of the same."""
    record, log = (repository / RECORDS / f"{item.model}.{ending}" for ending in ("sha256", "log"))
    versions = [int(path.name) for path in (repository / item.model).glob("[1-9]*") if path.name.isdecimal()]
    newest = max(versions, default=0)
    target = repository / item.model / str(newest)
    try:
        files = digest_files(item.files, lambda _: None)
    except SourceError as unread:  # without a digest nobody could tell later whether it has changed
        item.code, item.result = 2, f"failed: {str(unread).removeprefix(f'{item.source}: ')}"
        return item
    made_from = hashlib.sha256(f"{json.dumps(item.arguments)} {files}".encode()).hexdigest()  # code only by name
    if not force and record.is_file() and record.read_bytes() == _record(made_from, target):
        item.result, item.code, item.version = "done before", 0, newest
        return item
    target = target.with_name(str(max(newest, 1) if force else newest + 1))
    command = ["checkpoint", str(item.source), "--out", str(target), *item.arguments, *["--force"][:force]]
    code = run(program.command("bf16kit.converter.cli", *command), log, stop)
    if code == 0:
        record.write_bytes(_record(made_from, target))
        item.result, item.code, item.version = "converted", 0, int(target.name)
    elif code != INTERRUPTED and not stop.is_set():  # a process that has just begun ends with another code
        _, ours, message = log.read_text(errors="replace").rpartition(_ERROR)
        if ours and code > 0:
            error = message.splitlines()[0].removeprefix(f"{item.source}: ")
            item.code, item.result = code, f"{'over budget' if code == 1 else 'failed'}: {error}"
        else:  # 1 is Python's code of a crash
            cause = "killed by SIGKILL (out of memory?)" if code == -signal.SIGKILL else f"ended with exit code {code}"
            item.code, item.result = FAILED, f"failed: {cause}; see {log}"
    return item


def _record(made_from: str, version: Path) -> bytes:
    """Return what a record holds; a manifest, which has the digests of the other files, stands for its version."""
    manifest = (version / MANIFEST).read_bytes() if (version / MANIFEST).is_file() else b""
    return hashlib.sha256(made_from.encode() + manifest).hexdigest().encode()
