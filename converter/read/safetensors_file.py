"""Reads the tensors of safetensors files, single or sharded, as views of the mapped file."""

from __future__ import annotations

import json
from pathlib import Path

from bf16kit.converter.source import Array
from bf16kit.converter.write.export import read
from bf16kit.messages.errors import SourceError

_LONGEST_NAME = 200  # characters of a shard's file name


def read_file(path: Path) -> dict[str, Array]:
    """Return every tensor of one file by name, in the file's order; nothing is read until it is used."""
    return read(path, SourceError)


def read_sharded(index: Path) -> tuple[dict[str, Array], list[Path]]:
    """Return every tensor of the shards that ``index`` names, and the files read: the index first, then the shards."""
    assigned = _weight_map(index)
    found = {shard: read_file(_shard_path(index, shard)) for shard in sorted(set(assigned.values()))}
    for name, shard in assigned.items():
        if name not in found[shard]:
            raise SourceError(f"{index}: says that {name!r} is in {shard}, where it is not")
    tensors = {name: found[shard][name] for name, shard in assigned.items()}
    return tensors, [index, *(index.parent / shard for shard in found)]


def shards(index: Path) -> tuple[tuple[str, ...], ...]:
    """Return the names of the tensors in each shard of an ``index`` that :func:`read_sharded` has read."""
    assigned = _weight_map(index)
    return tuple(tuple(name for name in assigned if assigned[name] == file) for file in sorted(set(assigned.values())))


def _weight_map(index: Path) -> dict[str, str]:
    """Return the shard of each tensor."""
    try:
        return {str(name): str(shard) for name, shard in json.loads(index.read_bytes())["weight_map"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise SourceError(f"{index}: is not the index of a sharded checkpoint") from None


def _shard_path(index: Path, shard: str) -> Path:
    if Path(shard).name != shard or len(shard) > _LONGEST_NAME or "\0" in shard:
        raise SourceError(f"{index}: shard {shard[:_LONGEST_NAME]!r} is not a plain file name")
    path = index.parent / shard
    if not path.is_file():
        raise SourceError(f"{index}: shard {shard} is missing")
    return path
