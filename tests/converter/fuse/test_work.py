"""The kernel's part of a graph is found once, so that plan, storage and written graph agree."""

from __future__ import annotations

from pathlib import Path

import attending
import onnx_ir as ir
import pytest
from attending import Spelling
from layers import ours
from lowered import lower
from normed import residual

import graphs
from bf16kit.runtime.kernel import DOMAIN
from converter.fuse import work
from converter.fuse.attention import SelectionMask, attentions
from converter.fuse.epilogues import Epilogue, epilogue
from converter.fuse.norms import norms
from converter.fuse.products import Product, products
from converter.fuse.work import KernelWork
from converter.graph.types import InferTypes
from converter.passes import run


def test_the_kernel_s_products_are_found_once_for_an_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If plan and graph judged a product separately, it could be in one and not in the other."""
    asked: list[str] = []

    def counted(product: Product) -> Epilogue:
        asked.append(product.node.name or "")
        return epilogue(product)

    monkeypatch.setattr(work, "epilogue", counted)
    made = lower(tmp_path / "m" / "1", graphs.mlp((32, 64, 32)))
    assert asked == ["matmul0", "matmul1"]
    assert len(ours(made)) == 2


def test_a_product_that_is_not_in_the_work_is_neither_planned_nor_replaced(
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


def test_attention_and_normalisation_are_found_once_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the graph were searched a second time, the plan could give other reasons for the nodes."""
    monkeypatch.setattr(work, "attentions", lambda _: [])
    monkeypatch.setattr(work, "norms", lambda _: [])
    assert not ours(lower(tmp_path / "a" / "1", attending.attention(Spelling())))
    assert not ours(lower(tmp_path / "n" / "1", residual()))


@pytest.mark.parametrize("mask", ["add_first", "where", "none"])
def test_attention_is_found_again_in_a_clone_by_names(mask: str) -> None:
    """Queries, keys, values and masks are inputs of the graph or outputs of its nodes."""
    model = run([InferTypes()], ir.from_proto(attending.attention(Spelling(mask=mask))))
    clone = model.clone()
    (here,), (there,) = attentions(model), KernelWork.of(model, set()).attentions_in(clone)
    assert [node.graph for node in (*there.nodes, there.softmax, there.values)] == [clone.graph] * (len(here.nodes) + 2)
    assert [node.name for node in there.nodes] == [node.name for node in here.nodes]
    assert (there.softmax.name, there.values.name) == (here.softmax.name, here.values.name)
    read = [
        [found.q.value, found.k.value, found.v.value]
        + [each.condition if isinstance(each, SelectionMask) else each for each in found.masks]
        for found in (here, there)
    ]
    assert [value.name for value in read[1]] == [value.name for value in read[0]]
    mine = {*clone.graph.inputs, *(output for node in clone.graph for output in node.outputs)}
    assert all(value in mine for value in read[1])


def test_a_sum_that_is_normalised_is_found_again_in_a_clone_by_names() -> None:
    model = run([InferTypes()], ir.from_proto(residual()))
    clone = model.clone()
    (here,), (there,) = norms(model), KernelWork.of(model, set()).norms_in(clone)
    assert here.add is not None
    assert there.add is not None
    assert (there.add.name, there.result.name, there.x.name) == (here.add.name, here.result.name, here.x.name)
    assert there.add.graph is there.result.graph is clone.graph
    assert there.x is there.add.outputs[0]
    assert [there.scale, there.bias] == [clone.graph.initializers["w"], clone.graph.initializers["b"]]


def test_products_are_found_again_in_a_clone_by_names() -> None:
    model = run([InferTypes()], ir.from_proto(graphs.mlp((32, 64, 32))))
    found = KernelWork.of(model, {"w0", "w1"})
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
