"""The memory of fp32 references: one that does not fit is not loaded, and one that takes too much fails alone."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from artifacts import write_greedy, write_mlp
from containers import in_container
from peaks import measured_alone

from bf16kit.messages.errors import ArtifactError, ConfigError
from bf16kit.runtime import Runtime
from bf16kit.runtime.memory.weightstore import WeightStore
from bf16kit.service.shadow.referencememory import ReferenceMemory, fp32_bytes

GIB = 1 << 30
# Programs run in a process of their own, because the limit stays in force.
LOADED = """
import sys
from pathlib import Path
import numpy as np
from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import ConfigError, Unavailable
from bf16kit.runtime.loading import load_reference
from bf16kit.system.controlgroup import release_free_memory
from bf16kit.service.shadow.referencememory import ReferenceMemory, fp32_bytes
memory = ReferenceMemory()
def loaded(path):
    artifact = Artifact.open(Path(path))
    load = lambda store: load_reference(artifact, threads=1, weights=store)
    return memory.load(path, fp32_bytes(artifact.manifest), load)
"""
GREEDY = """
x = {"x": np.ones((1, 16), np.float32)}
greedy, mlp = map(loaded, sys.argv[1:])
assert mlp.run(x, ("y",), seconds=60)
for _ in range(2):
    try:
        greedy.run(x, ("y",), seconds=60)
    except Unavailable:
        print("unavailable", greedy.up)
assert mlp.run(x, ("y",), seconds=60) and mlp.up
try:
    memory.load("huge", 1 << 20, lambda store: np.ones(4 << 30, np.uint8))
except ConfigError as error:
    print(str(error)[:26])
mlp.close()
assert loaded(sys.argv[2]).run(x, ("y",), seconds=60)
try:
    np.ones(4 << 30, np.uint8)
except MemoryError:
    print("refused")
"""
BETWEEN_RUNS = """
from peaks import resident
def taken(path, width):
    reference = loaded(path)
    assert reference.run({"x": np.ones((1, width), np.float32)}, ("y",), seconds=60)["y"].any()
    release_free_memory()
    return reference, resident()
small, before = taken(sys.argv[1], 16)
large, after = taken(sys.argv[2], 2048)
print(after - before)
"""


def test_a_run_or_a_load_that_takes_too_much_memory_fails_and_other_references_go_on(tmp_path: Path) -> None:
    greedy, mlp = write_greedy(tmp_path / "greedy" / "1"), write_mlp(tmp_path / "mlp" / "1")
    command = [sys.executable, "-c", LOADED + GREEDY, str(greedy.path), str(mlp.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "unavailable False\nunavailable False\nloading it takes more than\nrefused\n", done.stderr
    assert done.stderr.count("a run of it exceeded the memory that all references may take") == 1
    assert "give the server more memory, or set shadow.rate: 0" in done.stderr


@pytest.mark.long
def test_between_runs_a_reference_takes_a_small_part_of_its_weights(tmp_path: Path) -> None:
    """34 MB here. At the defaults it runs about once a second, for milliseconds."""
    small, large = write_mlp(tmp_path / "small" / "1"), write_mlp(tmp_path / "large" / "1", width=2048)
    grown = int(measured_alone(LOADED + BETWEEN_RUNS, str(small.path), str(large.path)))
    assert grown < fp32_bytes(large.manifest) / 4


def test_the_bytes_of_the_weights_in_fp32(tmp_path: Path) -> None:
    assert fp32_bytes(write_mlp(tmp_path / "mlp" / "1", width=512).manifest) == 2 * 512 * 512 * 4


@pytest.mark.parametrize(
    ("limit", "left", "weights", "refused"),
    [
        (4 * GIB, 2 * GIB, GIB, False),
        (4 * GIB, 2 * GIB, GIB + 1, True),  # a quarter of the container is kept for requests
        (GIB // 8, GIB // 8, GIB // 16, False),
        (GIB // 8, GIB // 8, GIB // 16 + 1, True),  # and at least what runs need
    ],
)
def test_a_reference_without_room_in_the_container_is_not_loaded(
    limit: int, left: int, weights: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_container(monkeypatch, tmp_path, limit=limit, left=left)
    monkeypatch.setattr(resource, "setrlimit", lambda *limits: None)  # it would hold for all tests of this process

    def load(store: WeightStore) -> Runtime:
        raise ArtifactError("it is loaded")

    if not refused:
        with pytest.raises(ArtifactError):
            ReferenceMemory().load("m", weights, load)
        return
    expected = rf"its weights are {weights} bytes in fp32, and \d+ MB are left of the \d+ MB .* set shadow.rate: 0"
    with pytest.raises(ConfigError, match=expected):
        ReferenceMemory().load("m", weights, load)


def test_a_reference_larger_than_the_machines_memory_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_container(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="MB are available on this machine"):
        ReferenceMemory().load("m", 1 << 60, lambda store: pytest.fail("it is loaded"))
