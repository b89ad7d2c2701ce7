"""The memory of a reference: its weights are in pages that the system can reclaim."""

from __future__ import annotations

from pathlib import Path

import artifacts
import pytest
from peaks import measured_alone

LOAD = """
import sys
from pathlib import Path
from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime.loading import load_reference
from peaks import anonymous, peak_anonymous
small, large, scratch = map(Path, sys.argv[1:])
load_reference(Artifact.open(small), threads=1, scratch=scratch)  # its libraries are in memory from here on
artifact = Artifact.open(large)
before = anonymous()
with peak_anonymous() as peak:
    reference = load_reference(artifact, threads=1, scratch=scratch)
    assert reference.run(artifact.golden().inputs)["y"].any()
print(peak.bytes - before, artifact.manifest.source.bytes)
"""


@pytest.mark.parametrize(("memory", "at_least", "below"), [(False, 0.0, 0.5), (True, 1.0, 3.0)])
def test_mapped_weights_are_not_held_in_memory(tmp_path: Path, memory: bool, at_least: float, below: float) -> None:
    """Eight tables of 6.4 MB are rebuilt one at a time. If they cannot be mapped, all of them are in memory."""
    small = artifacts.write_tables(tmp_path / "small" / "1", rows=64).path
    large = artifacts.write_tables(tmp_path / "large" / "1", rows=25_000).path
    scratch = "/dev/shm" if memory else str(tmp_path)
    peak, size = map(int, measured_alone(LOAD, str(small), str(large), scratch).split())
    assert at_least <= peak / size < below, f"{peak / size:.2f} times the weights"
