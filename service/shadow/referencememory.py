"""The memory of fp32 references: a bound before one is loaded, and a limit of the process that the system enforces.

A run that takes memory without end must fail with an error instead of exhausting the container or the machine. The
limit is of private memory (RLIMIT_DATA), mapped files not included.
"""

from __future__ import annotations

import logging
import re
import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bf16kit.artifact.manifest import Manifest
from bf16kit.messages.errors import Bf16kitError, ConfigError, RuntimeFailure, Unavailable
from bf16kit.runtime import Runtime
from bf16kit.runtime.memory.filestore import FileWeightStore
from bf16kit.runtime.memory.weightstore import WeightStore
from bf16kit.service.config.resources import request_bytes
from bf16kit.service.contract import Array
from bf16kit.system import controlgroup
from bf16kit.system.controlgroup import release_free_memory

_log = logging.getLogger(__name__)
# Weights that cannot be read in place are copied. The memory of a run depends on the model. The allowance is generous:
# it is for runs that take memory without end.
_FACTOR, _FOR_RUNS = 2, 1 << 30
_HEADROOM = 512 << 20  # of the process beside its references: samples, stacks, freed memory
_OUT_OF_MEMORY = re.compile(r"bad.?alloc|alloc\w* .*memory", re.IGNORECASE)  # "Failed to allocate memory"
_REMEDY = "give the server more memory, or set shadow.rate: 0 for this model"


def fp32_bytes(manifest: Manifest) -> int:
    """Return the size of the model's weights in fp32, in bytes."""
    return sum(
        tensor.bytes * (2 if tensor.file == "weights.bf16" else 1)
        for tensor in manifest.tensors
        if tensor.file.startswith("weights.")
    )


class ReferenceMemory:
    """The memory of all references of this process, which must serve the references only: the limit is its own."""

    def __init__(self) -> None:
        self._loading = threading.Lock()  # one reference at a time: the next one sees what this one has taken
        self._lock = threading.Lock()  # guards what follows
        self._base = 0  # private memory of the process without references, in bytes
        self._allowed = 0  # to all references together

    def load(self, name: str, weights: int, load: Callable[[WeightStore], Runtime]) -> BoundedReference:
        """Load a reference with ``weights`` bytes of fp32 weights, the large ones in the store that ``load`` is given.

        Raises ConfigError if there is no room for it or if loading takes too much, and whatever ``load`` raises.
        """
        with self._loading:
            allowance = min(_FACTOR * weights + _FOR_RUNS, _room(weights))
            self._allow(allowance)
            store = FileWeightStore()
            try:
                runtime = load(store)
            except Exception as error:
                self._allow(-allowance)
                if isinstance(error, (MemoryError, RuntimeFailure)) and _is_out_of_memory(error):
                    raise ConfigError(f"loading it takes more than {allowance} bytes of memory; {_REMEDY}") from None
                raise
        return BoundedReference(name, runtime, store, lambda: self._allow(-allowance))

    def _allow(self, more: int) -> None:
        if more < 0:
            release_free_memory()
        taken = _private()
        with self._lock:
            if not self._allowed:
                self._base = taken
            self._allowed += more
            # Never below what is taken: otherwise the other references would have no memory for a run.
            limit = max(self._base + self._allowed, taken) + _HEADROOM
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            if hard == resource.RLIM_INFINITY or limit <= hard:
                resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


class BoundedReference:
    """A :class:`bf16kit.service.drift.shadow.Reference`: a runtime that is freed once a run of it finds no memory.

    Between two runs, its weights take no memory of the process: at the defaults it runs for milliseconds in a second.
    """

    def __init__(self, name: str, runtime: Runtime, store: FileWeightStore, release: Callable[[], None]) -> None:
        """``release`` is called once it is freed."""
        self._name = name
        self._runtime: Runtime | None = runtime
        self._store = store
        self._release = release

    @property
    def up(self) -> bool:
        return self._runtime is not None

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str], *, seconds: float) -> dict[str, Array]:
        """See :meth:`bf16kit.service.drift.shadow.Reference.run`."""
        if self._runtime is None:
            raise Unavailable("the fp32 reference was unloaded")
        try:
            return self._runtime.run(feeds, outputs, seconds=seconds)
        except (MemoryError, Bf16kitError) as error:
            if not _is_out_of_memory(error):
                raise
            _log.error(
                "%s: the fp32 reference is unloaded, because a run of it exceeded the memory that all references may"
                " take; its drift is not measured until the model is loaded again: %s",
                self._name,
                _REMEDY,
            )
            self.close()
            raise Unavailable("the fp32 reference was unloaded") from None
        finally:
            self._store.drop_pages()

    def close(self) -> None:
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None
            self._release()


def _room(weights: int) -> int:
    """Return the bytes that a reference may take: what the container has left beside requests, or the machine.

    Raises ConfigError if they do not suffice for its weights.
    """
    if (container := controlgroup.memory()) is not None:
        room = container.left - max(request_bytes(container), controlgroup.RESERVE)
        found = f"{container}, of which a quarter is kept for requests"
    else:
        room = _bytes_of("MemAvailable", Path("/proc/meminfo"))
        found = f"{room / 1e6:.0f} MB are available on this machine"
    if weights > room:
        raise ConfigError(f"its weights are {weights} bytes in fp32, and {found}; {_REMEDY}")
    return room


def _private() -> int:
    """Return the bytes of private memory that this process has requested, resident or not: the limit is of these."""
    return _bytes_of("VmData", Path("/proc/self/status"))


def _bytes_of(name: str, file: Path) -> int:
    return next(int(line.split()[1]) << 10 for line in file.read_text().splitlines() if line.startswith(f"{name}:"))


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)) is not None
