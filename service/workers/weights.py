"""A worker's side of the weights that a server's processes share: see :mod:`service.workers.weightowner`."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import weakref

import numpy as np
from numpy.typing import NDArray

from bf16kit.runtime.memory.weightstore import (
    PRIVATE_STORE,
    Fill,
    UnfitMemory,
    WeightStore,
    check,
    create_filled,
    map_read_only,
)
from service.workers.weightowner import FILL, FILLED, HERE, MOST_BYTES, MOST_DESCRIPTORS, REFUSED, REQUEST

_log = logging.getLogger(__name__)
LEAST = 256 << 10  # bytes; fewer are not worth two descriptors in each process
PATIENCE_S = 600.0  # for another process to fill a copy that this one needs too


class SharedWeights:
    """A :class:`~bf16kit.runtime.memory.weightstore.WeightStore` whose copies are shared by all clients of an owner.

    ``owner`` is a socket from :meth:`WeightOwner.connect`. Weights below ``LEAST`` bytes are copied for this process
    alone. So are weights that cannot be shared: the owner is gone or refuses, its memory fails the check, or the system
    has no memory to share.
    """

    def __init__(
        self, owner: socket.socket, *, patience_s: float = PATIENCE_S, own: WeightStore = PRIVATE_STORE
    ) -> None:
        self._owner = owner
        self._patience_s = patience_s
        self._own = own

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        """See :class:`~bf16kit.runtime.memory.weightstore.WeightStore`."""
        if size < LEAST:
            return self._own.get(key, size, fill)
        try:
            descriptor, use = self._shared(key, size, fill)
        except _NotShared as reason:
            _log.warning("%.0f MB of weights are copied for this process alone: %s", size / 1e6, reason)
            return self._own.get(key, size, fill)
        try:
            mapping, memory = map_read_only(descriptor, size)
        except BaseException:
            use.close()
            raise
        finally:
            os.close(descriptor)
        # The use ends when nothing refers to the memory any more: a process need not report an unload, and may be
        # killed. The garbage collector may run anywhere, so the finalizer only closes a socket.
        weakref.finalize(mapping, use.close).atexit = False
        return memory

    def _shared(self, key: str, size: int, fill: Fill) -> tuple[int, socket.socket]:
        """Return the descriptor of the memory, and the socket that represents its use."""
        use, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            use.settimeout(self._patience_s)
            with theirs:
                self._ask(REQUEST.pack(size, hashlib.sha256(key.encode()).digest()), theirs)
            answer, descriptors = _answer(use)
            if answer == FILL and not descriptors:
                return self._filled(use, size, fill), use
            if answer == HERE and len(descriptors) == 1:
                return _checked(descriptors[0], size), use
            _close_all(descriptors)
            raise _NotShared("the owner serves as many uses as it may" if answer == REFUSED else "the owner is gone")
        except BaseException:
            use.close()
            raise

    def _ask(self, request: bytes, use: socket.socket) -> None:
        try:
            socket.send_fds(self._owner, [request], [use.fileno()])
        except OSError as error:
            raise _NotShared(f"the owner is gone ({error.strerror})") from error

    def _filled(self, use: socket.socket, size: int, fill: Fill) -> int:
        try:
            descriptor = create_filled(size, fill)
        except OSError as error:
            raise _NotShared(f"this system has no memory that can be shared ({error.strerror})") from error
        try:
            socket.send_fds(use, [FILLED], [descriptor])
        except OSError as error:
            _log.warning("%.0f MB of weights are not shared: the owner is gone (%s)", size / 1e6, error.strerror)
        return descriptor


class _NotShared(Exception):
    """The reason why this process needs its own copy."""


def _answer(use: socket.socket) -> tuple[bytes, list[int]]:
    try:
        flags = socket.MSG_CMSG_CLOEXEC
        message, descriptors, _, _ = socket.recv_fds(use, MOST_BYTES, MOST_DESCRIPTORS, flags)
    except TimeoutError:
        raise _NotShared("another process has not filled them in time") from None
    except OSError as error:
        raise _NotShared(f"the owner is gone ({error.strerror})") from error
    return message, descriptors


def _checked(descriptor: int, size: int) -> int:
    try:
        check(descriptor, size)
    except UnfitMemory as error:
        os.close(descriptor)
        raise _NotShared(f"the shared memory cannot be used: {error}") from error
    return descriptor


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
