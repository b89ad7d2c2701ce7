"""How the suite encodes and decodes tensors."""

from __future__ import annotations

import numpy as np
import pytest

from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.wire import DATATYPES, Malformed, decode, encode, fill_contents, filled, read_contents, same


@pytest.mark.parametrize("name", DATATYPES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()])
def test_decoding_returns_the_encoded_tensor(name: str, shape: tuple[int, ...]) -> None:
    tensor = filled(name, shape)
    assert same(decode(name, shape, encode(tensor)), tensor.array)


@pytest.mark.parametrize("name", [name for name, kind in DATATYPES.items() if kind.field])
def test_reading_typed_contents_returns_the_filled_tensor(name: str) -> None:
    tensor, contents = filled(name, (2, 3)), pb.InferTensorContents()
    fill_contents(tensor, contents)
    assert same(read_contents(name, (2, 3), contents), tensor.array)


def test_fp16_and_bf16_have_no_typed_contents() -> None:
    for name in ("FP16", "BF16"):
        with pytest.raises(Malformed):
            fill_contents(filled(name, (1,)), pb.InferTensorContents())


def test_bf16_tensors_hold_the_bf16_bits_of_the_values() -> None:
    bits = filled("BF16", (3,), [1.0, -2.5, 0.125]).array
    assert (bits.astype(np.uint32) << 16).view(np.float32).tolist() == [1.0, -2.5, 0.125]


@pytest.mark.parametrize(
    "raw", [b"", b"\x01\0\0", b"\x02\0\0\0a", b"\x01\0\0\0a\x01\0\0\0b", b"\x01\0\0\0ab", b"\xff\xff\xff\xffa"]
)
def test_wrongly_framed_bytes_are_malformed(raw: bytes) -> None:
    with pytest.raises(Malformed):
        decode("BYTES", (1,), raw)


def test_a_raw_tensor_of_the_wrong_size_is_malformed() -> None:
    for raw in (bytes(15), bytes(17), b""):
        with pytest.raises(Malformed):
            decode("FP32", (1, 4), raw)
    with pytest.raises(Malformed):
        decode("FLOAT", (1,), bytes(4))


def test_same_tolerates_only_the_last_bits_of_floats() -> None:
    ones = np.ones(3, np.float32)
    assert same(ones, ones + np.float32(1e-6))
    assert not same(ones, ones + np.float32(1e-2))
    assert not same(ones, ones.astype(np.float64))
    assert not same(ones, ones[:2])
    assert not same(np.arange(3), np.arange(1, 4))
