"""One copy of weights for all workers of a server, as long as one of them uses it.

A worker asks for a copy by key and size, over its channel to the supervisor. The answer is the copy, as a descriptor of
sealed memory, or the word to fill one. Others that ask for it wait meanwhile. If the worker that fills it fails or
dies, the next in line is told to fill it. A worker tells when it has stopped using a copy, and the death of a worker
ends all its uses. The copy is freed with its last use.

The supervisor reads no weights: it holds descriptors.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, Fill, create_filled, map_read_only
from bf16kit.service.peers.peer import Message

_log = logging.getLogger(__name__)
LEAST = 256 << 10  # bytes; fewer are not worth a descriptor in the supervisor
MOST_COPIES = 512  # each takes a descriptor in the supervisor, and most systems allow 1,024

What = Literal["use", "fill", "alone"]  # use the memory that comes along, fill it, or copy for yourself
Use = tuple[str, int]  # a worker's name, and its number for this use


@dataclass(eq=False, slots=True)
class _Copy:
    """One copy of weights. Until it has ``memory``, a descriptor, the first use fills it and the others wait."""

    uses: list[Use] = field(default_factory=list)
    memory: int | None = None


class WeightBroker:
    """The supervisor's side. ``tell`` sends a message with files to the worker of a name. For any thread."""

    def __init__(
        self, tell: Callable[[str, str, Mapping[str, Any], Sequence[int]], None], *, most_copies: int = MOST_COPIES
    ) -> None:
        self._tell = tell
        self._most_copies = most_copies
        self._copies: dict[str, _Copy] = {}  # by key
        self._lock = threading.Lock()
        #: For messages of workers, by kind: each gets the worker's name and the message.
        self.handlers: Mapping[str, Callable[[str, Message], None]] = {
            "weights": self._request,
            "filled": self._fill,
            "released": self._release,
        }

    def worker_died(self, worker: str) -> None:
        """End all uses of a worker."""
        with self._lock:
            for key, copy in list(self._copies.items()):
                for use in [use for use in copy.uses if use[0] == worker]:
                    self._end(key, use)

    def _request(self, worker: str, message: Message) -> None:
        key, use = message.body["key"], (worker, message.body["number"])
        with self._lock:
            if key not in self._copies and len(self._copies) >= self._most_copies:
                self._answer(key, use, "alone")
                return
            copy = self._copies.setdefault(key, _Copy())
            copy.uses.append(use)
            if copy.memory is not None:
                self._answer(key, use, "use", copy.memory)
            elif copy.uses[0] == use:
                self._answer(key, use, "fill")

    def _fill(self, worker: str, message: Message) -> None:
        with self._lock:
            key = message.body["key"]
            copy = self._copies[key]
            try:
                copy.memory = os.dup(message.files[0])
            except OSError:  # no descriptor is left: nobody else can use it
                del self._copies[key]
                for use in copy.uses[1:]:
                    self._answer(key, use, "alone")
                return
            for use in copy.uses[1:]:
                self._answer(key, use, "use", copy.memory)

    def _release(self, worker: str, message: Message) -> None:
        with self._lock:
            self._end(message.body["key"], (worker, message.body["number"]))

    # --- with the lock held -------------------------------------------------------------------------------------------

    def _answer(self, key: str, use: Use, what: What, *memory: int) -> None:
        try:
            self._tell(use[0], "weights", {"number": use[1], "do": what}, memory)
        except OSError:  # no descriptor is left for the message
            self._tell(use[0], "weights", {"number": use[1], "do": "alone"}, ())
            self._end(key, use)

    def _end(self, key: str, use: Use) -> None:
        copy = self._copies.get(key)
        if copy is None or use not in copy.uses:  # it was filled, but could not be shared
            return
        was_first = copy.uses[0] == use
        copy.uses.remove(use)
        if copy.uses:
            if was_first and copy.memory is None:
                self._answer(key, copy.uses[0], "fill")
            return
        del self._copies[key]
        if copy.memory is not None:
            os.close(copy.memory)


class SharedWeights:
    """A worker's side: a :class:`~bf16kit.runtime.memory.weightstore.WeightStore`. :meth:`receive` gets the answers.

    Weights below ``LEAST`` bytes are copied for this process alone. So are weights beyond :data:`MOST_COPIES`.
    """

    def __init__(self, tell: Callable[[str, Mapping[str, Any], Sequence[int]], None]) -> None:
        self._tell = tell
        self._numbers = itertools.count()
        self._answers: dict[int, Future[tuple[What, int]]] = {}  # by number: what to do, and the memory or -1
        # The garbage collector ends uses, wherever a thread is, also where it holds a lock: it may only fill a queue.
        self._ended: SimpleQueue[Mapping[str, Any]] = SimpleQueue()
        self._thread = threading.Thread(target=self._report_ends, name="weights", daemon=True)

    def start(self) -> None:
        """Begin to report the ends of uses."""
        self._thread.start()

    def receive(self, message: Message) -> None:
        """Take the supervisor's answer to a request."""
        memory = os.dup(message.files[0]) if message.files else -1
        self._answers.pop(message.body["number"]).set_result((message.body["do"], memory))

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        """See :class:`~bf16kit.runtime.memory.weightstore.WeightStore`.

        This waits for another worker that fills the same copy; the load that waits may be given up meanwhile.
        """
        if size < LEAST:
            return PRIVATE_STORE.get(key, size, fill)
        number = next(self._numbers)
        use = {"key": hashlib.sha256(f"{size} {key}".encode()).hexdigest(), "number": number}
        answer = self._answers[number] = Future()
        self._tell("weights", use, ())
        what, descriptor = answer.result()
        if what == "alone":
            _log.warning("%.0f MB of weights are copied for this process alone: too many are shared", size / 1e6)
            return PRIVATE_STORE.get(key, size, fill)
        try:
            if what == "fill":
                descriptor = create_filled(size, fill)
                self._tell("filled", use, [descriptor])
            mapping, memory = map_read_only(descriptor, size)
        except BaseException:
            self._ended.put(use)
            raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        # The use ends when nothing refers to the memory any more: nobody needs to report an unload.
        weakref.finalize(mapping, self._ended.put, use).atexit = False
        return memory

    def _report_ends(self) -> None:
        while True:
            self._tell("released", self._ended.get(), ())
