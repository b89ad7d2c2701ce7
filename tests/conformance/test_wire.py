"""Tensors as the suite reads and writes them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from conformance.protocol import inference_pb2 as pb
from conformance.wire import DATATYPES, Malformed, decode, encode, fill_contents, filled, read_contents, same


@pytest.mark.parametrize("name", DATATYPES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()])
def test_what_is_encoded_is_decoded(name: str, shape: tuple[int, ...]) -> None:
    tensor = filled(name, shape)
    assert same(decode(name, shape, encode(tensor)), tensor.array)


@pytest.mark.parametrize("name", [name for name, kind in DATATYPES.items() if kind.field])
def test_typed_contents_are_read_as_they_were_filled(name: str) -> None:
    tensor, contents = filled(name, (2, 3)), pb.InferTensorContents()
    fill_contents(tensor, contents)
    assert same(read_contents(name, (2, 3), contents), tensor.array)


def test_halves_have_no_typed_contents() -> None:
    for name in ("FP16", "BF16"):
        with pytest.raises(Malformed):
            fill_contents(filled(name, (1,)), pb.InferTensorContents())


def test_bf16_is_made_of_the_bits_of_its_values() -> None:
    bits = filled("BF16", (3,), [1.0, -2.5, 0.125]).array
    assert bits.view(ml_dtypes.bfloat16).astype(np.float64).tolist() == [1.0, -2.5, 0.125]


@pytest.mark.parametrize(
    "raw", [b"", b"\x01\0\0", b"\x02\0\0\0a", b"\x01\0\0\0a\x01\0\0\0b", b"\x01\0\0\0ab", b"\xff\xff\xff\xffa"]
)
def test_bytes_are_framed_exactly(raw: bytes) -> None:
    with pytest.raises(Malformed):
        decode("BYTES", (1,), raw)


def test_a_raw_tensor_has_exactly_its_bytes() -> None:
    for raw in (bytes(15), bytes(17), b""):
        with pytest.raises(Malformed):
            decode("FP32", (1, 4), raw)
    with pytest.raises(Malformed):
        decode("FLOAT", (1,), bytes(4))


def test_answers_differ_by_the_last_bits_of_floats_alone() -> None:
    ones = np.ones(3, np.float32)
    assert same(ones, ones + np.float32(1e-6))
    assert not same(ones, ones + np.float32(1e-2))
    assert not same(ones, ones.astype(np.float64))
    assert not same(ones, ones[:2])
    assert not same(np.arange(3), np.arange(1, 4))
