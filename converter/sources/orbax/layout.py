"""Where in a directory an Orbax checkpoint's arrays lie: steps, items, and the files, none of which may lead out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from bf16kit.errors import NoCheckpoint, SourceError, UsageError
from bf16kit.text import listed
from bf16kit.wording import quoted

METADATA = "_METADATA"
MANIFEST = "manifest.ocdbt"
ARRAYS = (".zarray", "zarr.json")  # what lies beside the chunks of an array, in zarr 2 and 3
_CHECKPOINT = "_CHECKPOINT_METADATA"  # of a step, or of a directory that the v1 API wrote
_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of what is being written, or was when its writer died
_COMMITTED = "commit_success.txt"  # on storage that cannot rename a directory at once
_STEP = re.compile(r"(|.*[^0-9])([0-9]{1,18})")
_MOST_FILES = 1_000_000
_MOST_NAMED = 5


def is_checkpoint(path: Path) -> bool:
    """Whether Orbax wrote the directory ``path``: an item, a step with items, or a directory of steps."""
    if _is_item(path) or (path / _CHECKPOINT).exists() or _steps(path):
        return True
    return path.name.isdecimal() and _holds_items(path)  # of a step that says nothing beside its items, as older ones


def trees(path: Path) -> list[Path]:
    """The directories in ``path`` because of which it is taken for a checkpoint: steps, items or arrays."""
    return [
        child for child in _directories(path) if _holds_items(child) or any((child / name).is_file() for name in ARRAYS)
    ]


def locate(path: Path, step: int | None, item: str | None) -> Path:
    """The directory in ``path`` that holds one tree of arrays: of step ``step``, by default the newest, item ``item``.

    Raises :class:`UsageError` naming what is there when ``step`` or ``item`` is not, or when there are several items
    and none was chosen.
    """
    if _is_item(path):
        _refuse(path, step, item)
        return path
    found = _of_step(path, step)
    if _is_item(found):
        if item is not None:
            raise UsageError(f"--item {item}: {found} is one item by itself; leave --item out")
        return found
    items = {child.name: child for child in _directories(found) if _is_item(child)}
    if item is not None and item not in items:
        raise UsageError(f"--item {item}: {found} has {_listed(items) or 'no item with arrays'}")
    if not items:
        raise SourceError(f"{found}: holds no arrays that Orbax wrote ({METADATA} and {MANIFEST} are missing)")
    if item is None and len(items) > 1:
        raise UsageError(f"{found}: holds several items, {_listed(items)}; say which with --item NAME")
    return items[item] if item is not None else next(iter(items.values()))


def _refuse(path: Path, step: int | None, item: str | None) -> None:
    given = f"--step {step}" if step is not None else f"--item {item}" if item is not None else None
    if given is not None:
        raise UsageError(f"{given}: {path} is one item by itself; leave it out, or name the directory above")


def _of_step(path: Path, step: int | None) -> Path:
    steps = _steps(path)
    if not steps:
        refuse_several(path)
    if step is None:
        if steps and not any(_is_item(child) for child in _directories(path)):
            return steps[max(steps)]
        return path
    if step not in steps:
        there = ", ".join(map(str, sorted(steps)[-10:])) or "no step"
        raise UsageError(f"--step {step}: {path} has {there}")
    return steps[step]


def _steps(path: Path) -> dict[int, Path]:
    """Finished steps by number: ``<step>`` or ``<prefix>_<step>``, with leading zeros or without.

    Steps have one prefix; directories of several are several models. Raises :class:`SourceError` where two directories
    are one step.
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
    """Raise :class:`NoCheckpoint` where ``path`` holds checkpoints called as steps are, and of several names."""
    children: dict[str, str] = {}
    for prefix, _, child in _numbered(path):
        children.setdefault(prefix, child.name)
    if len(children) < 2:
        return
    names = [quoted(name) for name in sorted(children.values())]
    more = [f"{len(names) - _MOST_NAMED} others"] if len(names) > _MOST_NAMED else []
    raise NoCheckpoint(
        f"{path}: {listed([*names[:_MOST_NAMED], *more])} are checkpoints of several names, not the steps of one model;"
        " convert one of them by its own path, or all with --out REPOSITORY"
    )


def _numbered(path: Path) -> list[tuple[str, int, Path]]:
    """Directories that hold checkpoints and are called as steps are: what is before the number, and the number."""
    found = []
    for child in _directories(path):
        match = _STEP.fullmatch(child.name)
        if match and _UNFINISHED not in child.name and _holds_items(child):
            found.append((match[1], int(match[2]), child))
    return found


def _holds_items(path: Path) -> bool:
    return _is_item(path) or (path / _CHECKPOINT).is_file() or any(_is_item(child) for child in _directories(path))


def _is_item(path: Path) -> bool:
    """Whether a tree of arrays lies in ``path`` itself."""
    if (path / MANIFEST).is_file() or (path / METADATA).is_file():
        return True
    return any((child / name).is_file() for child in _directories(path) for name in ARRAYS)


def _directories(path: Path) -> Iterator[Path]:
    """Directories in ``path``, in order; links are none."""
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None
    yield from (path / name for name in names)


def _listed(items: dict[str, Path]) -> str:
    return ", ".join(items)


def files_of(item: Path) -> dict[str, int]:
    """Bytes of every file below ``item``, by its path from there.

    Raises :class:`SourceError` for a link, and for what is neither file nor directory: a checkpoint that was given
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
                        raise SourceError(f"{entry.path}: is {what}, which a checkpoint has no business to hold")
        except OSError as error:
            raise SourceError(f"{directory}: cannot be read: {error.strerror or error}") from None
        if len(found) > _MOST_FILES:
            raise SourceError(f"{item}: holds more than {_MOST_FILES} files; that is no checkpoint")
    return dict(sorted(found.items()))
