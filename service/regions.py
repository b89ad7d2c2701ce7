"""Regions of shared memory that clients register: files in /dev/shm, which clients can change, shrink or remove.

They are read and written by system calls and never mapped: a load or a store beyond the end of a shrunk file would
cause SIGBUS, which ends the process.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bf16kit.messages.errors import AlreadyExists, InvalidRequest, NotFound, Overloaded
from bf16kit.messages.wording import quoted
from bf16kit.numerics.tensors import Array
from bf16kit.service.operations import Region

DIRECTORY = Path("/dev/shm")  # noqa: S108 -- it is where POSIX shared memory lies
_LONGEST_NAME = 255  # characters
# Follow no links, do not block on a pipe, and do not pass the descriptor on to child processes.
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class SharedFile:
    """The bytes from ``offset`` on of the file open as ``descriptor``.

    It owns the descriptor, and closes it when the last reference is gone.
    """

    def __init__(self, descriptor: int, offset: int) -> None:
        weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor
        self._offset = offset

    def is_same_file(self, descriptor: int) -> bool:
        """Return whether ``descriptor`` has the same file open."""
        return os.path.sameopenfile(self.descriptor, descriptor)

    def holds(self, at: int, nbytes: int) -> bool:
        """Return whether the file has ``nbytes`` from ``at`` on."""
        return os.fstat(self.descriptor).st_size >= self._offset + at + nbytes

    def read(self, at: int, nbytes: int) -> bytes:
        """Return a copy of ``nbytes`` from ``at`` on; fewer if the file ends before."""
        return os.pread(self.descriptor, nbytes, self._offset + at)

    def write(self, at: int, data: Array) -> bool:
        """Copy contiguous ``data`` to ``at``. Returns False if the file ends before, or its file system is full."""
        if not self.holds(at, data.nbytes):  # a write would make the file larger
            return False
        try:
            return os.pwrite(self.descriptor, data.reshape(-1).view(np.uint8).data, self._offset + at) == data.nbytes
        except OSError:
            return False


def open_regular_file(path: Path) -> int:
    """Open a regular file that has one name; another hard link could be a name that is not allowed. Raises OSError."""
    descriptor = os.open(path, _FLAGS)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EPERM, "not a regular file with one name")
    return descriptor


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
        if data.nbytes and not self._file.write(self._at, np.ascontiguousarray(data)):
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
        self._add(region, SharedFile(os.dup(descriptor), region.offset))

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
        opened = SharedFile(descriptor, region.offset)
        if not opened.holds(0, region.byte_size):
            raise InvalidRequest(
                f"{region.byte_size} bytes from offset {region.offset} end beyond the"
                f" {os.fstat(descriptor).st_size} bytes of the shared memory"
            )
        return opened

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
