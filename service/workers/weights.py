"""One copy of weights for all workers of a server, as long as one of them uses it.

A worker asks for a copy by key and size, over its channel to the supervisor. The answer is the copy, as a descriptor of
sealed memory, or the word to fill one. Others that ask for it wait meanwhile. If the worker that fills it fails or
dies, the next in line is told to fill it. A worker tells when it has stopped using a copy, and the death of a worker
ends all its uses. The copy is freed with its last use.

The supervisor reads no weights: it holds descriptors, and checks each before another worker gets it.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

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
from service.peers.peer import Message

_log = logging.getLogger(__name__)
LEAST = 256 << 10  # bytes; fewer are not worth a descriptor in the supervisor
MOST_COPIES = 512  # each takes a descriptor in the supervisor, and most systems allow 1,024
PATIENCE_S = 600.0  # for another worker to fill a copy that this one needs too

What = Literal["use", "fill", "alone"]  # use the memory that comes along, fill it, or copy for yourself
Use = tuple[str, int]  # a worker's name, and its number for this use
Tell = Callable[[str, str, Mapping[str, Any], Sequence[int]], None]


@dataclass(eq=False, slots=True)
class _Copy:
    """One copy of weights: being filled (``filler``), or complete (``memory``, a descriptor)."""

    key: tuple[str, int]
    memory: int | None = None
    filler: Use | None = None
    waiting: deque[Use] = field(default_factory=deque)
    users: set[Use] = field(default_factory=set)


class WeightBroker:
    """The supervisor's side. ``tell`` sends a message with files to the worker of a name. For any thread."""

    def __init__(self, tell: Tell, *, most_copies: int = MOST_COPIES) -> None:
        self._tell = tell
        self._most_copies = most_copies
        self._copies: dict[tuple[str, int], _Copy] = {}
        self._uses: dict[Use, _Copy] = {}
        self._lock = threading.Lock()
        #: For messages of workers, by kind: each gets the worker's name and the message.
        self.handlers: Mapping[str, Callable[[str, Message], None]] = {
            "weights": self._request,
            "filled": self._fill,
            "released": lambda worker, message: self._release((worker, message.body["number"])),
        }

    @property
    def copies(self) -> int:
        """The number of copies, including those being filled."""
        return len(self._copies)

    @property
    def uses(self) -> int:
        """The number of uses, including those that wait."""
        return len(self._uses)

    def worker_died(self, worker: str) -> None:
        """End all uses of a worker."""
        with self._lock:
            for use in [use for use in self._uses if use[0] == worker]:
                self._end(use)

    def close(self) -> None:
        """Release everything. Workers keep what they have mapped."""
        with self._lock:
            for copy in self._copies.values():
                copy.waiting.clear()
            for use in list(self._uses):
                self._end(use)

    def _request(self, worker: str, message: Message) -> None:
        use, key = (worker, message.body["number"]), (message.body["key"], message.body["size"])
        with self._lock:
            if key not in self._copies and len(self._copies) >= self._most_copies:
                self._answer(use, "alone")
                return
            copy = self._uses[use] = self._copies.setdefault(key, _Copy(key))
            copy.waiting.append(use)
            self._serve(copy)

    def _fill(self, worker: str, message: Message) -> None:
        use = worker, message.body["number"]
        with self._lock:
            copy = self._uses.get(use)
            if copy is None or copy.filler != use:
                return
            try:
                (memory,) = message.files
                check(memory, copy.key[1])
                copy.memory = os.dup(memory)
            except (UnfitMemory, OSError, ValueError) as error:
                _log.warning("weights of %d bytes that %s filled are not shared: %s", copy.key[1], worker, error)
                self._end(use)
                return
            copy.filler = None
            copy.users.add(use)
            self._serve(copy)

    def _release(self, use: Use) -> None:
        with self._lock:
            self._end(use)

    # --- with the lock held -------------------------------------------------------------------------------------------

    def _serve(self, copy: _Copy) -> None:
        """Answer those that wait for ``copy``: all once it is complete, or the first if nobody fills it."""
        while copy.waiting and (copy.memory is not None or copy.filler is None):
            use = copy.waiting.popleft()
            if copy.memory is None:
                copy.filler = use
                self._answer(use, "fill")
                continue
            copy.users.add(use)
            try:
                self._answer(use, "use", copy.memory)
            except OSError:  # no descriptor is left to send it
                self._answer(use, "alone")
                self._end(use)

    def _answer(self, use: Use, what: What, *memory: int) -> None:
        self._tell(use[0], "weights", {"number": use[1], "do": what}, memory)

    def _end(self, use: Use) -> None:
        copy = self._uses.pop(use, None)
        if copy is None:
            return
        copy.users.discard(use)
        if use in copy.waiting:
            copy.waiting.remove(use)
        if copy.filler == use:
            copy.filler = None
            self._serve(copy)
        if copy.filler is None and not copy.users and not copy.waiting:
            if copy.memory is not None:
                os.close(copy.memory)
            self._copies.pop(copy.key, None)


