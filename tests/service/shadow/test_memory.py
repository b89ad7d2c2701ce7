"""Memory limits of fp32 references within their process."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_mlp

from bf16kit.messages.errors import ConfigError, RuntimeFailure, Unavailable
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Array, RuntimeInfo
from bf16kit.runtime.loading import load_reference
from bf16kit.system import controlgroup
from service.shadow.memory import BoundedReference, ReferenceMemory, default_bound, fp32_bytes, resident

SPECS = (TensorSpec("x", "float32", ("batch", 2)),)
FEEDS = {"x": np.ones((1, 2), np.float32)}


class Process:
    """A process whose memory use the test sets."""

    def __init__(self) -> None:
        self.held = 1000

    def __call__(self) -> int:
        return self.held


class Growing:
    """A runtime that takes ``taken`` bytes when loaded and ``more`` with each run, and frees all of it on close."""

    inputs = outputs = SPECS
    info = RuntimeInfo("onnxruntime", "cpu", "reference", "fp32", "fp32")

    def __init__(self, process: Process, taken: int = 0, more: int = 0, error: Exception | None = None) -> None:
        self._process = process
        self._more = more
        self._error = error
        self._taken = taken
        process.held += taken

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        self._process.held += self._more
        self._taken += self._more
        if self._error is not None:
            raise self._error
        return dict(feeds)

    def close(self) -> None:
        self._process.held -= self._taken


class Nested(Growing):
    """A runtime that calls ``meanwhile`` during its run, before it takes its own memory."""

    def __init__(self, process: Process, meanwhile: Callable[[], object], more: int = 0) -> None:
        super().__init__(process, more=more)
        self._meanwhile = meanwhile

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        self._meanwhile()
        return super().run(feeds, outputs, seconds=seconds)


Load = Callable[..., BoundedReference]


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def load(process: Process) -> Load:
    memory = ReferenceMemory(process)

    def loaded(bound: int, taken: int = 0, more: int = 0, error: Exception | None = None) -> BoundedReference:
        return memory.load("m", bound, lambda: Growing(process, taken, more, error))

    return loaded


def run(reference: BoundedReference) -> dict[str, Array]:
    return reference.run(FEEDS, ("x",), seconds=1.0)


def test_a_reference_over_its_limit_after_loading_is_unloaded(process: Process, load: Load) -> None:
    assert load(100, taken=100).up
    with pytest.raises(ConfigError, match=r"uses 101 bytes .* over shadow.reference_memory_bytes 100, .* raise"):
        load(100, taken=101)
    assert process.held == 1100


def test_a_reference_that_grows_over_its_limit_is_unloaded_and_logged_once(
    process: Process, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    reference = load(100, taken=60, more=30)
    ups = []
    for _ in range(2):
        assert run(reference).keys() == {"x"}
        ups.append(reference.up)
    assert ups == [True, False]
    assert process.held == 1000
    for _ in range(2):
        with pytest.raises(Unavailable):
            run(reference)
    assert caplog.text.count("m: the fp32 reference is unloaded: it uses 120 bytes of memory, over") == 1
    assert "shadow.reference_memory_bytes 100; drift of this model is not measured" in caplog.text


def test_memory_of_other_references_does_not_count(load: Load) -> None:
    small, large = load(100, taken=90, more=5), load(1000, taken=500)
    ups = []
    for reference in (small, large, small, small):
        run(reference)
        ups.append((small.up, large.up))
    assert ups == [(True, True), (True, True), (True, True), (False, True)]


def test_memory_freed_meanwhile_does_not_count(process: Process, load: Load) -> None:
    """The growth of all runs adds up to 120 bytes, but the process does not hold that much."""
    reference = load(100, taken=60, more=30)
    run(reference)
    process.held -= 40
    run(reference)
    assert reference.up


@pytest.mark.parametrize("what", ["load", "run", "close"])
def test_what_another_reference_takes_or_frees_during_a_run_does_not_count(what: str, process: Process) -> None:
    memory = ReferenceMemory(process)
    other = memory.load("other", 1000, lambda: Growing(process, taken=400, more=400))

    def meanwhile() -> None:
        if what == "load":
            memory.load("third", 1000, lambda: Growing(process, taken=400))
        elif what == "run":
            run(other)
        else:
            other.close()

    one = memory.load("one", 100, lambda: Nested(process, meanwhile))
    one.taken = 90  # as if by earlier runs
    run(one)
    assert one.up
    assert one.taken == 90


def test_growth_during_concurrent_runs_counts_for_neither_reference(process: Process) -> None:
    """Nor for the run that began first and ended last, nor for a run while a third reference is loaded."""
    memory = ReferenceMemory(process)
    inner = memory.load("inner", 100, lambda: Growing(process, more=400))
    outer = memory.load("outer", 100, lambda: Nested(process, lambda: run(inner)))
    run(outer)
    assert (inner.taken, outer.taken) == (0, 0)

    def loaded() -> Growing:
        run(inner)
        return Growing(process)

    memory.load("third", 1000, loaded)
    assert inner.taken == 0
    assert inner.up
    run(inner)
    assert not inner.up, "alone it is judged"


def test_memory_that_a_run_frees_is_subtracted_but_not_below_the_loaded_size(process: Process) -> None:
    memory = ReferenceMemory(process)
    runtime = Growing(process)

    def loaded() -> Growing:
        process.held += 60
        return runtime

    one = memory.load("m", 100, loaded)
    seen = []
    for runtime._more in (30, -30, 30, -30, 30, -30, -40):
        run(one)
        seen.append((one.taken, one.up))
    assert seen == [(90, True), (60, True)] * 3 + [(60, True)]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeFailure("ONNX Runtime failed: bad allocation")])
def test_a_reference_whose_allocation_fails_is_unloaded(
    error: Exception, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    reference = load(100, error=error)
    with pytest.raises(Unavailable):
        run(reference)
    assert not reference.up
    assert "a run exceeded the memory limit shared by all references" in caplog.text


def test_a_reference_that_fails_in_another_way_stays_loaded(load: Load) -> None:
    reference = load(100, error=RuntimeFailure("ONNX Runtime failed: dimensions"))
    with pytest.raises(RuntimeFailure):
        run(reference)
    assert reference.up


def test_resident_measures_the_memory_of_this_process() -> None:
    before = resident()
    taken = np.ones(50 << 20, np.uint8)
    assert 40 << 20 < resident() - before < 60 << 20
    del taken


def test_a_reference_stays_within_the_default_limit_for_its_weights(tmp_path: Path) -> None:
    artifact = write_mlp(tmp_path / "mlp" / "1", width=512)
    weights = fp32_bytes(artifact.manifest)
    assert weights == 2 * 512 * 512 * 4
    reference = ReferenceMemory().load("m", default_bound(weights), lambda: load_reference(artifact, threads=1))
    assert reference.up
    reference.close()


def test_the_system_denies_memory_over_the_sum_of_all_limits() -> None:
    """Tested in a separate process, because its limit stays in force."""
    program = """
import numpy as np
from service.shadow.memory import ReferenceMemory
ReferenceMemory(limit=True).load("m", 1 << 20, lambda: None)
np.ones(200 << 20, np.uint8)
try:
    np.ones(2 << 30, np.uint8)
except MemoryError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("refused\n", "")
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY, "here there is none"


def test_the_default_limit_in_a_container_leaves_memory_for_requests() -> None:
    gib = 1 << 30
    assert default_bound(gib) == 3 * gib
    assert default_bound(gib, controlgroup.Memory(limit=64 * gib, left=60 * gib)) == 3 * gib
    assert default_bound(gib, controlgroup.Memory(limit=4 * gib, left=2 * gib)) == gib
    assert default_bound(gib, controlgroup.Memory(limit=4 * gib, left=gib // 2)) == 0
