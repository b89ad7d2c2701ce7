"""The limit on what ONNX Runtime makes of a graph's functions, which it inlines before anything else."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from artifacts import write_mlp
from endless import write_nested
from onnx import helper

import graphs
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.loading import load, load_reference
from bf16kit.runtime.ort import inlining
from bf16kit.runtime.ort.inlining import check_inlined_size

OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("d", 1)]


def calling(*operators: tuple[str, str], name: str = "f") -> onnx.FunctionProto:
    """Return a function of these operators, each with its domain."""
    nodes = [helper.make_node(operator, ["in"], ["out"], domain=domain) for operator, domain in operators]
    return helper.make_function("d", name, ["in"], ["out"], nodes, OPSETS)


def saved(tmp_path: Path, node: onnx.NodeProto, *functions: onnx.FunctionProto) -> Path:
    graph = helper.make_graph([node], "g", [graphs.edge("x")], [graphs.edge("y")])
    onnx.save(helper.make_model(graph, functions=functions, opset_imports=OPSETS), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_a_small_file_whose_functions_multiply_is_refused_by_every_load(tmp_path: Path) -> None:
    artifact = write_nested(tmp_path / "m" / "1")
    assert (artifact.path / "cpu.onnx").stat().st_size < 16_000
    with pytest.raises(RuntimeFailure, match=r"cpu\.onnx has more than 500000 nodes once its functions are inlined"):
        load(artifact, "cpu")
    (artifact.path / "reference.onnx").write_bytes((artifact.path / "cpu.onnx").read_bytes())
    with pytest.raises(RuntimeFailure, match=r"reference\.onnx has more than 500000 nodes"):
        load_reference(artifact)


def test_few_nodes_pass_and_run(tmp_path: Path) -> None:
    artifact = write_nested(tmp_path / "m" / "1", calls=3, levels=3)
    load(artifact, "cpu", threads=1).close()


def test_calls_in_subgraphs_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = helper.make_graph([helper.make_node("f", ["x"], ["z"], domain="d")], "b", [], [graphs.edge("z")])
    branch = helper.make_node("If", ["x"], ["y"], then_branch=body, else_branch=body)
    path = saved(tmp_path, branch, calling(*[("Neg", "")] * 5))
    monkeypatch.setattr(inlining, "MOST_NODES", 11)  # If, and 5 nodes in each of its branches
    check_inlined_size(path)
    monkeypatch.setattr(inlining, "MOST_NODES", 10)
    with pytest.raises(RuntimeFailure, match="more than 10 nodes"):
        check_inlined_size(path)


@pytest.mark.parametrize("functions", [[calling(("f", "d"))], [calling(("g", "d")), calling(("f", "d"), name="g")]])
def test_functions_that_call_themselves_are_refused(tmp_path: Path, functions: list[onnx.FunctionProto]) -> None:
    path = saved(tmp_path, helper.make_node("f", ["x"], ["y"], domain="d"), *functions)
    with pytest.raises(RuntimeFailure, match=r"m\.onnx: its function '[fg]' calls itself"):
        check_inlined_size(path)


def test_a_long_chain_of_functions_is_counted_without_recursion(tmp_path: Path) -> None:
    chain = [calling((f"f{i - 1}", "d"), (f"f{i - 1}", "d"), name=f"f{i}") for i in range(1, 5_000)]
    path = saved(tmp_path, helper.make_node("f4999", ["x"], ["y"], domain="d"), calling(("Neg", ""), name="f0"), *chain)
    with pytest.raises(RuntimeFailure, match="more than 500000 nodes"):
        check_inlined_size(path)


def test_graphs_without_functions_and_files_that_are_no_graphs_pass(tmp_path: Path) -> None:
    check_inlined_size(write_mlp(tmp_path / "m" / "1").path / "cpu.onnx")
    (tmp_path / "no.onnx").write_bytes(b"\xff" * 100)
    check_inlined_size(tmp_path / "no.onnx")
