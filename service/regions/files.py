"""A file of shared memory, which the client can change, shrink or remove at any moment.

This program never reads or writes the client's memory with its own instructions: beyond the end of a shrunk file they
cause SIGBUS, which ends the process. The kernel copies in both directions, and reports how many bytes it copied.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import weakref
from pathlib import Path

from bf16kit.messages.errors import ConfigError, InvalidRequest
from bf16kit.numerics.tensors import Array

# Follow no links, do not block on a pipe, and do not pass the descriptor on to child processes.
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class SharedFile:
    """``byte_size`` bytes from ``offset`` on of the file open as ``descriptor``.

    It owns the descriptor, and closes it when the last reference is gone. Raises InvalidRequest if the bytes cannot be
    mapped or, unless the file ``may_be_short``, if it ends before them.
    """

    def __init__(self, descriptor: int, offset: int, byte_size: int, *, may_be_short: bool = False) -> None:
        weakref.finalize(self, os.close, descriptor)
        size = os.fstat(descriptor).st_size
        if not may_be_short and offset + byte_size > size:
            raise InvalidRequest(
                f"{byte_size} bytes from offset {offset} end beyond the {size} bytes of the shared memory"
            )
        self.descriptor = descriptor
        self._offset = offset
        before = offset % mmap.ALLOCATIONGRANULARITY
        mapped = _map(descriptor, offset - before, before + byte_size)
        weakref.finalize(self, _libc.munmap, mapped, before + byte_size).atexit = False  # a thread may still copy then
        self._address = mapped + before

    def is_same_file(self, descriptor: int) -> bool:
        """Return whether ``descriptor`` has the same file open."""
        return os.path.sameopenfile(self.descriptor, descriptor)

    def read(self, at: int, nbytes: int) -> bytes:
        """Return a copy of ``nbytes`` from ``at`` on; fewer if the file ends before."""
        return os.pread(self.descriptor, nbytes, self._offset + at)

    def write(self, at: int, data: Array) -> int:
        """Copy contiguous ``data`` to ``at``; return how many bytes there was room for. The file never grows."""
        # The rest of the file's last page is mapped memory too: a copy into it would succeed, and be lost.
        if os.fstat(self.descriptor).st_size < self._offset + at + data.nbytes:
            return 0
        return _copy(data.ctypes.data, self._address + at, data.nbytes)


def open_regular_file(path: Path) -> int:
    """Open a regular file that has one name; another hard link could be a name that is not allowed. Raises OSError."""
    descriptor = os.open(path, _FLAGS)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EPERM, "not a regular file with one name")
    return descriptor


def check_system() -> None:
    """Raise :class:`ConfigError` if this process may not copy as :meth:`SharedFile.write` does."""
    source, target = ctypes.c_char(b"1"), ctypes.c_char(b"0")
    if _copy(ctypes.addressof(source), ctypes.addressof(target), 1) != 1:
        raise ConfigError(
            "shared_memory needs the system call process_vm_writev, which is not allowed here: allow it in the"
            " container's seccomp profile, or leave shared_memory out"
        )


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_writev.restype = ctypes.c_ssize_t
_libc.process_vm_writev.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_Span),
    ctypes.c_ulong,
    ctypes.POINTER(_Span),
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def _map(descriptor: int, offset: int, nbytes: int) -> int:
    """Return the address of ``nbytes`` of the file, which may be shorter now: Python's own mmap would refuse that."""
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, offset)
    if address in (None, _MAP_FAILED):
        raise InvalidRequest(f"{nbytes} bytes from offset {offset} of the shared memory cannot be mapped")
    return int(address)


def _copy(source: int, target: int, nbytes: int) -> int:
    """Have the kernel copy within this process; return the number of bytes copied before it met missing memory."""
    done = _libc.process_vm_writev(os.getpid(), _Span(source, nbytes), 1, _Span(target, nbytes), 1, 0)
    return max(int(done), 0)
