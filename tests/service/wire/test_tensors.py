"""Tensors in messages: which raw and typed contents are read or rejected, and the exactness of bf16 and fp16."""

import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bf16kit.messages.errors import InvalidRequest
from bf16kit.numerics.tensors import BY_NAME, BY_OIP, TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.wire.tensors import (
    decode_contents,
    decode_raw,
    encode_raw,
    packed,
    top_classes,
    widen,
    wire_dtype,
)

BYTES = BY_OIP["BYTES"]
FP32 = BY_OIP["FP32"]
SPEC = TensorSpec("x", "float32", ("n",))


def test_raw_tensors_are_views_of_the_message() -> None:
    data = np.zeros(1 << 20, np.float32).tobytes()
    tracemalloc.start()
    decode_raw("x", FP32, (1 << 20,), data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 16


def test_a_column_major_output_is_sent_row_major() -> None:
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert encode_raw(FP32, array) == np.arange(6, dtype=np.float32).tobytes()


def test_empty_dimensions_and_scalars_are_legal() -> None:
    for shape in ((0,), (0, 5), (3, 0, 2)):
        assert decode_raw("x", FP32, shape, b"").shape == shape
        assert decode_raw("x", BYTES, shape, b"").shape == shape
    assert decode_raw("x", FP32, (), b"\0\0\x80\x3f") == 1.0


@pytest.mark.parametrize("shape", [(-2, -3), (2, 4), (2**40, 2**40), (2**62, 4)])  # the last product is 0 in 64 bits
def test_a_shape_that_does_not_fit_the_bytes_is_rejected_before_any_allocation(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="'x'"):
        decode_raw("x", FP32, shape, bytes(24))


def test_a_bool_is_0_or_1() -> None:
    with pytest.raises(InvalidRequest):
        decode_raw("x", BY_OIP["BOOL"], (2,), b"\x01\x02")


# --- BYTES ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(), max_size=6))
@example(["a", ""])
def test_strings_survive_a_round_trip(texts: list[str]) -> None:
    array = np.array([*texts, ""], np.object_)[:-1]
    again = decode_raw("x", BYTES, (len(texts),), encode_raw(BYTES, array))
    assert again.tolist() == texts


@pytest.mark.parametrize(
    ("count", "data"),
    [
        (1, b"\x01\0\0"),
        (2**40, bytes(64)),  # and none is read
        (1, b"\x05\0\0\0abcd"),
        (1, b"\xff\xff\xff\xffabcd"),
        (2, b"\x04\0\0\0abcd\x01\0"),
        (1, b"\x01\0\0\0ab"),
        (1, b"\x01\0\0\0\xff"),  # not UTF-8
        (65_537, bytes(4 * 65_537)),
    ],
)
def test_broken_framing_and_too_many_strings_are_rejected(count: int, data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_raw("x", BYTES, (count,), data)


@given(st.binary(max_size=40), st.integers(0, 5))
def test_any_bytes_are_decoded_as_strings_or_rejected(data: bytes, count: int) -> None:
    try:
        decoded = decode_raw("x", BYTES, (count,), data)
    except InvalidRequest:
        return
    assert encode_raw(BYTES, decoded) == data


# --- typed contents ---------------------------------------------------------------------------------------------------


def typed(fields: Mapping[str, Sequence[float]]) -> pb.InferTensorContents:
    contents = pb.InferTensorContents()
    for field, values in fields.items():
        getattr(contents, field).extend(values)
    return contents


@pytest.mark.parametrize(
    ("oip", "filled"),
    [
        ("BF16", {"fp32_contents": [1.0, 2.0]}),
        ("FP32", {"fp32_contents": [1.0]}),
        ("FP32", {"int_contents": [1, 2]}),
        ("FP32", {"fp32_contents": [1.0, 2.0], "fp64_contents": [3.0]}),
        ("INT8", {"int_contents": [1, 128]}),
        ("UINT16", {"uint_contents": [1, 65536]}),
    ],
)
def test_contents_that_do_not_fit_are_rejected(oip: str, filled: dict[str, list[float]]) -> None:
    with pytest.raises(InvalidRequest):
        decode_contents("x", BY_OIP[oip], (2,), typed(filled))


# --- bf16 and fp16 for fp32 -------------------------------------------------------------------------------------------


def test_half_precision_is_widened_exactly_and_rounded_to_nearest_even() -> None:
    """Rounding to bf16 is tested for all values in tests/kit. Too large a value becomes infinite."""
    wide = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0 - 2**-9, np.inf, 3.4e38, 1e-40], np.float32)
    bf16 = decode_raw("x", BY_OIP["BF16"], wide.shape, encode_raw(BY_OIP["BF16"], wide))
    np.testing.assert_array_equal(bf16, wide.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(widen(bf16)[:4], np.array([1.0, 1.0, 1.0 + 2**-6, -1.0], np.float32))
    wide = np.array([2049.0, 2051.0, 65519.99, 65520.0, -65520.0, 1e30, np.nan, 2.0**-25], np.float32)
    fp16 = decode_raw("x", BY_OIP["FP16"], wide.shape, encode_raw(BY_OIP["FP16"], wide))
    assert widen(fp16).dtype == np.float32
    np.testing.assert_array_equal(widen(fp16), [2048.0, 2052.0, 65504.0, np.inf, -np.inf, np.inf, np.nan, 0.0])


def test_an_output_that_needs_no_conversion_is_packed_without_a_copy() -> None:
    array = np.ones(3, np.float32)
    assert packed(FP32, array) is array


def test_an_fp32_input_takes_fp32_bf16_and_fp16_and_an_integer_input_its_own_datatype() -> None:
    assert [wire_dtype(SPEC, FP32, d).oip for d in ("FP32", "BF16", "FP16")] == ["FP32", "BF16", "FP16"]
    for datatype in ("FP64", "INT32", "", "float32"):
        with pytest.raises(InvalidRequest, match=f"'x' has datatype '{datatype}', expected FP32"):
            wire_dtype(SPEC, FP32, datatype)
    for datatype in ("INT32", "BF16"):
        with pytest.raises(InvalidRequest, match="expected INT64"):
            wire_dtype(TensorSpec("ids", "int64", ("n",)), BY_NAME["int64"], datatype)


def test_typed_numbers_read_in_pieces_are_unchanged() -> None:
    values = np.arange(-70_000, 80_001, dtype=np.int64)
    contents = pb.InferTensorContents(int64_contents=values.tolist())
    np.testing.assert_array_equal(decode_contents("x", BY_OIP["INT64"], values.shape, contents), values)


# --- the classification extension: the largest values of each row, in Triton's format ---------------------------------


def classes(array: Any, count: int, dtype: Any = np.float32, *, batched: bool = True) -> Any:
    return top_classes("y", np.asarray(array, dtype), count, batched=batched).tolist()


def test_a_row_is_all_values_of_one_sample_and_without_a_batch_the_whole_output() -> None:
    assert classes(np.arange(8).reshape(2, 2, 2), 1) == [["3.000000:3"], ["7.000000:3"]]
    assert classes([[1, 4], [3, 2]], 3, np.int32, batched=False) == ["4:1", "3:2", "2:3"]
    assert classes(2.5, 1, batched=False) == ["2.500000:0"]
    assert classes(np.zeros((0, 3)), 2) == classes(np.zeros((0, 3)), 2, batched=False) == []
    assert classes(np.zeros((2, 0)), 2) == [[], []]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_integers_are_written_exactly_and_ordered_over_their_whole_range(dtype: Any) -> None:
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    assert classes(np.array([[least, most, 5]], dtype), 3, dtype) == [[f"{most}:1", "5:2", f"{least}:0"]]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_float_types_are_written_in_the_same_way(dtype: Any) -> None:
    assert classes([[0.5, 2.0]], 2, dtype) == [["2.000000:1", "0.500000:0"]]


def test_equal_values_keep_their_order_and_nan_comes_last() -> None:
    row = [[np.nan, 1.0, np.inf, 1.0, -np.inf]]
    assert classes(row, 5) == [["inf:2", "1.000000:1", "1.000000:3", "-inf:4", "nan:0"]]
    many = classes(np.tile([[0.0, 1.0]], 500), 1000)[0]
    assert [int(entry.partition(":")[2]) for entry in many] == [*range(1, 1000, 2), *range(0, 1000, 2)]


def test_more_strings_than_a_response_may_hold_are_rejected() -> None:
    assert np.shape(classes(np.zeros((2, 40_000)), 32_768)) == (2, 32_768)
    with pytest.raises(InvalidRequest):
        classes(np.zeros((2, 40_000)), 32_769)


def test_many_rows_take_the_memory_of_one() -> None:
    rows = np.zeros((64, 1 << 16), np.float32)
    tracemalloc.start()
    try:
        classes(rows, 1)
        assert tracemalloc.get_traced_memory()[1] < rows.nbytes / 4
    finally:
        tracemalloc.stop()
