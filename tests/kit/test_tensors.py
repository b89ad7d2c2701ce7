"""Specs: dtypes under their three names, and the checks of a request's tensors."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from bf16kit.messages.errors import InvalidRequest
from bf16kit.numerics.tensors import BY_NAME, BY_OIP, BY_ONNX, TensorSpec, check_feeds, describe

SPECS = (
    TensorSpec("ids", "int64", ("batch", "seq")),
    TensorSpec("mask", "int64", ("batch", "seq")),
    TensorSpec("scale", "float32", ("batch", 2)),
)


def feeds(**changes: NDArray[Any]) -> dict[str, NDArray[Any]]:
    plain: dict[str, NDArray[Any]] = {
        "ids": np.zeros((2, 5), np.int64),
        "mask": np.zeros((2, 5), np.int64),
        "scale": np.zeros((2, 2), np.float32),
    }
    return {name: array for name, array in (plain | changes).items() if array.dtype != np.void}


GONE = np.empty(0, np.void)


def test_dtypes_agree_under_their_three_names() -> None:
    for number, dtype in BY_ONNX.items():
        assert BY_NAME[dtype.name] is BY_OIP[dtype.oip] is dtype
        if dtype.name != "string":
            assert onnx.helper.tensor_dtype_to_np_dtype(number) == dtype.numpy
            assert dtype.numpy.name == dtype.name
    assert [BY_NAME[name].oip for name in ("bfloat16", "float32", "string")] == ["BF16", "FP32", "BYTES"]
    assert BY_NAME["bfloat16"].numpy == np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"more": np.zeros(1)}, "unknown input 'more'; the model's inputs are ids, mask, scale"),
        ({"mask": GONE}, "input 'mask' is missing"),
        ({"ids": np.zeros((2, 5), np.int32)}, "input 'ids' has dtype int32, expected int64"),
        ({"ids": np.zeros(5, np.int64)}, r"shape \[5\] of rank 1, expected \[batch,seq\]"),
        ({"scale": np.zeros((2, 3), np.float32)}, r"shape \[2, 3\], expected \[batch,2\]: dimension 1 must be 2$"),
        ({"mask": np.zeros((2, 4), np.int64)}, r"'mask' has shape \[2, 4\].*: dimension 1 must be 5$"),
        ({"scale": np.zeros((1, 2), np.float32)}, r"'scale' has shape \[1, 2\].*: dimension 0 must be 2$"),
    ],
)
def test_invalid_inputs_are_rejected_with_the_reason(changes: dict[str, NDArray[Any]], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_feeds(SPECS, feeds(**changes))


def test_valid_inputs_give_the_size_of_every_named_dimension_and_shapes_have_descriptions() -> None:
    assert check_feeds(SPECS, feeds()) == {"batch": 2, "seq": 5}
    assert describe(("batch", "seq", 384)) == "[batch,seq,384]"
    assert describe(()) == "[]"
