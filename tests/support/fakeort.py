"""A fake ONNX Runtime in Python: the table of functions through which the kernel's library is registered.

It numbers errors, tensors and domains and keeps them until they are released, so a test can check for leaks. A test can
replace any of its functions with one that fails or returns wrong values.
"""

import ctypes
from collections.abc import Callable
from typing import Any

P, C, N = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_ENTRIES = 300
_FAIL = 1


class _Base(ctypes.Structure):
    _fields_ = [("get_api", P), ("get_version", P)]


class FakeRuntime:
    """``version`` is the version that it reports. ``replaced`` has functions of its table by position, None for a null
    pointer."""

    def __init__(self, version: str = "1.31.1", replaced: dict[int, Callable[..., Any] | None] | None = None) -> None:
        self.errors: dict[int, tuple[int, str]] = {}
        self.domains: dict[int, list[int]] = {}
        self.tensors: dict[int, tuple[int, tuple[int, ...], int]] = {}
        self.sessions: list[int] = []  # the domain of each session
        self.names: dict[int, bytes] = {}
        self.fail_at: int | None = None  # the index of the operator that cannot be added
        self.listed = b""  # the entry of a session's configuration that lists its operators
        self._live = 0
        self._texts: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._kept: list[Any] = []
        self._table = (P * _ENTRIES)(*[self._function(P, lambda *_: self.error("not made"), P)] * _ENTRIES)
        for index, (result, arguments, function) in self._entries().items():
            chosen = (replaced or {}).get(index, function)
            self._table[index] = self._function(result, chosen, *arguments) if chosen else None
        for index, replacement in (replaced or {}).items():
            if index not in self._entries():
                if replacement is not None:
                    raise ValueError(f"position {index}: add its types to _entries, or replace it with None")
                self._table[index] = None
        self._version = ctypes.create_string_buffer(version.encode())
        get_api = self._function(P, lambda asked: ctypes.addressof(self._table) if asked in (1, 21) else None, C)
        self._base = _Base(get_api, self._function(P, lambda: ctypes.addressof(self._version)))

    def register(self, library: ctypes.CDLL) -> str:
        """Call the library's entry point, and return the error's text; "" if there is no error."""
        entry = library.RegisterCustomOps
        entry.restype, entry.argtypes = P, (P, P)
        status = entry(1, ctypes.addressof(self._base))
        return self.errors.pop(status)[1] if status else ""

    def error(self, text: str, code: int = _FAIL) -> int:
        self.errors[number := self._number()] = code, text
        return number

    def _number(self) -> int:
        self._live += 1
        return self._live * 16

    def _function(self, result: Any, function: Callable[..., Any], *arguments: Any) -> int | None:
        pointer = ctypes.CFUNCTYPE(result, *arguments)(function)
        self._kept.append(pointer)
        return ctypes.cast(pointer, P).value

    def _entries(self) -> dict[int, tuple[Any, tuple[Any, ...], Callable[..., Any]]]:
        """Return result type, argument types and function by position in the table, as in kernels/ort/abi.h."""
        return {
            0: (P, (C, ctypes.c_char_p), lambda code, text: self.error(text.decode(), code)),
            1: (C, (P,), lambda status: self.errors[status][0]),
            2: (P, (P,), self._message),
            26: (P, (ctypes.c_char_p, ctypes.POINTER(P)), self._create_domain),
            27: (P, (P, P), self._add_operator),
            28: (P, (P, P), lambda _, domain: self.sessions.append(domain)),
            49: (P, (P, P, N, ctypes.POINTER(ctypes.c_int64), N, C, ctypes.POINTER(P)), self._create_tensor),
            51: (P, (P, ctypes.POINTER(P)), lambda tensor, out: _give(out, self.tensors[tensor][0])),
            60: (P, (P, ctypes.POINTER(C)), lambda info, out: _give(out, self.tensors[info - 1][2])),
            61: (P, (P, ctypes.POINTER(N)), lambda info, out: _give(out, len(self.tensors[info - 1][1]))),
            62: (P, (P, ctypes.POINTER(ctypes.c_int64), N), self._dimensions),
            65: (P, (P, ctypes.POINTER(P)), lambda tensor, out: _give(out, tensor + 1)),
            69: (P, (C, C, ctypes.POINTER(P)), lambda *arguments: _give(arguments[2], 7)),
            93: (None, (P,), lambda status: self._drop(self.errors, status)),
            94: (None, (P,), lambda _: None),
            96: (None, (P,), lambda tensor: self._drop(self.tensors, tensor)),
            99: (None, (P,), lambda _: None),
            101: (None, (P,), lambda domain: self._drop(self.domains, domain)),
            237: (
                P,
                (P, ctypes.c_char_p, ctypes.POINTER(C)),
                lambda *arguments: _give(arguments[2], self.listed != b""),
            ),
            238: (P, (P, ctypes.c_char_p, P, ctypes.POINTER(N)), self._read_list),
        }

    def _drop(self, kept: dict[int, Any], number: int) -> None:
        del kept[number]

    def _message(self, status: int) -> int:
        self._texts[status] = ctypes.create_string_buffer(self.errors[status][1].encode())
        return ctypes.addressof(self._texts[status])

    def _create_domain(self, name: bytes, out: Any) -> None:
        self.domains[number := self._number()] = []
        self.names[number] = name
        out[0] = number

    def _add_operator(self, domain: int, operator: int) -> int | None:
        if len(self.domains[domain]) == self.fail_at:
            return self.error("no room for another operator")
        self.domains[domain].append(operator)
        return None

    def _read_list(self, _: int, key: bytes, out: int, size: Any) -> int | None:
        if len(self.listed) >= size[0]:
            return self.error(f"the entry {key.decode()} is too long")
        ctypes.memmove(out, self.listed + b"\0", len(self.listed) + 1)
        return None

    def _create_tensor(self, _: int, data: int, size: int, dims: Any, count: int, kind: int, out: Any) -> None:
        self.tensors[number := self._number()] = data, tuple(dims[:count]), kind
        out[0] = number

    def _dimensions(self, info: int, out: Any, count: int) -> None:
        for i, size in enumerate(self.tensors[info - 1][1][:count]):
            out[i] = size


def _give(out: Any, value: int) -> None:
    out[0] = value
