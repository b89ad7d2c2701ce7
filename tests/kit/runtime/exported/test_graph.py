"""A program may contain only known operators, arguments, inputs and outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import exportedfiles as files
import pytest
import torch

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.exported.archive import read_archive
from bf16kit.runtime.exported.graph import Program, TensorInput, parse_program
from bf16kit.runtime.exported.values import Device, DType, Ref

Edit = Callable[[Any], object]


def parse(archive: bytes) -> Program:
    found = read_archive(memoryview(bytearray(archive)))
    return parse_program(found.program, found.tensors)


def graph(program: Any) -> Any:
    return program["graph_module"]["graph"]


def signature(program: Any) -> Any:
    return program["graph_module"]["signature"]


def test_inputs_tensors_nodes_and_outputs_of_a_program_are_read(mlp_archive: bytes) -> None:
    program = parse(mlp_archive)
    assert [edge.dtype for edge in program.inputs] == ["float32"]
    assert program.inputs[0].name == "x"
    assert isinstance(program.inputs[0].shape[0], str)
    assert program.inputs[0].shape[1:] == (16,)
    assert sorted(program.tensors.values()) == ["down.bias", "down.weight", "up.bias", "up.weight"]
    assert [node.target.split(".")[3] for node in program.graph.nodes] == ["linear", "relu", "linear"]
    assert program.outputs == ("output",)


class Arguments(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = torch.arange(x.shape[0], dtype=torch.float32, device=x.device)
        first, second = torch.chunk(x, 2, -1)
        picked = x[:, torch.tensor([0, 1])]
        return {"sum": first + second, "rows": rows, "kept": torch.where(mask, x, -1.0), "picked": picked}


def test_dtypes_and_devices_are_read_and_outputs_are_named_by_their_keys() -> None:
    program = parse(files.exported(Arguments(), torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool)))
    assert program.outputs == ("sum", "rows", "kept", "picked")
    given = [value for node in program.graph.nodes for value in (*node.args, *node.kwargs.values())]
    assert DType("float32") in given
    assert Device() in given
    assert Ref("x") in given
    assert program.inputs[1] == TensorInput("mask", "bool", program.inputs[0].shape)


def first_node(**fields: Any) -> Edit:
    return lambda program: files.node(program).update(fields)


def argument(value: Any) -> Edit:
    return lambda program: files.node(program)["inputs"][0].update(arg=value)


def result(**value: Any) -> Edit:
    return lambda program: files.node(program).update(outputs=[value])


def edit_input(kind: str, value: Any) -> Edit:
    return lambda program: signature(program)["input_specs"].append({kind: value})


def in_place(name: str) -> Edit:
    return lambda program: files.node(program, 1).update(
        target="torch.ops.aten.relu_.default",
        inputs=[{"name": "self", "arg": {"as_tensor": {"name": name}}, "kind": 1}],
    )


def nested(program: Any) -> None:
    inner = json.loads(json.dumps(graph(program)))
    for _ in range(12):
        outer = json.loads(json.dumps(graph(program)))
        outer["nodes"][0]["inputs"] = [{"name": "", "arg": {"as_graph": {"name": "g", "graph": inner}}, "kind": 1}]
        inner = outer
    program["graph_module"]["graph"] = inner


REFUSED: dict[str, tuple[Edit, str]] = {
    "a function of a module of torch's": (first_node(target="torch.os.system"), "uses the operator 'torch.os.system'"),
    "a loader of libraries": (first_node(target="torch.ops.load_library"), "uses the operator"),
    "a loader of pickles": (first_node(target="torch.load"), "uses the operator 'torch.load'"),
    "a file": (first_node(target="torch.ops.aten.from_file.default"), "uses the operator"),
    "a function of Python's": (first_node(target="_operator.attrgetter"), "uses the operator"),
    "a power": (first_node(target="_operator.pow"), "uses the operator"),
    "an operator of somebody's": (first_node(target="torch.ops.mine.op.default"), "ep.run_decompositions"),
    "an extension": (first_node(target="#x:y"), "uses the operator '#x:y'"),
    "an operator that writes to what it is given": (first_node(target="torch.ops.aten.add.out"), "uses the operator"),
    "a name with more in it": (first_node(target="torch.ops.aten.add.Tensor\n.x"), "uses the operator"),
    "another graph operator": (first_node(target="torch.ops.higher_order.cond"), "uses the operator"),
    "an argument that is an operator": (argument({"as_operator": "torch.os.system"}), "of kind 'as_operator'"),
    "an argument that is an object": (argument({"as_custom_obj": {"name": "x", "class_fqn": "y"}}), "as_custom_obj"),
    "a complex number": (argument({"as_complex": {"real": 0, "imag": 1}}), "as_complex"),
    "two tags": (argument({"as_int": 1, "as_none": True}), "expected a value with one tag, got 2"),
    "a name that is code": (argument({"as_tensor": {"name": "x); exit("}}), "is not a name that torch gives"),
    "a whole number that is none": (argument({"as_int": 1.5}), "expected a 64-bit integer, got 1.5"),
    "a number beyond": (argument({"as_int": 2**64}), "has the number '18446744073709551616', the limit is"),
    "an unknown dtype": (argument({"as_scalar_type": 99}), "scalar type 99"),
    "an unknown memory format": (argument({"as_memory_format": 9}), "memory format 9"),
    "a sparse layout": (argument({"as_layout": 1}), "a layout other than"),
    "a text that is no option": (argument({"as_string": "a\nb"}), "is not an option that an operator takes"),
    "a size that is a text": (argument({"as_sym_ints": [{"as_int": "exit()"}]}), "expected a 64-bit integer"),
    "a size of another kind": (argument({"as_sym_int": {"as_expr": "exit()"}}), "a size of kind 'as_expr'"),
    "a result that is an object": (result(as_custom_obj={"name": "x"}), "gives a value of kind 'as_custom_obj'"),
    "a result with a name that is code": (result(as_tensor={"name": "x = 1; y"}), "is not a name that torch gives"),
    "a target that is a number": (first_node(target=5), "expected a string, got 5"),
    "a flag that is a number": (argument({"as_bool": 1}), "expected true or false, got 1"),
    "an input of an unknown dtype": (
        lambda program: graph(program)["tensor_values"]["x"].update(dtype=10),
        "input 'x' has torch's scalar type 10",
    ),
    "graphs in graphs": (nested, "more than 8 deep"),
    "no nodes": (lambda program: graph(program).pop("nodes"), "a field 'nodes' is missing"),
    "nodes that are a text": (lambda program: graph(program).update(nodes="x"), "expected a list"),
    "another schema": (lambda program: program["schema_version"].update(major=9), "has schema version 9 of torch.exp"),
    "an input that is an object": (edit_input("custom_obj", {}), "has an input of kind 'custom_obj'"),
    "an input that is a number": (
        edit_input("user_input", {"arg": {"as_sym_int": {"as_name": "k"}}}),
        r"has a non-tensor input \(sym_int\)",
    ),
    "no input": (
        lambda program: signature(program).update(input_specs=signature(program)["input_specs"][:-1]),
        "has no input that is a tensor",
    ),
    "a tensor that is not there": (
        edit_input("buffer", {"arg": {"name": "b"}, "buffer_name": "nowhere", "persistent": True}),
        "reads a tensor 'nowhere' \\(b\\), which the archive does not hold",
    ),
    "a state": (
        lambda program: signature(program)["output_specs"].insert(
            0, {"buffer_mutation": {"arg": {"name": "y"}, "buffer_name": "count"}}
        ),
        r"keeps a state \(buffer mutation count\)",
    ),
    "a weight that is written to": (in_place("p_up_weight"), "writes into 'p_up_weight', which may share memory with"),
    "an input that is written to": (in_place("x"), "writes into 'x', which may share memory with"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_program_with_unknown_or_unsafe_content_is_rejected(mlp_archive: bytes, kind: str) -> None:
    edit, said = REFUSED[kind]
    with pytest.raises(RuntimeFailure, match=said):
        parse(files.changed(mlp_archive, files.MODEL, edit))


def test_a_program_with_too_many_nodes_is_rejected(mlp_archive: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bf16kit.runtime.exported.graph._MOST", 2)
    with pytest.raises(RuntimeFailure, match="has 3 nodes, over the limit of 2"):
        parse(mlp_archive)


@pytest.mark.parametrize(
    "edit",
    [
        lambda program: program.update(guards_code=["__import__('os').system('touch executed')"]),
        lambda program: program.update(verifiers=["x"]),
        lambda program: program.update(range_constraints={"exit()": {"min_val": 0, "max_val": 1}}),
        lambda program: graph(program)["tensor_values"].update(other={"sizes": [{"as_expr": {"expr_str": "exit()"}}]}),
        lambda program: files.node(program)["metadata"].update(source_fn_stack="x,torch.os.system"),
        lambda program: program["graph_module"]["module_call_graph"][0]["signature"].update(
            in_spec='[1, {"type": "collections.defaultdict", "context": {}, "children_spec": []}]'
        ),
    ],
)
def test_fields_that_torchs_loader_evaluates_are_ignored(mlp_archive: bytes, edit: Edit) -> None:
    assert parse(files.changed(mlp_archive, files.MODEL, edit)) == parse(mlp_archive)


def test_a_dimension_that_is_an_expression_is_free_and_its_text_is_not_evaluated(mlp_archive: bytes) -> None:
    def edit(program: Any) -> None:
        graph(program)["tensor_values"]["x"]["sizes"][0] = {"as_expr": {"expr_str": "exit()"}}

    assert parse(files.changed(mlp_archive, files.MODEL, edit)).inputs[0].shape == ("?", 16)


def test_assertions_that_the_exporter_added_are_ignored(mlp_archive: bytes) -> None:
    def edit(program: Any) -> None:
        check = {"name": "a", "arg": {"as_tensor": {"name": "x"}}, "kind": 1}
        target = "torch.ops.aten._assert_tensor_metadata.default"
        graph(program)["nodes"].insert(0, {"target": target, "inputs": [check], "outputs": [], "metadata": {}})

    assert parse(files.changed(mlp_archive, files.MODEL, edit)) == parse(mlp_archive)
