"""Reads Orbax checkpoints: finds the directory of a step and an item, and reads its arrays with tensorstore.

Orbax is a directory layout around tensorstore, which it uses itself: zarr or zarr 3 arrays, each in a folder or all in
one B-tree (OCDBT), and a JSON file that lists them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bf16kit.messages.errors import NoCheckpoint, SourceError, UsageError
from bf16kit.messages.wording import brief, listed, quoted, size
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.runtime.memory.scratch import ScratchUnavailable, on_disk, scratch_file
from converter.source import Array

_METADATA = "_METADATA"
_MANIFEST = "manifest.ocdbt"
_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}  # tensorstore's driver, by the file beside an array's chunks
_CHECKPOINT = "_CHECKPOINT_METADATA"  # in a step, or in a directory that the v1 API wrote
_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a directory that is being written, or whose writer died
_COMMITTED = "commit_success.txt"  # on storage that cannot rename a directory atomically
_STEP = re.compile(r"(|.*[^0-9])([0-9]{1,18})")
_NOT_ARRAYS = ("string", "None", "Dict", "List", "Tuple", "NamedTuple")
# Limit of claimed over stored bytes: damaged metadata may claim any shape. zstd makes zeros 10,000 times smaller, and
# some optimizers' states are mostly zeros. Weights are not.
_CLAIM, _ALLOWANCE = 64, 1 << 30
_ALIGNMENT = 64  # bytes


def is_checkpoint(path: Path) -> bool:
    """Return whether Orbax wrote the directory ``path``: an item, a step with items, or a directory of steps."""
    if _is_item(path) or (path / _CHECKPOINT).exists() or len(_steps(path)) == 1:
        return True
    return path.name.isdecimal() and _holds_items(path)  # older versions write a step without metadata of its own


def locate(path: Path, step: int | None, item: str | None) -> Path:
    """Return the directory in ``path`` with one tree of arrays: of ``step`` (default: the newest) and ``item``.

    Raises :class:`UsageError` naming what exists when ``step`` or ``item`` does not, or when there are several items
    and none was chosen. Raises :class:`SourceError` when there are no arrays.
    """
    if _is_item(path):
        if step is not None or item is not None:
            given = f"--step {step}" if step is not None else f"--item {item}"
            raise UsageError(f"{given}: {path} is a single item; leave out the option, or name the directory above")
        return path
    refuse_several(path)
    steps = next(iter(_steps(path).values()), {})
    if step is not None and step not in steps:
        raise UsageError(f"--step {step}: {path} has {', '.join(map(str, sorted(steps)[-10:])) or 'no step'}")
    found = path
    if step is not None or (steps and not any(map(_is_item, _directories(path)))):
        found = steps[max(steps) if step is None else step]
    if _is_item(found):
        if item is not None:
            raise UsageError(f"--item {item}: {found} is a single item; leave out --item")
        return found
    items = {child.name: child for child in _directories(found) if _is_item(child)}
    if item is not None and item not in items:
        raise UsageError(f"--item {item}: {found} has {', '.join(items) or 'no item with arrays'}")
    if not items:
        raise SourceError(f"{found}: holds no arrays that Orbax wrote ({_METADATA} and {_MANIFEST} are missing)")
    if item is None and len(items) > 1:
        raise UsageError(f"{found}: holds several items, {', '.join(items)}; choose one with --item NAME")
    return items[item] if item is not None else next(iter(items.values()))


def refuse_several(path: Path) -> None:
    """Raise :class:`NoCheckpoint` if ``path`` holds checkpoints named like steps, but with several prefixes."""
    names = [quoted(next(iter(steps.values())).name) for _, steps in sorted(_steps(path).items())]
    if len(names) > 1:
        more = [f"{len(names) - 5} others"] if len(names) > 5 else []
        raise NoCheckpoint(
            f"{path}: {listed([*names[:5], *more])} are checkpoints with different names, not steps of one model;"
            " convert one of them by its own path, or all with --out REPOSITORY"
        )


def _steps(path: Path) -> dict[str, dict[int, Path]]:
    """Return finished steps by prefix and number: ``<step>`` or ``<prefix>_<step>``."""
    found: dict[str, dict[int, Path]] = {}
    numbered = [
        (match, child)
        for child in _directories(path)
        if (match := _STEP.fullmatch(child.name)) and _UNFINISHED not in child.name and _holds_items(child)
    ]
    committed = [(match, child) for match, child in numbered if (child / _COMMITTED).exists()]
    for match, child in committed or numbered:
        found.setdefault(match[1], {})[int(match[2])] = child
    return found


def _holds_items(path: Path) -> bool:
    return _is_item(path) or (path / _CHECKPOINT).is_file() or any(map(_is_item, _directories(path)))


def _is_item(path: Path) -> bool:
    """Return whether ``path`` directly contains a tree of arrays."""
    return any((path / name).is_file() for name in (_MANIFEST, _METADATA)) or any(map(_is_array, _directories(path)))


def _is_array(path: Path) -> bool:
    return any((path / name).is_file() for name in _DRIVERS)


def _directories(path: Path) -> Iterator[Path]:
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None
    yield from (path / name for name in names)


def read_item(
    item: Path, is_wanted: Callable[[str], bool], scratch: Path
) -> tuple[dict[str, Array], list[str], list[Path]]:
    """Return the arrays of ``item`` that ``is_wanted``, by keys joined with dots; the names of the others; its files.

    The arrays are in a temporary file in ``scratch``, whose pages the system can reclaim. Raises :class:`SourceError`
    when ``item`` is damaged or incomplete, and :class:`UsageError` when tensorstore is not installed.
    """
    try:
        import tensorstore
    except ImportError:
        raise UsageError(f"{item}: Orbax checkpoints are read with tensorstore: pip install 'bf16kit[jax]'") from None
    files = sorted((path for path in item.rglob("*") if path.is_file()), key=str)
    names, complete = _listed_arrays(item / _METADATA)
    where = f"{item}: "
    try:
        base = {"driver": "file", "path": f"{item.resolve()}/"}
        store = tensorstore.KvStore.open(
            {"driver": "ocdbt", "base": base} if (item / _MANIFEST).is_file() else base
        ).result()
        keys = (key.decode().rpartition("/") for key in store.list().result())
        drivers = {owner: _DRIVERS[last] for owner, _, last in keys if owner and last in _DRIVERS}
        opened: dict[str, Any] = {}
        for name in sorted(drivers) if names is None else names:
            where = f"{item}: array {quoted(name)} "
            if name not in drivers:
                raise SourceError(f"{where}is in the checkpoint's list, but not in its files; the copy is incomplete")
            if is_wanted(name):
                spec = {"driver": drivers[name], "fill_missing_data_reads": not complete}
                opened[name] = tensorstore.open(spec, kvstore=store / f"{name}/", open=True, read=True).result()
        _check(item, opened, sum(path.stat().st_size for path in files))
        arrays = _allocated(item, opened, scratch)
        for name, array in opened.items():
            where = f"{item}: array {quoted(name)} "
            tensorstore.array(arrays[name]).write(array).result()
    except SourceError:
        raise
    except Exception as error:  # whatever tensorstore raises for damaged or missing files
        reason = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
        raise SourceError(f"{where}cannot be read; damaged, or an incomplete copy: {brief(reason)}") from error
    return arrays, sorted((drivers if names is None else set(names)) - arrays.keys()), files


def _listed_arrays(path: Path) -> tuple[list[str] | None, bool]:
    """Return the arrays that ``_METADATA`` lists, None if there is no such file, and whether every chunk must exist.

    Newer versions of Orbax state in this file that they also write chunks of zeros. In older checkpoints a missing
    chunk means zeros.
    """
    if not path.is_file():
        return None, False
    try:
        fields = json.loads(path.read_bytes())
        names = {
            ".".join(str(key["key"]) for key in leaf["key_metadata"])
            for leaf in fields["tree_metadata"].values()
            if not leaf["value_metadata"].get("skip_deserialize")
            and leaf["value_metadata"]["value_type"] not in _NOT_ARRAYS
        }
        return sorted(names), bool(fields.get("store_array_data_equal_to_fill_value"))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SourceError(f"{path}: damaged: it does not list the checkpoint's arrays as Orbax does") from None


def _check(item: Path, opened: dict[str, Any], stored: int) -> None:
    """Check dtypes and sizes before memory is allocated."""
    claimed = chunk = 0
    for name, array in opened.items():
        if array.dtype.name not in BY_NAME or array.dtype.name == "string":
            known = ", ".join(name for name in BY_NAME if name != "string")
            raise SourceError(f"{item}: array {quoted(name)} has the unknown dtype {array.dtype.name}; known: {known}")
        claimed += math.prod(array.shape) * array.dtype.numpy_dtype.itemsize
        chunk = max(chunk, math.prod(array.chunk_layout.write_chunk.shape or ()) * array.dtype.numpy_dtype.itemsize)
    if claimed + chunk > _CLAIM * stored + _ALLOWANCE:
        raise SourceError(
            f"{item}: its arrays claim {size(claimed + chunk)}, but its files have {size(stored)}; weights do not"
            " compress so well: the metadata of an array is damaged"
        )


def _allocated(item: Path, opened: dict[str, Any], scratch: Path) -> dict[str, Array]:
    """Return an array of the shape and dtype of each of ``opened``, in a temporary file."""
    spans, end = {}, 0
    for name, array in opened.items():
        spans[name] = end, end + math.prod(array.shape) * array.dtype.numpy_dtype.itemsize
        end = spans[name][1] + -spans[name][1] % _ALIGNMENT
    try:
        with scratch_file(max(end, 1), on_disk(scratch), in_memory=True) as (_, data):
            return {
                name: data[start:stop].view(opened[name].dtype.numpy_dtype).reshape(opened[name].shape)
                for name, (start, stop) in spans.items()
            }
    except ScratchUnavailable as error:
        raise SourceError(f"{item}: its {size(end)} of arrays do not fit in the temporary directory: {error}") from None
