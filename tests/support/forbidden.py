"""A kernel that refuses a system call, as under a container's seccomp profile."""

import ctypes
import platform
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_NUMBERS = {"x86_64": {"renameat2": 316}, "aarch64": {"renameat2": 276}}
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF
_EPERM, _ALLOW = 0x00050001, 0x7FFF0000
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # of prctl()


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.c_void_p))


def without(call: str, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, or raise what it raises, on a thread for which ``call`` fails with EPERM."""

    def confined() -> T:
        number = _NUMBERS[platform.machine()][call]
        code = [(_LOAD, 0, 0, 0), (_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
        filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
        program, prctl = _Program(len(code), ctypes.addressof(filters)), ctypes.CDLL(None).prctl
        assert prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0) == 0
        return work()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(confined).result()
