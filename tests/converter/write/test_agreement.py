from __future__ import annotations

from pathlib import Path

import attending
import pytest
from attending import Spelling
from lowered import lower
from onnx import ModelProto

import graphs
from bf16kit.messages.errors import ConversionError
from converter.write.graphs import check_graph


@pytest.mark.parametrize(
    ("proto", "name", "label"),
    [(graphs.mlp((32, 64)), "matmul0", "MatMulBf16"), (attending.attention(Spelling()), "summed", "AttentionBf16")],
    ids=["product", "attention"],
)
def test_a_node_of_the_kernel_that_does_not_round_as_planned_is_rejected(
    proto: ModelProto, name: str, label: str, tmp_path: Path
) -> None:
    made = lower(tmp_path / "m" / "1", proto, profiles=["cpu", "cpu-bf16"])
    plan = made.plan.nodes
    for profile in ("cpu", "cpu-bf16"):
        check_graph(made.artifact.file(f"{profile}.onnx"), plan[profile])
    with pytest.raises(ConversionError, match=f"'{name}' should not round its activations, and is bf16kit.{label}"):
        check_graph(made.artifact.file("cpu-bf16.onnx"), plan["cpu"])
    with pytest.raises(ConversionError, match=f"'{name}' should round its activations"):
        check_graph(made.artifact.file("cpu.onnx"), plan["cpu-bf16"])
