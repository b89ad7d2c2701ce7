"""A weight is narrowed in blocks of rows, and the result is the same as for the whole weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from peaks import measured_alone

WRITE = """
import sys
from pathlib import Path
import numpy as np
import onnx_ir as ir
from bf16kit.numerics.rounding import BF16
from bf16kit.numerics.panels import strips
from bf16kit.numerics.residual import Scale
from bf16kit.artifact.weightfile import WeightWriter
from converter.write.roundweights import WeightRounding, Rounding
from converter.graph.initializers import ComputedTensor
from peaks import anonymous, peak_anonymous

def write(path, rows, kind):
    mapped = np.memmap(path / "source", np.float32, mode="r", shape=(rows, 4096)).view(np.ndarray)
    tensor = ir.Tensor(mapped)
    factor = np.float32(1.5)
    folded = ComputedTensor(lambda chosen: mapped[chosen] * factor, tensor)
    scale = Scale(1, np.full(4096, factor))
    weight, scale = (tensor, None) if kind == "plain" else (folded, scale)
    bf16 = np.empty((rows, 4096), BF16)
    passing = WeightRounding(weight, bf16, Rounding("keep", False), lambda _: None)
    with WeightWriter(path / f"{rows}.residual") as residual, WeightWriter(path / f"{rows}.bf16") as file:
        residual.append_chunks(passing.residual(tensor, scale))
        file.append_chunks(strips(bf16, 1))

path, kind = Path(sys.argv[1]), sys.argv[2]
write(path, 16, kind)
before = anonymous()
with peak_anonymous() as peak:
    write(path, 8192, kind)
print(peak.bytes - before, 8192 * 4096 * 4)
"""


def weight(shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "share"), [("plain", 0.5), ("folded", 1.0)])
def test_only_the_bf16_values_of_a_weight_are_all_in_memory_at_once(tmp_path: Path, kind: str, share: float) -> None:
    """The weight of 134 MB is mapped. With a folded scale, marks for the residual are in memory as well."""
    weight((8192, 4096)).tofile(tmp_path / "source")
    peak, size = map(int, measured_alone(WRITE, str(tmp_path), kind).split())
    assert peak < share * size + 40e6, f"{peak / 1e6:.0f} MB for a weight of {size / 1e6:.0f} MB"
