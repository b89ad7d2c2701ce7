"""A graph's edges: dtypes, and dimensions that are sizes or names."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import pytest
from onnx import TensorProto

import graphs
from bf16kit.messages.errors import ConversionError
from converter.read.signature import input_specs, kind_of, output_specs


def _model(shape: Sequence[int | str | None] | None, dtype: int = TensorProto.FLOAT) -> ir.Model:
    edge = graphs.edge("x", shape, dtype)  # type: ignore[arg-type]  # None: a dimension without a name
    return ir.from_proto(graphs.model([], [edge], [edge]))


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        (["batch", 16], ("batch", 16)),
        ([None, 16], ("x_0", 16)),
        ([-1, 16], ("x_0", 16)),
        ([], ()),
        (["2*n + 1", 1], ("2*n + 1", 1)),
    ],
)
def test_free_dimensions_keep_their_names_or_get_generated_ones(
    shape: list[int | str | None], dims: tuple[int | str, ...]
) -> None:
    assert input_specs(_model(shape))[0].shape == dims
    assert output_specs(_model(shape))[0].shape == dims


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ([2, 0], TensorProto.FLOAT, "'x' has size 0 in dimension 1"),
        (None, TensorProto.FLOAT, "'x' has no known rank"),
        (
            ["n", 2**40, 2**40],
            TensorProto.FLOAT,
            r"'x' is declared as \[n,1099511627776,.*\], which does not fit in any memory",
        ),
        ([2], TensorProto.COMPLEX64, "tensors of plain dtypes only"),
        ([2], TensorProto.FLOAT8E4M3FN, "tensors of plain dtypes only"),
    ],
)
def test_edges_that_cannot_be_served_are_rejected(shape: list[int | str | None] | None, dtype: int, said: str) -> None:
    with pytest.raises(ConversionError, match=said):
        input_specs(_model(shape, dtype))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("logits", "logits"), ("start_Logits", "logits"), ("last_hidden_state", "embedding"), ("y", "other")],
)
def test_the_name_of_an_output_suggests_its_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind
