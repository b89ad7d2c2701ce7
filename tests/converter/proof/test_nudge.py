"""The reference with its weights moved by a few ulps, to stand for another fp32 program; its weights are mapped."""

from __future__ import annotations

from pathlib import Path

import artifacts
import numpy as np
import pytest
from peaks import measured_alone

from bf16kit.runtime.loading import load_reference
from converter.model import FP32_ROUNDOFF
from converter.proof.nudge import open_nudged

LOAD = """
import sys
from pathlib import Path
import numpy as np
import onnx_ir as ir
from bf16kit.artifact import Artifact
from converter.model import FP32_ROUNDOFF
from converter.process.memory import map_large_blocks
from converter.proof.nudge import open_nudged
from peaks import anonymous, peak_anonymous
small, large, scratch = map(Path, sys.argv[1:4])
map_large_blocks()
def opened(path):
    artifact = Artifact.open(path)
    source = None
    if sys.argv[4] == "source":
        source = ir.load(path / "reference.onnx")
        restored = {name: artifact.restore(name) for name in source.graph.initializers}
        for name, array in restored.items():
            source.graph.initializers[name].const_value = ir.Tensor(array, name=name)
    before = anonymous()
    with peak_anonymous() as peak:
        runtime = open_nudged(artifact, source, np.random.default_rng(0), FP32_ROUNDOFF, scratch)
        assert runtime.run(artifact.golden().inputs)["y"].any()
    return peak.bytes - before, artifact.manifest.source.bytes
opened(small)  # its libraries are in memory from here on
print(*opened(large))
"""


@pytest.mark.long
@pytest.mark.parametrize("given", ["artifact", "source"])
def test_the_nudged_weights_are_mapped(tmp_path: Path, given: str) -> None:
    """The model has eight tables of 6.4 MB; they are nudged one at a time, in blocks that take another 16 MB."""
    small = artifacts.write_tables(tmp_path / "small" / "1", rows=64).path
    large = artifacts.write_tables(tmp_path / "large" / "1", rows=25_000).path
    peak, size = map(int, measured_alone(LOAD, str(small), str(large), str(tmp_path), given).split())
    assert peak / size < 0.8, f"{peak / size:.2f} times the weights"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "small"]


def test_outputs_move_by_fp32_noise(tmp_path: Path) -> None:
    artifact = artifacts.write_mlp(tmp_path / "1")
    feed = artifact.golden().inputs
    expected = load_reference(artifact).run(feed)["y"]
    found = open_nudged(artifact, None, np.random.default_rng(0), FP32_ROUNDOFF, tmp_path).run(feed)["y"]
    assert 0 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-5
