"""The memory of fp32 references: measured for each, compared with its bound, and freed.

Resident memory is measured around loading, one reference at a time, and around runs during which no other reference was
loaded, run or freed. A single run that takes memory without end must fail with an error instead of exhausting the
machine, so the system is given a limit as well.
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

from bf16kit.artifact.manifest import Manifest
from bf16kit.messages.errors import ConfigError, RuntimeFailure, Unavailable
from bf16kit.runtime import Runtime
from bf16kit.system import controlgroup
from bf16kit.system.controlgroup import release_free_memory
from service.config.resources import request_bytes
from service.contract import Array

_log = logging.getLogger(__name__)
# A loaded reference was measured to take 1.08 to 1.33 times its fp32 weights, for 34 MB of weights and more, plus 11
# MB. The memory of a run depends on the model. The bound is generous: it is for runs that take memory without end.
_DEFAULT_FACTOR, _DEFAULT_EXTRA = 2, 1 << 30
# Of the process beside its references, before the system refuses more: samples, stacks, freed memory.
_HEADROOM = 512 << 20
_OUT_OF_MEMORY = re.compile(r"alloc", re.IGNORECASE)  # std::bad_alloc, "Failed to allocate memory", "bad allocation"
_REMEDY = (
    "drift of this model is not measured until the model is loaded again: raise shadow.reference_memory_bytes in its"
    " serving.yaml, lower shadow.max_rows, or have another server run the reference (shadow.reference: grpc://…)"
)


def resident() -> int:
    """Return the bytes of memory resident in this process; 0 if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _virtual() -> int:
    """Return the bytes of private memory that this process has requested, resident or not, to which the limit
    applies."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")), 0)


def fp32_bytes(manifest: Manifest) -> int:
    """Return the size of the model's weights in fp32, in bytes."""
    return sum(
        tensor.bytes * (2 if tensor.file == "weights.bf16" else 1)
        for tensor in manifest.tensors
        if tensor.file.startswith("weights.")
    )


def default_bound(weights: int, room: controlgroup.Memory | None = None) -> int:
    """Return the default bound for a reference with ``weights`` bytes of fp32 weights.

    In a container it is at most what ``room`` has left beside the memory kept for requests.
    """
    wanted = _DEFAULT_FACTOR * weights + _DEFAULT_EXTRA
    return wanted if room is None else max(0, min(wanted, room.left - request_bytes(room)))


class ReferenceMemory:
    """The memory of all references of this process. ``in_use`` returns the bytes that the process takes."""

    def __init__(self, in_use: Callable[[], int] = resident, *, limit: bool = False) -> None:
        """``limit``: have the system refuse memory above all bounds together. The process must serve the references
        only."""
        self.in_use = in_use
        self._limit = limit
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._bounded: list[BoundedReference] = []
        self._base = 0  # memory of the process without references
        self._running = 0  # references being loaded, run or freed
        self._started = 0  # how many such operations have started

    def load(self, name: str, bound: int, load: Callable[[], Runtime]) -> BoundedReference:
        """Load a reference that may take ``bound`` bytes.

        Raises ConfigError if it takes more, and whatever ``load`` raises.
        """
        with self._loading, self.allocating():  # memory taken by another meanwhile would be counted as this one's
            release_free_memory()
            before = self.in_use()
            with self._lock:
                if not self._bounded:
                    self._base = before
            self._set_limit(bound)
            runtime = load()
            release_free_memory()
            taken = max(0, self.in_use() - before)
            if taken > bound:
                runtime.close()
                del runtime
                release_free_memory()
                raise ConfigError(
                    f"it uses {taken} bytes of memory, over shadow.reference_memory_bytes {bound}, and was unloaded;"
                    f" {_REMEDY}"
                )
            reference = BoundedReference(name, bound, runtime, taken, self)
            with self._lock:
                self._bounded.append(reference)
            return reference

    @contextmanager
    def allocating(self) -> Iterator[Callable[[], bool]]:
        """Mark that a reference allocates or frees memory.

        Yields a function that returns whether no other has since the start.
        """
        with self._lock:
            alone = not self._running
            self._running += 1
            self._started += 1
            started = self._started
        try:
            yield lambda: alone and started == self._started
        finally:
            with self._lock:
                self._running -= 1

    def is_over(self, reference: BoundedReference) -> bool:
        """Whether a reference exceeds its bound, both by its own runs and by the process' memory less all others'."""
        with self._lock:
            others = sum(each.taken for each in self._bounded if each is not reference)
        return reference.taken > reference.bound < self.in_use() - self._base - others

    def forget(self, reference: BoundedReference) -> None:
        with self._lock:
            if reference in self._bounded:
                self._bounded.remove(reference)
        release_free_memory()

    def _set_limit(self, more: int) -> None:
        """Set the system's limit before loading a reference that may take ``more`` bytes."""
        if not self._limit or not sys.platform.startswith("linux"):
            return
        with self._lock:
            others = sum(max(0, each.bound - each.taken) for each in self._bounded)
        wanted = _virtual() + others + more + _HEADROOM
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or wanted <= hard:
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


class BoundedReference:
    """A :class:`service.drift.shadow.Reference`: a runtime that is freed once it takes too much memory."""

    def __init__(self, name: str, bound: int, runtime: Runtime, taken: int, memory: ReferenceMemory) -> None:
        self.bound = bound
        self.taken = self._loaded = taken  # by loading it, later also by its runs
        self._name = name
        self._runtime: Runtime | None = runtime
        self._memory = memory

    @property
    def up(self) -> bool:
        return self._runtime is not None

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str], *, seconds: float) -> dict[str, Array]:
        """See :meth:`service.drift.shadow.Reference.run`."""
        if self._runtime is None:
            raise Unavailable("the fp32 reference was unloaded")
        with self._memory.allocating() as alone:
            before = self._memory.in_use()
            try:
                return self._runtime.run(feeds, outputs, seconds=seconds)
            except (MemoryError, RuntimeFailure) as error:
                if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
                    self._unload("a run exceeded the memory limit shared by all references; its own bound is")
                    raise Unavailable("the fp32 reference was unloaded") from None
                raise
            finally:
                more = self._memory.in_use() - before
                if self.up and alone():  # memory taken by another meanwhile is not this one's
                    self._add_taken(more)

    def _add_taken(self, more: int) -> None:
        """Count the memory that a run took; negative if it freed what an earlier run had taken."""
        self.taken = max(self._loaded, self.taken + more)
        if self._memory.is_over(self):
            self._unload(f"it uses {self.taken} bytes of memory, over")

    def close(self) -> None:
        if self._runtime is not None:
            with self._memory.allocating():
                self._runtime.close()
                self._runtime = None
                self._memory.forget(self)

    def _unload(self, reason: str) -> None:
        _log.error(
            "%s: the fp32 reference is unloaded: %s shadow.reference_memory_bytes %d; %s",
            self._name,
            reason,
            self.bound,
            _REMEDY,
        )
        self.close()
