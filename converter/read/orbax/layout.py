"""The directory layout of Orbax checkpoints: steps, items, and their files, none of which may link outside."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from bf16kit.messages.errors import NoCheckpoint, SourceError, UsageError
from bf16kit.messages.text import listed
from bf16kit.messages.wording import quoted

METADATA = "_METADATA"
MANIFEST = "manifest.ocdbt"
ARRAYS = (".zarray", "zarr.json")  # metadata files beside an array's chunks, in zarr 2 and 3
_CHECKPOINT = "_CHECKPOINT_METADATA"  # in a step, or in a directory that the v1 API wrote
_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a directory that is being written, or whose writer died
_COMMITTED = "commit_success.txt"  # on storage that cannot rename a directory atomically
_STEP = re.compile(r"(|.*[^0-9])([0-9]{1,18})")
_MOST_FILES = 1_000_000
_MOST_NAMED = 5


def is_checkpoint(path: Path) -> bool:
    """Return whether Orbax wrote the directory ``path``: an item, a step with items, or a directory of steps."""
    if _is_item(path) or (path / _CHECKPOINT).exists() or _steps(path):
        return True
    return path.name.isdecimal() and _holds_items(path)  # older versions write a step without metadata of its own


def trees(path: Path) -> list[Path]:
    """Return the directories in ``path`` that make it a checkpoint: steps, items or arrays."""
    return [
        child for child in _directories(path) if _holds_items(child) or any((child / name).is_file() for name in ARRAYS)
    ]


def locate(path: Path, step: int | None, item: str | None) -> Path:
    """Return the directory in ``path`` with one tree of arrays: of ``step`` (default: the newest) and ``item``.

    Raises :class:`UsageError` naming what exists when ``step`` or ``item`` does not, or when there are several items
    and none was chosen. Raises :class:`SourceError` when there are no arrays.
    """
    if _is_item(path):
        _reject_options(path, step, item)
        return path
    found = _step_directory(path, step)
    if _is_item(found):
        if item is not None:
            raise UsageError(f"--item {item}: {found} is a single item; leave out --item")
        return found
    items = {child.name: child for child in _directories(found) if _is_item(child)}
    if item is not None and item not in items:
        raise UsageError(f"--item {item}: {found} has {_listed(items) or 'no item with arrays'}")
    if not items:
        raise SourceError(f"{found}: holds no arrays that Orbax wrote ({METADATA} and {MANIFEST} are missing)")
    if item is None and len(items) > 1:
        raise UsageError(f"{found}: holds several items, {_listed(items)}; choose one with --item NAME")
    return items[item] if item is not None else next(iter(items.values()))


def _reject_options(path: Path, step: int | None, item: str | None) -> None:
    given = f"--step {step}" if step is not None else f"--item {item}" if item is not None else None
    if given is not None:
        raise UsageError(f"{given}: {path} is a single item; leave out the option, or name the directory above")


def _step_directory(path: Path, step: int | None) -> Path:
    steps = _steps(path)
    if not steps:
        refuse_several(path)
    if step is None:
        if steps and not any(_is_item(child) for child in _directories(path)):
            return steps[max(steps)]
        return path
    if step not in steps:
        available = ", ".join(map(str, sorted(steps)[-10:])) or "no step"
        raise UsageError(f"--step {step}: {path} has {available}")
    return steps[step]


def _steps(path: Path) -> dict[int, Path]:
    """Return finished steps by number: ``<step>`` or ``<prefix>_<step>``, with or without leading zeros.

    All steps have one prefix; directories with several prefixes are several models, and give no steps. Raises
    :class:`SourceError` when two directories have the same number.
    """
    numbered = _numbered(path)
    if len({prefix for prefix, _, _ in numbered}) > 1:
        return {}
    committed = [entry for entry in numbered if (entry[2] / _COMMITTED).exists()]
    found: dict[int, Path] = {}
    for _, number, child in committed or numbered:
        if number in found:
            raise SourceError(
                f"{path}: {quoted(found[number].name)} and {quoted(child.name)} are both step {number}; convert one of"
                " them by its own path"
            )
        found[number] = child
    return found


def refuse_several(path: Path) -> None:
    """Raise :class:`NoCheckpoint` if ``path`` holds checkpoints named like steps, but with several prefixes."""
    children: dict[str, str] = {}
    for prefix, _, child in _numbered(path):
        children.setdefault(prefix, child.name)
    if len(children) < 2:
        return
    names = [quoted(name) for name in sorted(children.values())]
    more = [f"{len(names) - _MOST_NAMED} others"] if len(names) > _MOST_NAMED else []
    raise NoCheckpoint(
        f"{path}: {listed([*names[:_MOST_NAMED], *more])} are checkpoints with different names, not steps of one"
        " model; convert one of them by its own path, or all with --out REPOSITORY"
    )


def _numbered(path: Path) -> list[tuple[str, int, Path]]:
    """Return directories that hold checkpoints and are named like steps, each with its prefix and number."""
    found = []
    for child in _directories(path):
        match = _STEP.fullmatch(child.name)
        if match and _UNFINISHED not in child.name and _holds_items(child):
            found.append((match[1], int(match[2]), child))
    return found


def _holds_items(path: Path) -> bool:
    return _is_item(path) or (path / _CHECKPOINT).is_file() or any(_is_item(child) for child in _directories(path))


def _is_item(path: Path) -> bool:
    """Return whether ``path`` directly contains a tree of arrays."""
    if (path / MANIFEST).is_file() or (path / METADATA).is_file():
        return True
    return any((child / name).is_file() for child in _directories(path) for name in ARRAYS)


def _directories(path: Path) -> Iterator[Path]:
    """Yield the directories in ``path``, sorted, without links."""
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None
    yield from (path / name for name in names)


def _listed(items: dict[str, Path]) -> str:
    return ", ".join(items)


def files_of(item: Path) -> dict[str, int]:
    """Return the size of every file below ``item``, by relative path.

    Raises :class:`SourceError` for a link, and for anything that is neither file nor directory: reading a checkpoint
    must not read anything else.
    """
    found: dict[str, int] = {}
    todo = [item]
    while todo:
        directory = todo.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(Path(entry.path))
                    elif entry.is_file(follow_symlinks=False):
                        found[str(Path(entry.path).relative_to(item))] = entry.stat(follow_symlinks=False).st_size
                    else:
                        what = "a link" if entry.is_symlink() else "neither file nor directory"
                        raise SourceError(f"{entry.path}: is {what}, which does not belong in a checkpoint")
        except OSError as error:
            raise SourceError(f"{directory}: cannot be read: {error.strerror or error}") from None
        if len(found) > _MOST_FILES:
            raise SourceError(f"{item}: holds more than {_MOST_FILES} files; that is no checkpoint")
    return dict(sorted(found.items()))
