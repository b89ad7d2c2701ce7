"""What the kernel does of a graph is found once: plan, storage and the graph that is written say the same."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from layers import ours
from lowered import lower

import graphs
from bf16kit.runtime.kernel import DOMAIN
from converter.cpukernel import work
from converter.cpukernel.epilogues import Epilogue, epilogue
from converter.cpukernel.products import Product, products
from converter.cpukernel.work import Work
from converter.graph.types import InferTypes
from converter.passes import run


def test_it_is_found_once_for_an_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that plan and graph judged apart could be in the one and not in the other."""
    asked: list[str] = []

    def counted(product: Product) -> Epilogue:
        asked.append(product.node.name or "")
        return epilogue(product)

    monkeypatch.setattr(work, "epilogue", counted)
    made = lower(tmp_path / "m" / "1", graphs.mlp((32, 64, 32)))
    assert asked == ["matmul0", "matmul1"]
    assert len(ours(made)) == 2


def test_a_product_that_is_not_in_the_work_is_neither_planned_nor_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        work, "products", lambda *given: {n: p for n, p in products(*given).items() if n.name != "matmul0"}
    )
    made = lower(tmp_path / "m" / "1", graphs.mlp((32, 64, 32)))
    reasons = {entry.name: entry.reason for entry in made.plan.nodes["cpu"]}
    assert [name for name, reason in reasons.items() if "CPU kernel" in reason] == ["matmul1", "add1"]
    assert [node.name for node in made.graph("cpu").node if node.domain == DOMAIN] == ["matmul1"]
    assert {entry.name for entry in made.artifact.manifest.tensors if entry.panels is not None} == {"w1"}


def test_it_is_found_again_in_a_clone_by_names() -> None:
    model = run([InferTypes()], ir.from_proto(graphs.mlp((32, 64, 32))))
    found = Work.of(model, {"w0", "w1"})
    assert found.panels == {"w0": 1, "w1": 1}
    clone = model.clone()
    there = found.fused_in(clone)
    assert [each.product.node.name for each in there] == ["matmul0", "matmul1"]
    for here, moved in zip(found.fused, there, strict=True):
        assert moved.product.node.graph is clone.graph
        assert moved.product.weight is clone.graph.initializers[here.product.weight.name or ""]
        assert moved.epilogue.bias is not None
        assert moved.epilogue.bias is clone.graph.initializers[moved.epilogue.bias.name or ""]
        assert [node.name for node in moved.epilogue.nodes] == [node.name for node in here.epilogue.nodes]
        assert moved.epilogue.result.name == here.epilogue.result.name
        assert moved.epilogue.result is not here.epilogue.result
