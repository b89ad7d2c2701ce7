"""Checks a TorchScript file before torch loads it: its records' lengths, the depth of pickles and code, its words.

torch reads a record and builds a tensor with as many elements as the pickle says, without comparing the sizes. A pickle
that claims too many makes torch read foreign memory, or crash.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, Self

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime import scriptcode, scriptoperators, torchzip

_DEEPEST = 200  # nesting of modules and lists
_LARGEST = 16 << 20  # bytes of a pickle, which may be compressed
# Bytes of all code, unpacked. That of a large traced transformer is 2 MB; one search in 16 MiB stops all threads for up
# to 0.7 s.
LARGEST_CODE = 16 << 20
_PICKLES = ("/data.pkl", "/constants.pkl")  # traced_inputs.pkl, whose records are empty, is not
_ITEM_BYTES = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1,
    "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip


def check(path: Path) -> None:
    """Raise :class:`RuntimeFailure` for a record shorter than its tensors, and for code that does too much.

    Also raised for a file that cannot be read far enough to check.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = torchzip.records(archive)
            sizes = {info.filename.lower(): info.file_size for info in records}
            for info in records:
                name = info.filename.lower()  # torch ignores case here
                if name.endswith("/model.json"):
                    raise RuntimeFailure("torch abandoned its format in 2019; save it again with a newer torch")
                if name.endswith(_PICKLES) and info.file_size > _LARGEST:
                    raise RuntimeFailure(f"{name} has {info.file_size} bytes, but a module's has a few thousand")
                if name.endswith(_PICKLES):  # its tensors are in data/0, data/1 …, constants/0 …
                    _check_pickle(name, archive.read(info), sizes)
            _check_code(archive, [info for info in records if scriptcode.is_code(info.filename)])
    except RuntimeFailure as error:
        raise RuntimeFailure(f"TorchScript cannot load {path.name}: {error}") from None
    except Exception as error:  # damaged archives and pickles raise nearly anything
        raise RuntimeFailure(f"TorchScript cannot load {path.name}: {str(error) or type(error).__name__}") from error


def _check_code(archive: zipfile.ZipFile, records: list[zipfile.ZipInfo]) -> None:
    if (size := sum(info.file_size for info in records)) > LARGEST_CODE:
        raise RuntimeFailure(f"it has {size} bytes of code, expected at most {LARGEST_CODE}")
    code = {info.filename: archive.read(info).decode("utf-8") for info in records}
    scriptcode.check(code)
    scriptoperators.check_code(code)


def _check_pickle(name: str, data: bytes, sizes: dict[str, int]) -> None:
    read = _StorageUnpickler(data)
    if name.endswith("/data.pkl") and not isinstance(read.root, _AnyObject):
        raise RuntimeFailure(f"{name} holds a {type(read.root).__name__}, expected a module")
    _check_depth(name, read.root)
    for kind, key, count in read.found:
        record = f"{name.removesuffix('.pkl')}/{key}".lower()
        needed = count * _ITEM_BYTES.get(kind.removesuffix("Storage"), 1)
        if record not in sizes:
            raise RuntimeFailure(f"{name} takes a tensor from record {record!r}, which is not there")
        if not 0 <= needed <= sizes[record]:
            raise RuntimeFailure(f"{name} takes {needed} bytes from record {record!r}, which has {sizes[record]}")


def _check_depth(name: str, root: Any) -> None:
    """Limit the nesting: torch unpacks nested objects by recursion and would overflow its stack."""
    deepest: dict[int, int] = {}
    pending = [(root, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > _DEEPEST:
            raise RuntimeFailure(f"{name} nests values more than {_DEEPEST} deep")
        parts = value.parts if isinstance(value, _AnyObject) else value
        if isinstance(parts, dict):
            parts = [*parts.keys(), *parts.values()]
        if isinstance(parts, list | tuple | set | frozenset) and deepest.get(id(value), -1) < depth:
            deepest[id(value)] = depth
            pending += [(part, depth + 1) for part in parts]


class _StorageUnpickler(pickle._Unpickler):
    """The storages that a pickle names: type, record and elements. Nothing it names is imported, called or created.

    Uses the unpickler written in Python: the one in C allocates as much memory as a malicious pickle asks for.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.found: list[tuple[str, str, int]] = []
        self.root = self.load()

    def find_class(self, module: str, name: str) -> Any:
        scriptoperators.check_class(f"{module}.{name}")
        return type(name, (_AnyObject,), {})

    def persistent_load(self, pid: Any) -> _AnyObject:
        tag, kind, key, _, count = pid
        if tag != "storage" or not isinstance(count, int):
            raise pickle.UnpicklingError("a reference to something that is not a storage")
        self.found.append((getattr(kind, "__name__", ""), str(key), count))
        return _AnyObject()


class _AnyObject:
    """Accepts anything that a pickle does to an object, and only stores the arguments."""

    parts: list[Any]

    def __new__(cls, *given: Any) -> Self:
        instance = super().__new__(cls)
        instance.parts = list(given)
        return instance

    def __init__(self, *_: Any) -> None: ...
    def __call__(self, *given: Any) -> _AnyObject:
        self.parts += given
        return self

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts += (key, value)

    def append(self, value: Any) -> None:
        self.parts.append(value)

    def extend(self, values: Any) -> None:
        self.parts.append(values)

    def add(self, value: Any) -> None:
        self.parts.append(value)
