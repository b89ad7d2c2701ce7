"""Names that are not UTF-8 are rejected when the file is read, whatever they name."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphs
from bf16kit.messages.errors import SourceError
from converter.read.onnx_file import read_graph


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("matmul0", "NodeProto.name"),
        ("MatMul", "NodeProto.op_type"),
        ("w0", "(NodeProto.input|TensorProto.name)"),
        ("m0", "NodeProto.(in|out)put"),
        ("tiny", "GraphProto.name"),
        ("batch", "Dimension.dim_param"),
        ("somebody", "ModelProto.producer_name"),
        ("length", "StringStringEntryProto.key"),
        ("w.bin", "StringStringEntryProto.value"),
    ],
)
def test_names_that_are_not_utf_8_are_rejected(tmp_path: Path, text: str, place: str) -> None:
    model = graphs.mlp()
    model.producer_name = "somebody"
    graphs.refer(model.graph.initializer[0], "w.bin", 0, 2048)
    (tmp_path / "w.bin").write_bytes(bytes(2048))
    content = model.SerializeToString()
    assert text.encode() in content
    (tmp_path / "m.onnx").write_bytes(content.replace(text.encode(), b"\xff" * len(text)))
    with pytest.raises(SourceError, match=rf"m.onnx: damaged: {place} b'\\xff.*' is not UTF-8"):
        read_graph(tmp_path / "m.onnx")


def test_documentation_and_metadata_may_have_any_encoding(tmp_path: Path) -> None:
    model = graphs.mlp()
    model.doc_string = "document"
    model.graph.node[0].doc_string = "document"
    model.metadata_props.add(key="author", value="document")
    content = model.SerializeToString().replace(b"document", "Müller".encode("latin-1") + b"ss")
    (tmp_path / "m.onnx").write_bytes(content)
    read_graph(tmp_path / "m.onnx")
