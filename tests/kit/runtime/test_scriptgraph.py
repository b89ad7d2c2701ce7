from __future__ import annotations

import pytest

from bf16kit.runtime.scriptgraph import argument_names


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ("aten::neg(Tensor self) -> Tensor", ["self"]),
        (
            "aten::to.device(Tensor(a) self, Device device, ScalarType dtype, bool copy=False) -> Tensor(a)",
            ["self", "device", "dtype", "copy"],
        ),
        (
            "aten::zeros(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None) -> Tensor",
            ["size", "dtype", "layout"],
        ),
        (
            "aten::conv2d(Tensor input, SymInt[2] stride=[1, 1], Tensor? bias=None) -> (Tensor, Tensor)",
            ["input", "stride", "bias"],
        ),
        ("aten::rand() -> Tensor", []),
        ("(no schema)", []),
    ],
)
def test_argument_names_of_an_operator_are_read_from_its_schema(schema: str, names: list[str]) -> None:
    assert argument_names(schema) == names
