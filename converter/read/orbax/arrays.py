"""Reads the leaves of an Orbax checkpoint, in a separate process (:mod:`converter.read.orbax.child`)."""

from __future__ import annotations

import importlib.util
import itertools
import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.messages.text import size
from bf16kit.messages.wording import brief, quoted
from converter.process import children
from converter.read.arrayfile import ArraySpec, array_file
from converter.read.orbax import layout
from converter.source import Array

_CHILD = "converter.read.orbax.child"
_MOST_METADATA = 64 << 20  # bytes; a model of 10,000 arrays has 4 MB
# Limit of claimed over stored bytes. Compressed files may claim far more than they hold: zstd makes zeros 10,000 times
# smaller, and some optimizers' states are mostly zeros. Weights are not.
_CLAIM, _ALLOWANCE = 64, 1 << 30
_NOT_ARRAYS = ("string", "None", "Dict", "List", "Tuple", "NamedTuple")

Advance = Callable[[int], None]
Selector = Callable[[str], bool]


def read_item(item: Path, is_wanted: Selector, directory: Path) -> tuple[dict[str, Array], tuple[str, ...], list[Path]]:
    """Return the arrays of ``item`` that ``is_wanted``, by keys joined with dots; the names of the others; its files.

    The arrays are in a temporary file in ``directory``. Raises :class:`SourceError` when ``item`` is damaged,
    incomplete or links to places outside it, and :class:`UsageError` when tensorstore is not installed.
    """
    if importlib.util.find_spec("tensorstore") is None:
        raise UsageError(f"{item}: an Orbax checkpoint is read with tensorstore: pip install 'bf16kit[orbax]'")
    item = item.resolve()
    files = layout.files_of(item)
    names, complete = _listed_arrays(item, files)
    with _child(item) as child:
        child.ask(root=str(item), ocdbt=layout.MANIFEST in files, missing_is_zero=not complete, names=names)
        specs = {name: ArraySpec(dtype, tuple(shape)) for name, (dtype, shape, _) in child.receive("arrays").items()}
        selected = {name: spec for name, spec in specs.items() if is_wanted(name)}
        _check_claimed_bytes(item, selected, sum(files.values()))
        with array_file(selected, directory, item) as destination:
            child.ask(file=str(destination.path), offsets=dict(destination.offsets))
            for _ in selected:
                child.receive("read")
            child.receive("done")
            return (
                dict(destination.arrays),
                tuple(sorted(specs.keys() - selected.keys())),
                [item / name for name in files],
            )


def _listed_arrays(item: Path, files: Mapping[str, int]) -> tuple[list[str] | None, bool]:
    """Return the arrays that ``_METADATA`` lists, None if there is no such file, and whether every chunk must exist.

    Newer versions of Orbax state in this file that they also write chunks of zeros. In older checkpoints a missing
    chunk means zeros.
    """
    if layout.METADATA not in files:
        return None, False
    path = item / layout.METADATA
    if files[layout.METADATA] > _MOST_METADATA:
        raise SourceError(f"{path}: has {files[layout.METADATA]} bytes; the limit is {_MOST_METADATA}")
    try:
        fields = json.loads(path.read_bytes())
        complete = bool(fields.get("store_array_data_equal_to_fill_value"))
        names = sorted(filter(None, map(_array_name, fields["tree_metadata"].values())))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SourceError(f"{path}: damaged: it does not list the checkpoint's arrays as Orbax does") from None
    twice = next((name for name, after in itertools.pairwise(names) if name == after), None)
    if twice is not None:
        raise SourceError(f"{path}: lists array {quoted(twice)} twice")
    return names, complete


def _array_name(leaf: Any) -> str | None:
    """Return a leaf's path in the store, its keys joined with dots; None if it is no array."""
    metadata = leaf["value_metadata"]
    if metadata.get("skip_deserialize") or metadata["value_type"] in _NOT_ARRAYS:
        return None
    return ".".join(str(key["key"]) for key in leaf["key_metadata"])


def _check_claimed_bytes(item: Path, specs: Mapping[str, ArraySpec], stored: int) -> None:
    claimed = sum(spec.nbytes for spec in specs.values())
    if claimed > _CLAIM * stored + _ALLOWANCE:
        raise SourceError(
            f"{item}: its arrays claim {size(claimed)}, but its files have {size(stored)}; weights do not"
            " compress so well"
        )


class _Child:
    """The reading process; both sides send lines of JSON."""

    def __init__(self, item: Path, process: subprocess.Popen[str]) -> None:
        self._item, self._process = item, process

    def ask(self, **request: Any) -> None:
        with _ignoring_broken_pipe():
            _pipe(self._process.stdin).write(json.dumps(request) + "\n")
            _pipe(self._process.stdin).flush()

    def receive(self, expected: str) -> Any:
        """Return the child's message under the key ``expected``; :class:`SourceError` for anything else."""
        line = _pipe(self._process.stdout).readline()
        try:
            message = json.loads(line)
        except ValueError:
            raise self._death_error() from None
        if "refused" in message:
            raise SourceError(f"{self._item}: {brief(message['refused'])}")
        if expected not in message:
            raise self._death_error()
        return message[expected]

    def _death_error(self) -> SourceError:
        code = self._process.wait()
        ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return SourceError(
            f"{self._item}: tensorstore ended with {ending} while it read this: the files are damaged, or need more"
            " memory than their arrays have"
        )


@contextmanager
def _child(item: Path) -> Iterator[_Child]:
    """Start the process, and kill it at the end of the block."""
    process = subprocess.Popen(
        children.command(_CHILD),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=children.environment(),
    )
    try:
        yield _Child(item, process)
    finally:
        process.kill()
        with process:  # closes the pipes and waits for the process
            pass


@contextmanager
def _ignoring_broken_pipe() -> Iterator[None]:
    """Ignore a broken pipe: that the process has ended shows when its answer is read."""
    try:
        yield
    except BrokenPipeError:
        return


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None  # noqa: S101 - the process was started with pipes
    return pipe
