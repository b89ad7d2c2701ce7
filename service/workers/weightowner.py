"""Keeps the weights of models for the processes of one server: one copy each, as long as a process uses it.

A client (:class:`service.workers.weights.SharedWeights`) asks for a copy by key and size, with a separate socket for
this use. The response is either the copy, as a descriptor of sealed memory, or the word to fill it. Other clients wait
meanwhile. If the filling client fails or dies, the next in line is told to fill it. A use ends with its socket, so a
process that dies releases all its uses. The copy is freed with its last use.

No weights are read here, and nothing is unpickled. Memory from a client is checked before another client gets it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from bf16kit.runtime.memory.weightstore import UnfitMemory, check

_log = logging.getLogger(__name__)
REQUEST = struct.Struct("!Q32s")  # size in bytes, sha256 of the key; sent with the socket of the use
FILL, HERE, REFUSED, FILLED = b"fill", b"here", b"refused", b"filled"  # HERE and FILLED carry the memory
MOST_BYTES = 64  # longest message that is not a request
MOST_DESCRIPTORS = 4  # most descriptors read from a message; a valid one has at most one
MOST_USES = 512  # of all clients together: each holds one or two descriptors here, and most systems allow 1,024
_SEQUENCED = socket.SOCK_SEQPACKET  # keeps messages whole, and reports when the other side closes


@dataclass(eq=False)
class _Use:
    socket: socket.socket
    copy: _Copy


@dataclass(eq=False)
class _Copy:
    """One copy of weights: being filled (``filler``), or complete (``memory``, a descriptor)."""

    key: tuple[int, bytes]
    memory: int | None = None
    filler: _Use | None = None
    waiting: deque[_Use] = field(default_factory=deque)
    users: set[_Use] = field(default_factory=set)


class WeightOwner:
    """Answers the clients that :meth:`connect` creates, on its own thread, from :meth:`start` to :meth:`close`."""

    def __init__(self, *, most_uses: int = MOST_USES) -> None:
        self._most_uses = most_uses
        self._copies: dict[tuple[int, bytes], _Copy] = {}
        self._uses: set[_Use] = set()
        self._selector = selectors.DefaultSelector()
        self._new: SimpleQueue[socket.socket | None] = SimpleQueue()  # None: the end
        self._woken, self._wake = socket.socketpair()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="weights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def connect(self) -> socket.socket:
        """Return the socket for one client. The caller hands it to the client's process and then closes it here."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, _SEQUENCED)
        self._enqueue(ours)
        return theirs

    @property
    def copies(self) -> int:
        """The number of copies, including those being filled."""
        return len(self._copies)

    @property
    def uses(self) -> int:
        """The number of uses, including those that wait."""
        return len(self._uses)

    def close(self) -> None:
        """Release everything. Clients keep what they have mapped, and make private copies from now on."""
        if self._closed:
            return
        self._closed = True
        self._enqueue(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _enqueue(self, client: socket.socket | None) -> None:
        self._new.put(client)
        self._wake.send(b"\0")

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        clients: list[socket.socket] = []
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    key.data()
                    continue
                self._woken.recv(1)
                client = self._new.get()
                if client is None:
                    self._release_all(clients)
                    return
                clients = [each for each in clients if each.fileno() >= 0] + [client]
                self._watch(client, partial(self._request, client))

    def _release_all(self, clients: list[socket.socket]) -> None:
        for use in list(self._uses):
            use.copy.waiting.clear()
            self._end(use)
        for client in clients:
            client.close()

    def _watch(self, watched: socket.socket, act: Callable[[], None]) -> None:
        watched.setblocking(False)
        self._selector.register(watched, selectors.EVENT_READ, act)

    def _request(self, client: socket.socket) -> None:
        """Handle a client's request. A client that sends an invalid one is disconnected."""
        message, descriptors = _received(client, REQUEST.size)
        if len(message) != REQUEST.size or len(descriptors) != 1:
            _close_all(descriptors)
            self._selector.unregister(client)
            client.close()
            return
        try:
            use_socket = socket.socket(fileno=descriptors[0])
        except OSError:
            _close_all(descriptors)
            return
        size, key = REQUEST.unpack(message)
        if len(self._uses) >= self._most_uses:
            _log.warning("weights of %d bytes are not shared: %d uses are the most", size, self._most_uses)
            _send(use_socket, REFUSED)
            use_socket.close()
            return
        copy = self._copies.setdefault((size, key), _Copy((size, key)))
        use = _Use(use_socket, copy)
        self._uses.add(use)
        self._watch(use_socket, partial(self._on_message, use))
        copy.waiting.append(use)
        self._serve(copy)

    def _serve(self, copy: _Copy) -> None:
        """Answer clients that wait for ``copy``: all once it is complete, or the first if nobody fills it."""
        while copy.waiting and (copy.memory is not None or copy.filler is None):
            use = copy.waiting.popleft()
            if copy.memory is None:
                copy.filler = use
                answered = _send(use.socket, FILL)
            else:
                copy.users.add(use)
                answered = _send(use.socket, HERE, copy.memory)
            if not answered:
                self._end(use)

    def _on_message(self, use: _Use) -> None:
        """Handle a message on a use's socket: the use has ended, or its copy is filled."""
        message, descriptors = _received(use.socket, MOST_BYTES)
        copy = use.copy
        if message != FILLED or copy.filler is not use or len(descriptors) != 1:
            _close_all(descriptors)
            self._end(use)
            return
        try:
            check(descriptors[0], copy.key[0])
        except UnfitMemory as error:
            _log.warning("weights of %d bytes that a process filled are not shared: %s", copy.key[0], error)
            _close_all(descriptors)
            self._end(use)
            return
        copy.memory, copy.filler = descriptors[0], None
        copy.users.add(use)
        self._serve(copy)

    def _end(self, use: _Use) -> None:
        if use not in self._uses:
            return
        self._uses.remove(use)
        self._selector.unregister(use.socket)
        use.socket.close()
        copy = use.copy
        copy.users.discard(use)
        with contextlib.suppress(ValueError):
            copy.waiting.remove(use)
        if copy.filler is use:
            copy.filler = None
            self._serve(copy)
        if copy.filler is None and not copy.users and not copy.waiting:
            if copy.memory is not None:
                os.close(copy.memory)
                copy.memory = None
            self._copies.pop(copy.key, None)


def _received(source: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """Return a message and its descriptors; nothing if the other side is gone."""
    try:
        message, descriptors, flags, _ = socket.recv_fds(source, most, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return b"", []
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        _close_all(descriptors)
        return b"", []
    return message, descriptors


def _send(to: socket.socket, message: bytes, descriptor: int | None = None) -> bool:
    """Send without waiting. Return whether it was possible: a full socket means that its peer is lost."""
    try:
        if descriptor is None:
            to.send(message)
        else:
            socket.send_fds(to, [message], [descriptor])
    except OSError:
        return False
    return True


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
