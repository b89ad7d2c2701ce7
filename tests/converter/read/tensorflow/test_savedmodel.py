"""``saved_model.pb``: the choice of a signature, and the operators that TensorFlow would run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from savedmodels import STRING, meta_graph, mlp_graph, node, tensor, write

from bf16kit.messages.errors import Bf16kitError, ConversionError, SourceError, UsageError
from converter.read.tensorflow.messages import message
from converter.read.tensorflow.operators import COMPUTING, RESTORING, refusal
from converter.read.tensorflow.savedmodel import ServedSignature, choose

Signatures = Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]
_IN, _OUT = {"x": tensor("x:0", -1, 4)}, {"y": tensor("y:0", -1, 4)}
_NODES = (node("x", "Placeholder"), node("y", "Relu", "x"))


def _refused(path: Path, kind: type[Bf16kitError], signature: str | None = None) -> str:
    with pytest.raises(kind) as refused:
        choose(path, signature)
    return str(refused.value)


def _parsed(chosen: ServedSignature) -> Any:
    graph = message("MetaGraph")()
    graph.ParseFromString(chosen.graph)
    return graph


def test_the_default_signature_is_chosen_and_assets_and_objects_are_removed(tmp_path: Path) -> None:
    graph = mlp_graph()
    graph.assets.append(b"\x12\x05words")
    graph.objects = b"\x0a\x00"
    chosen = choose(write(tmp_path, graph), None)
    assert (chosen.signature, chosen.inputs, chosen.outputs) == ("serving_default", {"x": "x:0"}, {"y": "call:0"})
    given = _parsed(chosen)
    assert [found.name for found in given.graph.node] == ["x", "w", "call", "restore"]
    assert not given.assets
    assert not given.objects


def test_fields_that_are_not_declared_here_are_kept_for_tensorflow(tmp_path: Path) -> None:
    graph = mlp_graph()
    node_with_more = graph.graph.node[0].SerializeToString() + b"\x22\x04/cpu"  # field 4: the device
    graph.graph.node[0].ParseFromString(node_with_more)
    assert b"/cpu" in choose(write(tmp_path, graph), None).graph


def _several(*names: str) -> Signatures:
    return dict.fromkeys(names, (_IN, _OUT))


def test_a_signature_is_chosen_by_name_and_an_unknown_one_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path, meta_graph(_NODES, _several("embed", "serving_default", "__saved_model_init_op")))
    assert choose(path, "embed").signature == "embed"
    assert choose(path, None).signature == "serving_default"
    said = _refused(path, UsageError, "wrong")
    assert said == f"--signature wrong: {path / 'saved_model.pb'} has embed and serving_default"


def test_without_a_default_the_only_signature_is_chosen_and_several_are_rejected(tmp_path: Path) -> None:
    assert choose(write(tmp_path / "one", meta_graph(_NODES, _several("embed"))), None).signature == "embed"
    path = write(tmp_path / "two", meta_graph(_NODES, _several("a", "b")))
    assert "no signature 'serving_default'; choose one with --signature: a and b" in _refused(path, UsageError)


def test_a_model_without_signatures_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    path = write(tmp_path, meta_graph(_NODES, {}))
    assert "tf.saved_model.save(module, directory, signatures=" in _refused(path, ConversionError)


def test_the_graph_for_serving_is_chosen_among_several(tmp_path: Path) -> None:
    training = meta_graph(_NODES, _several("train"), tags=("train",))
    path = write(tmp_path / "a", training, meta_graph(_NODES, _several("embed")))
    assert choose(path, None).signature == "embed"
    path = write(tmp_path / "b", training, meta_graph(_NODES, _several("embed"), tags=("serve", "tpu")))
    said = _refused(path, ConversionError)
    assert "holds 2 graphs, expected exactly one with the single tag 'serve' (train; serve, tpu)" in said


def test_an_output_with_the_name_of_an_input_is_renamed(tmp_path: Path) -> None:
    graph = meta_graph(_NODES, {"serving_default": (_IN, {"x": tensor("y:0", -1, 4)})})
    chosen = choose(write(tmp_path, graph), None)
    assert chosen.outputs == {"x_output": "y:0"}
    assert chosen.notes == ("output 'x' was renamed to 'x_output', because an input has the same name",)


_UNKNOWN_RANK = tensor("x:0")
_UNKNOWN_RANK.shape.unknown_rank = True


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"x": tensor("x:0", -1, dtype=STRING)}, "input 'x' of signature 'serving_default' holds strings"),
        ({"x": tensor("x:0", -1, dtype=14)}, "is bfloat16; tf2onnx would write fp16 in its place"),
        ({"x": _UNKNOWN_RANK}, "has no known rank"),
        ({"x": message("TensorInfo")(sparse=b"\x0a\x01v")}, "is sparse or ragged"),
        ({"x": message("TensorInfo")(composite=b"\x0a\x00")}, "is sparse or ragged"),
    ],
)
def test_inputs_that_are_not_plain_tensors_of_numbers_are_rejected(
    tmp_path: Path, inputs: Mapping[str, Any], said: str
) -> None:
    path = write(tmp_path, meta_graph(_NODES, {"serving_default": (inputs, _OUT)}))
    assert said in _refused(path, ConversionError)


def test_an_input_without_a_tensor_and_two_signatures_with_one_name_are_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "a", meta_graph(_NODES, {"serving_default": ({"x": tensor("")}, _OUT)}))
    assert "input 'x' is not a tensor" in _refused(path, SourceError)
    graph = meta_graph(_NODES, _several("serving_default"))
    graph.signatures.append(graph.signatures[0])
    assert "two signatures have the same name" in _refused(write(tmp_path / "b", graph), SourceError)


# --- operators that it would run --------------------------------------------------------------------------------------


def _with(op: str) -> Any:
    """Return a graph with ``op`` between x and y."""
    nodes = (node("x", "Placeholder"), node("odd", op, "x"), node("y", "Relu", "odd"))
    return meta_graph(nodes, _several("serving_default"))


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("PyFunc", "it runs Python code"),
        ("EagerPyFunc", "it runs Python code"),
        ("ReadFile", "it opens files"),
        ("WriteFile", "it opens files"),
        ("SaveV2", "it opens files"),
        ("RestoreV2", "it opens files"),
        ("TFRecordDataset", "it opens files"),
        ("LookupTableFindV2", "a table of words or numbers"),
        ("HashTableV2", "a table of words or numbers"),
        ("StringSplitV2", "it works on strings"),
        ("PrintV2", "it prints"),
        ("AssignAddVariableOp", "it changes a variable"),
        ("XlaCallModule", "ONNX has no counterpart"),
    ],
)
def test_operators_that_are_not_converted_are_named_before_tensorflow_runs(tmp_path: Path, op: str, why: str) -> None:
    said = _refused(write(tmp_path, _with(op)), ConversionError)
    assert f"\n  {op}: {why}" in said
    assert "(node 'odd')" in said
    assert refusal(op)[1] in said


def _hidden(place: str) -> Any:
    """Return a graph in which a signature reaches a PyFunc by another way than its inputs."""
    odd, body = node("odd", "PyFunc"), [node("z", "Identity")]
    if place == "control input":
        return meta_graph([odd, node("y", "Relu", "x", "^odd"), node("x", "Placeholder")], _several("serving_default"))
    call = node("y", "PartitionedCall", "x", call="f")
    functions = {"f": [odd]}
    if place == "function of a function":
        functions = {"f": [node("z", "PartitionedCall", call="g")], "g": [odd]}
    elif place == "operator named like a function":
        call = node("y", "f", "x")
    elif place == "list of functions":
        call = node("y", "StatelessCase", "x")
        call.attr.add(key="branches").value.list.func.add(name="f")
        call.op = "If"
    elif place == "attribute of a function's attribute":
        call = node("y", "PartitionedCall", "x", call="harmless")
        call.attr[0].value.func.attr.add(key="body").value.func.name = "f"
        functions["harmless"] = body
    elif place == "second node of one name":
        return meta_graph([node("y", "Relu", "x"), node("y", "PyFunc"), node("x", "Placeholder")], _several("s"))
    return meta_graph([node("x", "Placeholder"), call], _several("serving_default"), functions=functions)


@pytest.mark.parametrize(
    "place",
    [
        "control input",
        "function",
        "function of a function",
        "operator named like a function",
        "list of functions",
        "attribute of a function's attribute",
        "second node of one name",
    ],
)
def test_operators_are_found_wherever_a_signature_reaches_them(tmp_path: Path, place: str) -> None:
    assert "PyFunc: it runs Python code" in _refused(write(tmp_path, _hidden(place)), ConversionError)


def test_operators_that_a_signature_does_not_reach_are_not_rejected(tmp_path: Path) -> None:
    graph = meta_graph(
        [*_NODES, node("odd", "PyFunc", "x")], _several("serving_default"), functions={"f": [node("r", "ReadFile")]}
    )
    assert choose(write(tmp_path, graph), None).outputs == {"y": "y:0"}


def test_functions_that_call_each_other_in_a_circle_are_accepted(tmp_path: Path) -> None:
    functions = {"f": [node("a", "PartitionedCall", call="g")], "g": [node("b", "PartitionedCall", call="f")]}
    nodes = (node("x", "Placeholder"), node("y", "PartitionedCall", "x", call="f"))
    assert choose(write(tmp_path, meta_graph(nodes, _several("s"), functions=functions)), None).signature == "s"


def test_an_error_counts_the_operators_that_it_does_not_list(tmp_path: Path) -> None:
    nodes = [node("x", "Placeholder"), *(node(f"o{n}", f"Odd{n}", f"o{n - 1}" if n else "x") for n in range(8))]
    path = write(tmp_path, meta_graph(nodes, {"s": (_IN, {"y": tensor("o7:0", -1)})}))
    assert _refused(path, ConversionError).endswith("\n  and 3 others")


def test_names_of_thousands_of_characters_are_cut_in_messages(tmp_path: Path) -> None:
    long = "\n" + "n" * 60_000
    odd = meta_graph([node("x", "Placeholder"), node("y", long, "x")], _several(long))
    for number, graph in enumerate(
        (
            odd,
            meta_graph(_NODES, _several(long, "other")),
            meta_graph(_NODES, _several(*(f"{k:03d}" + "n" * 200 for k in range(100)))),
            meta_graph(_NODES, {long: (_IN, {})}),
            meta_graph(_NODES, {long: ({long: tensor("x:0", 1, dtype=STRING)}, _OUT)}),
            meta_graph(
                [node("x", "Placeholder"), node(long, "Relu", "x", dtype=14)], {"s": (_IN, {"y": tensor(long)})}
            ),
        )
    ):
        path = write(tmp_path / str(number), graph)
        with pytest.raises(Bf16kitError) as refused:
            choose(path, None)
        assert len(str(refused.value)) < 3000, number
        assert "\nn" not in str(refused.value)


def test_a_graph_that_computes_in_bfloat16_is_rejected(tmp_path: Path) -> None:
    nodes = (node("x", "Placeholder"), node("y", "Relu", "x", dtype=14))
    said = _refused(write(tmp_path, meta_graph(nodes, _several("s"))), ConversionError)
    assert "node 'y' (Relu) computes in bfloat16" in said
    assert "the dtype policy 'float32'" in said


@pytest.mark.parametrize("op", ["PyFunc", "WriteFile", "SaveV2", "ReadFile", "MatMul"])
def test_restoring_variables_may_not_run_other_operators(tmp_path: Path, op: str) -> None:
    graph = mlp_graph()
    graph.graph.library.function[1].node.append(node("odd", op))
    said = _refused(write(tmp_path, graph), ConversionError)
    assert f"restoring its variables would run the operator {op} (node 'odd' in function 'restoring')" in said


def test_no_list_of_operators_has_one_that_opens_files_or_runs_code() -> None:
    dangerous = {
        "PyFunc",
        "EagerPyFunc",
        "ReadFile",
        "WriteFile",
        "SaveV2",
        "PrintV2",
        "ImmutableConst",
        "DebugIdentityV2",
    }
    assert not dangerous & (COMPUTING | RESTORING)
    assert not {op for op in COMPUTING if "Table" in op or "File" in op or "Reader" in op or "Dataset" in op}


# --- damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"\x00", b"\x12\xff\xff\xff\xff\x0f", b"text", b"\x12\x02\x0a"])
def test_files_that_are_not_protocol_buffers_are_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "saved_model.pb").write_bytes(content)
    assert "truncated or damaged" in _refused(tmp_path, SourceError)


def test_an_empty_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").touch()
    assert "holds no graph" in _refused(tmp_path, SourceError)


def test_a_truncated_file_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path) / "saved_model.pb"
    path.write_bytes(path.read_bytes()[:-3])
    assert "truncated or damaged" in _refused(tmp_path, SourceError)


def test_a_file_beyond_the_limit_of_protocol_buffers_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "saved_model.pb").open("wb") as file:
        file.truncate(1 << 31)  # a sparse file takes no disk space
    assert "is 2147483648 bytes; the limit for a protocol buffer is 2147483647" in _refused(tmp_path, SourceError)


def test_a_link_out_of_the_directory_is_rejected(tmp_path: Path) -> None:
    inside = write(tmp_path / "inside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "saved_model.pb").symlink_to(inside / "saved_model.pb")
    assert "is a link out of the model's directory" in _refused(tmp_path / "outside", SourceError)