class SharedWeights:
    """A worker's side: a :class:`~bf16kit.runtime.memory.weightstore.WeightStore`. :meth:`receive` gets the answers.

    Weights below ``LEAST`` bytes are copied for this process alone. So are weights that cannot be shared: there are too
    many, another worker has not filled them in time, or the system has no memory to share.
    """

    def __init__(
        self, tell: Callable[[str, Mapping[str, Any], Sequence[int]], None], *, patience_s: float = PATIENCE_S
    ) -> None:
        self._tell = tell
        self._patience_s = patience_s
        self._own: WeightStore = PRIVATE_STORE
        self._numbers = itertools.count()
        self._answers: dict[int, Future[tuple[What, int]]] = {}  # by number: what to do, and the memory or -1
        # The garbage collector ends uses, wherever a thread is, also where it holds a lock: it may only fill a queue.
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._thread = threading.Thread(target=self._report_ends, name="weights", daemon=True)

    def start(self) -> None:
        """Begin to report the ends of uses."""
        self._thread.start()

    def receive(self, message: Message) -> None:
        """Take the supervisor's answer to a request."""
        answer = self._answers.pop(message.body["number"])
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result((message.body["do"], os.dup(message.files[0]) if message.files else -1))
        except OSError as error:
            answer.set_exception(_NotShared(f"this process can open no more files ({error.strerror})"))

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        """See :class:`~bf16kit.runtime.memory.weightstore.WeightStore`."""
        if size < LEAST:
            return self._own.get(key, size, fill)
        number = next(self._numbers)
        try:
            descriptor = self._shared(number, key, size, fill)
            try:
                mapping, memory = map_read_only(descriptor, size)
            finally:
                os.close(descriptor)
        except _NotShared as reason:
            self._ended.put(number)
            _log.warning("%.0f MB of weights are copied for this process alone: %s", size / 1e6, reason)
            return self._own.get(key, size, fill)
        except BaseException:
            self._ended.put(number)
            raise
        # The use ends when nothing refers to the memory any more: nobody needs to report an unload.
        weakref.finalize(mapping, self._ended.put, number).atexit = False
        return memory

    def _shared(self, number: int, key: str, size: int, fill: Fill) -> int:
        """Return the descriptor of the memory."""
        answer = self._answers[number] = Future()
        digest = hashlib.sha256(key.encode()).hexdigest()
        self._tell("weights", {"number": number, "key": digest, "size": size}, ())
        try:
            what, memory = answer.result(self._patience_s)
        except TimeoutError:
            if answer.cancel():
                raise _NotShared("another process has not filled them in time") from None
            what, memory = answer.result()
        if what == "alone":
            raise _NotShared("the supervisor shares as many as it may")
        return memory if what == "use" else self._filled(number, size, fill)

    def _filled(self, number: int, size: int, fill: Fill) -> int:
        try:
            memory = create_filled(size, fill)
        except OSError as error:
            raise _NotShared(f"this system has no memory that can be shared ({error.strerror})") from error
        try:
            self._tell("filled", {"number": number}, [memory])
        except OSError as error:  # no descriptor is left to send it
            _log.warning("%.0f MB of weights are not shared: %s", size / 1e6, error.strerror)
            self._ended.put(number)
        return memory

    def _report_ends(self) -> None:
        while True:
            self._tell("released", {"number": self._ended.get()}, ())


class _NotShared(Exception):
    """The reason why this process needs its own copy."""
