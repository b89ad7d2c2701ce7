"""The memory that fp32 references take of their process: measured for each, held against its bound, and given back.

What is resident is measured around loading, one reference at a time, and around runs beside which nothing else was
loaded, run or given back. So that one which takes memory without end in a single run ends in an error and not in the
machine's memory, the system is told of a limit as well.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bf16kit import controlgroup
from bf16kit.errors import ConfigError, RuntimeFailure, Unavailable
from bf16kit.heap import give_back
from bf16kit.manifest import Manifest
from bf16kit.runtime import Runtime
from service.contract import Array
from service.process.memory import for_requests

_log = logging.getLogger(__name__)
# A loaded reference was seen to take 1.08 to 1.33 times its fp32 weights from 34 MB on, and 11 MB beside; what a run
# takes is the model's, and this is for those that take it without end.
_DEFAULT_FACTOR, _DEFAULT_BESIDE = 2, 1 << 30
_HEADROOM = 512 << 20  # of the process beside its references, before the system refuses: samples, stacks, what is freed
_REFUSED = re.compile(r"alloc", re.IGNORECASE)  # std::bad_alloc, "Failed to allocate memory", "bad allocation"
_REMEDY = (
    "drift of this model is not measured until it is loaded anew: raise shadow.reference_memory_bytes in its"
    " serving.yaml, lower shadow.max_rows, or have another server run the reference (shadow.reference: grpc://…)"
)


def resident() -> int:
    """The bytes of memory that this process takes; 0 where nobody says."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _virtual() -> int:
    """The bytes of memory of its own that this process has asked for, taken or not: what the limit is of."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")), 0)


def fp32_bytes(manifest: Manifest) -> int:
    """Of the model's weights in fp32."""
    return sum(
        tensor.bytes * (2 if tensor.file == "weights.bf16" else 1)
        for tensor in manifest.tensors
        if tensor.file.startswith("weights.")
    )


def default_bound(weights: int, room: controlgroup.Memory | None = None) -> int:
    """For a reference whose fp32 weights have so many bytes. In a container it may take what ``room`` leaves beside
    what is kept for requests."""
    wanted = _DEFAULT_FACTOR * weights + _DEFAULT_BESIDE
    return wanted if room is None else max(0, min(wanted, room.left - for_requests(room)))


class Memory:
    """What the references of this process take together. ``held`` says what the process takes."""

    def __init__(self, held: Callable[[], int] = resident, *, limit: bool = False) -> None:
        """``limit``: have the system refuse what is over all bounds together; the process must be the references'."""
        self.held = held
        self._limit = limit
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._bounded: list[BoundedReference] = []
        self._base = 0  # what it takes without any
        self._at_work = 0  # references that are being loaded, run or given back
        self._begun = 0  # how often one of that has begun

    def load(self, name: str, bound: int, load: Callable[[], Runtime]) -> BoundedReference:
        """Load a reference that may take ``bound`` bytes. Raises ConfigError where it takes more, and what ``load``
        raises."""
        with self._loading, self.working():  # what another takes meanwhile would be taken for this one's
            give_back()
            before = self.held()
            with self._lock:
                if not self._bounded:
                    self._base = before
            self._set_limit(bound)
            runtime = load()
            give_back()
            taken = max(0, self.held() - before)
            if taken > bound:
                runtime.close()
                del runtime
                give_back()
                raise ConfigError(
                    f"it takes {taken} bytes of memory, over shadow.reference_memory_bytes {bound}, and was given back;"
                    f" {_REMEDY}"
                )
            reference = BoundedReference(name, bound, runtime, taken, self)
            with self._lock:
                self._bounded.append(reference)
            return reference

    @contextmanager
    def working(self) -> Iterator[Callable[[], bool]]:
        """While a reference takes memory, or gives it back. What is yielded tells whether no other has since."""
        with self._lock:
            alone = not self._at_work
            self._at_work += 1
            self._begun += 1
            begun = self._begun
        try:
            yield lambda: alone and begun == self._begun
        finally:
            with self._lock:
                self._at_work -= 1

    def is_over(self, reference: BoundedReference) -> bool:
        """Whether it takes more than it may: by its own runs, and by what the process has beside all others."""
        with self._lock:
            others = sum(each.taken for each in self._bounded if each is not reference)
        return reference.taken > reference.bound < self.held() - self._base - others

    def forget(self, reference: BoundedReference) -> None:
        with self._lock:
            if reference in self._bounded:
                self._bounded.remove(reference)
        give_back()

    def _set_limit(self, more: int) -> None:
        """Before a reference is loaded that may take ``more``."""
        if not self._limit or not sys.platform.startswith("linux"):
            return
        with self._lock:
            others = sum(max(0, each.bound - each.taken) for each in self._bounded)
        wanted = _virtual() + others + more + _HEADROOM
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or wanted <= hard:
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


class BoundedReference:
    """See :class:`service.drift.shadow.Reference`: a runtime that is given back once it takes too much memory."""

    def __init__(self, name: str, bound: int, runtime: Runtime, taken: int, memory: Memory) -> None:
        self.bound = bound
        self.taken = self._loaded = taken  # by loading it, and then by its runs too
        self._name = name
        self._runtime: Runtime | None = runtime
        self._memory = memory

    @property
    def up(self) -> bool:
        return self._runtime is not None

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str], *, seconds: float) -> dict[str, Array]:
        """See :meth:`service.drift.shadow.Reference.run`."""
        if self._runtime is None:
            raise Unavailable("the fp32 reference was given back")
        with self._memory.working() as alone:
            before = self._memory.held()
            try:
                return self._runtime.run(feeds, outputs, seconds=seconds)
            except (MemoryError, RuntimeFailure) as error:
                if isinstance(error, MemoryError) or _REFUSED.search(str(error)):
                    self._give_up(
                        "a run was refused more memory, of a bound for all references together, by its own of"
                    )
                    raise Unavailable("the fp32 reference was given back") from None
                raise
            finally:
                more = self._memory.held() - before
                if self.up and alone():  # what another took meanwhile is not this one's
                    self._took(more)

    def _took(self, more: int) -> None:
        """By a run: less than none where it gave back what an earlier one had taken."""
        self.taken = max(self._loaded, self.taken + more)
        if self._memory.is_over(self):
            self._give_up(f"it takes {self.taken} bytes of memory, over")

    def close(self) -> None:
        if self._runtime is not None:
            with self._memory.working():
                self._runtime.close()
                self._runtime = None
                self._memory.forget(self)

    def _give_up(self, why: str) -> None:
        _log.error(
            "%s: the fp32 reference is given back: %s shadow.reference_memory_bytes %d; %s",
            self._name,
            why,
            self.bound,
            _REMEDY,
        )
        self.close()
