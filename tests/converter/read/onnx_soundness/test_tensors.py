"""Invalid tensors are rejected by name when the file is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper

import graphs
from bf16kit.messages.errors import SourceError
from converter.read import onnx_soundness
from converter.read.onnx_file import read_graph


def _weight(model: ModelProto) -> TensorProto:
    return model.graph.initializer[0]


def _external(model: ModelProto, **entries: str) -> None:
    graphs.refer(_weight(model), "w.bin", 0, 2048)
    for entry in _weight(model).external_data:
        entry.value = entries.get(entry.key, entry.value)


_LIES: dict[str, tuple[Callable[[ModelProto], object], str]] = {
    "data too short": (
        lambda m: setattr(_weight(m), "raw_data", b"\0" * 8),
        r"'w0' of shape \[16, 32\] needs 2048 bytes",
    ),
    "data too long": (
        lambda m: setattr(_weight(m), "raw_data", bytes(2049)),
        "needs 2048 bytes, and the file has 2049",
    ),
    "no data": (lambda m: _weight(m).ClearField("raw_data"), "needs 512 numbers, and the file has 0"),
    "negative dimension": (lambda m: _weight(m).dims.append(-1), r"'w0' has the shape \[16, 32, -1\]"),
    "product beyond 64 bits": (lambda m: _weight(m).dims.extend([2**62, 2**62]), "has the shape"),
    "zero beside a product beyond 64 bits": (lambda m: _weight(m).dims.extend([0, 2**62, 2**62]), "has the shape"),
    "unknown dtype": (lambda m: setattr(_weight(m), "data_type", 99), "unknown dtype 99"),
    "no dtype": (lambda m: setattr(_weight(m), "data_type", 0), "unknown dtype 0"),
    "segments": (lambda m: setattr(_weight(m).segment, "end", 3), "is in segments"),
    "external data nowhere": (lambda m: _external(m, location=""), "whose name is missing"),
    "external offset": (lambda m: _external(m, offset="-4"), "has the offset '-4'"),
    "external length of words": (lambda m: _external(m, length="²"), "has the length '²'"),
    "external length": (lambda m: _external(m, length="2044"), "needs 2048 bytes, and its entry says 2044"),
    "raw and typed data": (
        lambda m: _weight(m).float_data.append(1.0),
        "'w0' of FLOAT has data in float_data as well",
    ),
    "data of two types": (
        lambda m: m.graph.initializer.append(
            TensorProto(name="t", data_type=TensorProto.INT64, dims=[1], int64_data=[1], int32_data=[1])
        ),
        "'t' of INT64 has data in int32_data as well",
    ),
}


@pytest.mark.parametrize("lie", _LIES)
def test_a_file_with_an_invalid_tensor_is_rejected_by_name(tmp_path: Path, lie: str) -> None:
    make, said = _LIES[lie]
    model = graphs.mlp()
    make(model)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "w.bin").write_bytes(bytes(2048))
    with pytest.raises(SourceError, match=said) as raised:
        read_graph(tmp_path / "m.onnx")
    assert str(raised.value).startswith(f"{tmp_path}/m.onnx: ")


def test_numbers_in_typed_fields_are_counted_as_their_dtype_packs_them(tmp_path: Path) -> None:
    several: dict[str, Any] = {
        "FLOAT16": [1.0, 2.0, 3.0],
        "INT4": [1, 2, 3],
        "COMPLEX64": [1j, 2j, 3j],
        "STRING": [b"a", b"b", b"c"],
    }
    for dtype, numbers in several.items():
        model = graphs.mlp()
        model.graph.initializer.append(helper.make_tensor("t", getattr(TensorProto, dtype), [3], numbers))
        onnx_soundness.check(tmp_path / "m.onnx", model)
        model.graph.initializer[-1].dims[0] = 7
        with pytest.raises(SourceError, match=r"tensor 't' of shape \[7\] needs"):
            onnx_soundness.check(tmp_path / "m.onnx", model)
