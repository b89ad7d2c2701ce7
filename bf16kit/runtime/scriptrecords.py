"""Whether the records of a TorchScript file hold as many bytes as its pickles take from them.

torch reads a record and gives a tensor over it as many elements as the pickle says, and looks at no bytes in between:
one that says more reads memory of somebody else, or ends the process.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, Self

from bf16kit.errors import RuntimeFailure

_LARGEST = 256 << 20  # bytes of a pickle, which may be compressed
_READ = ("/data.pkl", "/constants.pkl")  # traced_inputs.pkl, whose records are empty, is not
_ITEM_BYTES = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1,
    "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip


def check(path: Path) -> None:
    """:class:`RuntimeFailure` for a file whose records are shorter than what its pickles take from them, or that
    cannot be read so far."""
    try:
        with zipfile.ZipFile(path) as archive:
            sizes: dict[str, int] = {}
            for info in archive.infolist():  # of two of one name, torch takes either
                sizes[info.filename] = min(info.file_size, sizes.get(info.filename, info.file_size))
            for name in sizes:
                if name.endswith("/model.json"):
                    raise RuntimeFailure("it is of a format that torch left in 2019; save it again")
                if name.endswith(_READ) and sizes[name] > _LARGEST:
                    raise RuntimeFailure(f"{name} has {sizes[name]} bytes, of which a module has a few thousand")
                if name.endswith(_READ):  # it takes from data/0, data/1 …, constants/0 …
                    _check_pickle(name, archive.read(name), sizes)
    except RuntimeFailure as error:
        raise RuntimeFailure(f"TorchScript cannot load {path.name}: {error}") from None
    except Exception as error:  # damaged archives and pickles raise nearly anything
        raise RuntimeFailure(f"TorchScript cannot load {path.name}: {str(error) or type(error).__name__}") from error


def _check_pickle(name: str, data: bytes, sizes: dict[str, int]) -> None:
    for kind, key, count in _Storages(data).found:
        record = f"{name.removesuffix('.pkl')}/{key}"
        needed = count * _ITEM_BYTES.get(kind.removesuffix("Storage"), 1)
        if record not in sizes:
            raise RuntimeFailure(f"{name} takes a tensor from record {record!r}, which is not there")
        if not 0 <= needed <= sizes[record]:
            raise RuntimeFailure(f"{name} takes {needed} bytes from record {record!r}, which has {sizes[record]}")


class _Storages(pickle._Unpickler):
    """The storages that a pickle names: type, record and elements. Nothing it says is imported, called or made.

    The unpickler in Python: the one in C takes as much memory as a pickle that lies asks for.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.found: list[tuple[str, str, int]] = []
        self.load()

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Anything,), {})

    def persistent_load(self, pid: Any) -> _Anything:
        word, kind, key, _, count = pid
        if word != "storage" or not isinstance(count, int):
            raise pickle.UnpicklingError("a reference to something that is no storage")
        self.found.append((getattr(kind, "__name__", ""), str(key), count))
        return _Anything()


class _Anything:
    """Takes whatever a pickle does to an object, and keeps nothing of it."""

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None: ...
    def __call__(self, *_: Any) -> _Anything:
        return self

    def __setstate__(self, state: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, value: Any) -> None: ...
    def extend(self, values: Any) -> None: ...
    def add(self, value: Any) -> None: ...
