"""Regions of shared memory that clients register: files in /dev/shm, which clients can change, shrink or remove.

This program never reads or writes the client's memory with its own instructions: beyond the end of a shrunk file they
cause SIGBUS, which ends the process. The kernel copies in both directions, and reports how many bytes it copied.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bf16kit.messages.errors import AlreadyExists, ConfigError, InvalidRequest, NotFound, Overloaded
from bf16kit.messages.wording import quoted
from bf16kit.numerics.tensors import Array
from bf16kit.service.operations import Region

DIRECTORY = Path("/dev/shm")  # noqa: S108 -- it is where POSIX shared memory lies
_LONGEST_NAME = 255  # characters
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


# --- the table --------------------------------------------------------------------------------------------------------


class _Registered(NamedTuple):
    region: Region
    file: SharedFile


class RegionSlice:
    """See :class:`bf16kit.service.operations.RegionSlice`. It keeps its file open, registered or not."""

    __slots__ = ("_at", "_byte_size", "_file", "_name")

    def __init__(self, name: str, file: SharedFile, at: int, byte_size: int) -> None:
        self._name = name
        self._file = file
        self._at = at
        self._byte_size = byte_size

    def read(self) -> bytes:
        data = self._file.read(self._at, self._byte_size)
        if len(data) < self._byte_size:
            raise self._shrunk()
        return data

    def write(self, data: Array) -> None:
        if data.nbytes > self._byte_size:
            raise InvalidRequest(
                f"{data.nbytes} bytes do not fit into the {self._byte_size} from offset {self._at} of shared memory"
                f" region {quoted(self._name)}; ask for more of them"
            )
        if data.nbytes and self._file.write(self._at, np.ascontiguousarray(data)) < data.nbytes:
            raise self._shrunk()

    def _shrunk(self) -> InvalidRequest:
        return InvalidRequest(
            f"shared memory region {quoted(self._name)} has been shrunk since it was registered, or its file system is"
            " full; register it again"
        )


class RegionTable:
    """See :class:`bf16kit.service.operations.Regions`.

    ``prefix`` begins every allowed file name. ``regions`` limits their number, ``nbytes`` all of them together: a copy
    of more than 2 GiB would be several calls.
    """

    def __init__(self, prefix: str, directory: Path = DIRECTORY, *, regions: int = 1024, nbytes: int = 1 << 30) -> None:
        self._prefix = prefix
        self._directory = directory
        self._most_regions = regions
        self._most_bytes = nbytes
        self._lock = threading.Lock()
        self._registered: dict[str, _Registered] = {}

    def register(self, region: Region) -> None:
        self._check_new(region.name)
        self._add(region, self._open(region))

    def adopt(self, region: Region, descriptor: int) -> None:
        """Register a region that another process has registered, with the file that it has open.

        ``descriptor`` stays the caller's. Its file may have been shrunk since. Does nothing if the same region is
        registered already.
        """
        known = self._registered.get(region.name)
        if known is not None and known.region == region and known.file.is_same_file(descriptor):
            return
        self._add(region, SharedFile(os.dup(descriptor), region.offset, region.byte_size, may_be_short=True))

    def descriptor(self, name: str) -> int:
        """Return the descriptor of this region's file; it is valid as long as the region is registered."""
        return self._find(name).file.descriptor

    def unregister(self, name: str) -> None:
        with self._lock:
            if name:
                self._registered.pop(name, None)  # as in Triton, an unknown region is no error
            else:
                self._registered.clear()

    def status(self, name: str) -> Sequence[Region]:
        if name:
            return [self._find(name).region]
        with self._lock:
            return [known.region for _, known in sorted(self._registered.items())]

    def lease(self, name: str, offset: int, byte_size: int) -> RegionSlice:
        region, file = self._find(name)
        if offset < 0 or byte_size < 0 or offset + byte_size > region.byte_size:
            raise InvalidRequest(
                f"{byte_size} bytes from offset {offset} are not within shared memory region {quoted(name)} of"
                f" {region.byte_size} bytes"
            )
        return RegionSlice(name, file, offset, byte_size)

    def _find(self, name: str) -> _Registered:
        known = self._registered.get(name)
        if known is None:
            raise NotFound(f"unknown shared memory region {quoted(name)}; register it first")
        return known

    def _open(self, region: Region) -> SharedFile:
        if not 0 < len(region.name) <= _LONGEST_NAME:
            raise InvalidRequest(f"a shared memory region needs a name of 1 to {_LONGEST_NAME} characters")
        if region.byte_size <= 0 or region.offset < 0:
            raise InvalidRequest(
                f"shared memory region {quoted(region.name)} has {region.byte_size} bytes from offset {region.offset},"
                " expected at least 1 byte, from offset 0 or more"
            )
        file = region.key.removeprefix("/")  # as shm_open takes it
        if not file.startswith(self._prefix) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise self._not_usable(region)
        try:
            descriptor = open_regular_file(self._directory / file)
        except (OSError, UnicodeEncodeError):  # no reason given: it would tell clients about files of others
            raise self._not_usable(region) from None
        return SharedFile(descriptor, region.offset, region.byte_size)

    def _not_usable(self, region: Region) -> InvalidRequest:
        return InvalidRequest(
            f"shared memory key {quoted(region.key)} cannot be used: expected a plain file in {self._directory} that"
            f" the server may read and write, its name beginning with {self._prefix!r} (shared_memory)"
        )

    def _check_new(self, name: str) -> None:
        if name in self._registered:
            raise AlreadyExists(f"shared memory region {quoted(name)} is registered already; unregister it first")

    def _add(self, region: Region, file: SharedFile) -> None:
        with self._lock:
            self._check_new(region.name)
            if len(self._registered) >= self._most_regions:
                raise Overloaded(
                    f"{self._most_regions} shared memory regions are registered, which is the limit; unregister some",
                    "regions",
                )
            in_use = sum(known.region.byte_size for known in self._registered.values())
            if in_use + region.byte_size > self._most_bytes:
                raise Overloaded(
                    f"{in_use} bytes of shared memory are registered, and {region.byte_size} more are over the limit of"
                    f" {self._most_bytes}; unregister some",
                    "regions",
                )
            self._registered[region.name] = _Registered(region, file)
