"""The process that reads a checkpoint's arrays with tensorstore; :mod:`converter.read.orbax.arrays` runs it.

tensorstore is C++ code that parses untrusted data: B-trees, compressed chunks. Here it may allocate no more memory than
the arrays justify, and its parent reports a crash as one sentence. It is given one directory, opens no other store, and
writes into one file.

It exchanges lines of JSON with its parent. They are: what to open; the arrays found; which array to write where; the
bytes written; the end.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

from converter.read.orbax.zarrays import READERS, ArrayMetadata, RejectedArray

_BASE = 1 << 30  # bytes besides the arrays: code, thread stacks, nodes of the B-tree
_AT_ONCE = min(8, len(os.sched_getaffinity(0)))  # chunks that are decoded at a time
_MOST_ABSENT = 1 << 20  # chunks of an array whose missing chunks mean zeros
_LONGEST_NAMES = 64 << 20  # characters; the B-tree stores common prefixes once, but here each name has its own
_NODES = 64 << 20  # bytes of B-tree nodes that are cached


def main() -> None:
    """Serve one parent."""
    request = _receive()
    _limit_memory(_BASE)
    store = _Store(Path(request["root"]), ocdbt=request["ocdbt"], missing_is_zero=request["missing_is_zero"])
    found = store.arrays(request["names"])
    _send({"arrays": {name: [array.dtype, list(array.shape), array.nbytes] for name, array in found.items()}})
    write_request = _receive()
    at_once = (
        min(_AT_ONCE, array.count) * array.chunk_bytes for array in map(found.__getitem__, write_request["offsets"])
    )
    _limit_memory(_BASE + 3 * max(at_once, default=0))
    for name, offset in write_request["offsets"].items():
        store.write(name, found[name], Path(write_request["file"]), offset)
        _send({"read": found[name].nbytes})
    _send({"done": True})


class _Store:
    """The key-value store; keys are paths, of files or within the B-tree."""

    def __init__(self, root: Path, *, ocdbt: bool, missing_is_zero: bool) -> None:
        import tensorstore

        self._library: Any = tensorstore
        self._missing_is_zero = missing_is_zero
        self._context = tensorstore.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "cache_pool#nodes": {"total_bytes_limit": _NODES},
                "data_copy_concurrency": {"limit": _AT_ONCE},
                "file_io_concurrency": {"limit": _AT_ONCE},
            }
        )
        files = {"driver": "file", "path": f"{root}/"}
        self._spec: dict[str, Any] = (
            {"driver": "ocdbt", "base": files, "cache_pool": "cache_pool#nodes"} if ocdbt else files
        )
        self._keys: Any = tensorstore.KvStore.open(self._spec, context=self._context).result()

    def arrays(self, names: list[str] | None) -> dict[str, ArrayMetadata]:
        """Return every array by its path, or those of ``names``, which must exist with all their chunks."""
        counts: dict[str, int] = {}
        kinds: dict[str, str] = {}
        keys = [key.decode("utf-8", "surrogateescape") for key in self._keys.list().result()]
        for key in keys:
            name, _, last = key.rpartition("/")
            if last in READERS and name:
                kinds[name] = last
        for key in keys:
            owner = _owner(key, kinds)
            if owner is not None:
                counts[owner] = counts.get(owner, 0) + 1
        array_names = sorted(kinds) if names is None else names
        if sum(map(len, array_names)) > _LONGEST_NAMES:
            raise RejectedArray(f"the names of its arrays have more than {_LONGEST_NAMES} characters together")
        return {name: self._array_metadata(name, kinds, counts.get(name, 0)) for name in array_names}

    def _array_metadata(self, name: str, kinds: dict[str, str], chunks: int) -> ArrayMetadata:
        if name not in kinds:
            raise RejectedArray(
                f"array {name!r} is in the checkpoint's list, but not in its files; the copy is incomplete"
            )
        text = self._keys.read(f"{name}/{kinds[name]}").result().value
        try:
            array = READERS[kinds[name]](text)
        except RejectedArray as refused:
            raise RejectedArray(f"array {name!r} {refused}") from None
        if array.count > max(chunks, _MOST_ABSENT):
            raise RejectedArray(f"array {name!r} has {chunks} of its {array.count} chunks; that is no checkpoint")
        if chunks < array.count and not self._missing_is_zero:
            raise RejectedArray(f"array {name!r} has {chunks} of its {array.count} chunks; the copy is incomplete")
        return array

    def write(self, name: str, array: ArrayMetadata, file: Path, offset: int) -> None:
        """Write the values of an array to ``file``, starting at ``offset``, little-endian, in C order."""
        import numpy as np

        path = f"{self._spec['path']}{name}/" if "path" in self._spec else f"{name}/"
        opened = self._library.open(
            {
                "driver": array.driver,
                "kvstore": {**self._spec, "path": path},
                "fill_missing_data_reads": self._missing_is_zero,
                "recheck_cached_data": False,
            },
            open=True,
            read=True,
            context=self._context,
        ).result()
        if opened.dtype.name != array.dtype or tuple(opened.shape) != array.shape:
            raise RejectedArray(f"array {name!r} is read as {opened.dtype.name}{list(opened.shape)}")
        if not array.nbytes:
            return
        mapped = np.memmap(file, np.uint8, mode="r+", offset=offset, shape=(array.nbytes,))
        values = mapped.view(np.ndarray).view(opened.dtype.numpy_dtype).reshape(array.shape)
        try:
            self._library.array(values).write(opened).result()
        except ValueError as error:
            raise RejectedArray(f"array {name!r} cannot be read: {_plain(error)}") from None


def _owner(key: str, kinds: dict[str, str]) -> str | None:
    """Return the array that a key is a chunk of: ``w/0.1``, ``w/0/1`` or ``w/c/0/1``."""
    name, _, last = key.rpartition("/")
    if last.startswith(".z") or last == "zarr.json":
        return None
    while name:
        if name in kinds:
            return name
        name = name.rpartition("/")[0]
    return None


def _plain(error: Exception) -> str:
    """Return tensorstore's message without its spec, source locations and hexadecimal digests."""
    text = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
    return re.sub(r"0x[0-9a-f]{6,}", "…", " ".join(text.split()))[:240]


def _limit_memory(additional: int) -> None:
    """Limit this process to ``additional`` bytes of data beyond what it has now."""
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = (int(used.split()[1]) << 10) + additional
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may be killed for this, and a core dump is of no use
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _receive() -> Any:
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)  # the parent has ended
    return json.loads(line)


def _send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except RejectedArray as refused:
        _send({"refused": str(refused)})
    except MemoryError:
        _send({"refused": "needs more memory than its arrays have"})
    except Exception as error:  # noqa: BLE001 - whatever tensorstore raises, the parent reports it
        _send({"refused": f"cannot be read: {_plain(error)}"})
