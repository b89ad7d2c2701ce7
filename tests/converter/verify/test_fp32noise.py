"""The noise of a graph: it runs as it is and with its weights moved by a few ulps; the weights are mapped."""

from __future__ import annotations

from pathlib import Path

import artifacts
import numpy as np
import pytest
from lowered import lower
from peaks import measured_alone

import graphs
from converter.source import FP32_ROUNDOFF
from converter.verify.fp32noise import Noise
from converter.verify.running import open_fp32_graph

LOAD = """
import sys
from pathlib import Path
import onnx_ir as ir
from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime.loading import _inputs_and_outputs
from converter.source import FP32_ROUNDOFF
from converter.process.memory import map_large_blocks
from converter.verify.fp32noise import Noise
from converter.verify.running import open_fp32_graph
from peaks import anonymous, peak_anonymous
small, large, scratch = map(Path, sys.argv[1:4])
map_large_blocks()
def opened(path):
    artifact = Artifact.open(path)
    source = ir.load(path / "reference.onnx")
    restored = {name: artifact.restore(name) for name in source.graph.initializers}
    for name, array in restored.items():
        source.graph.initializers[name].const_value = ir.Tensor(array, name=name)
    edges = _inputs_and_outputs(artifact)
    noise = Noise(
        lambda read: open_fp32_graph(source, *edges, scratch, read), [artifact.golden().inputs], FP32_ROUNDOFF, scratch
    )
    before = anonymous()
    with peak_anonymous() as peak:
        assert noise.largest_change("y") > 0
    return peak.bytes - before, artifact.manifest.source.bytes
opened(small)  # its libraries are in memory from here on
print(*opened(large))
"""


@pytest.mark.long
def test_the_perturbed_weights_are_mapped(tmp_path: Path) -> None:
    """The model has eight tables of 6.4 MB; they are perturbed one at a time, in blocks that take another 16 MB."""
    small = artifacts.write_tables(tmp_path / "small" / "1", rows=64).path
    large = artifacts.write_tables(tmp_path / "large" / "1", rows=25_000).path
    peak, size = map(int, measured_alone(LOAD, str(small), str(large), str(tmp_path)).split())
    assert peak / size < 0.8, f"{peak / size:.2f} times the weights"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "small"]


def test_outputs_move_by_fp32_noise(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", graphs.mlp((32, 32, 32)))
    graph, feed = made.prepared.reference, {"x": graphs.values(4, 32)}
    noise = Noise(
        lambda read: open_fp32_graph(graph, made.inputs, made.outputs, tmp_path, read), [feed], FP32_ROUNDOFF, tmp_path
    )
    assert 0 < noise.largest_change("y") < 1e-5
    floats = np.ones((4, 32), np.float32)
    assert noise.without_unstable(floats, -floats, "y", 0) is floats
