"""Messages that would take far more memory than their bytes are rejected before protobuf parses them; others pass."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from loopback import infer_request
from swelling import SWELLING
from wireedits import field

from bf16kit.messages.errors import Cancelled, InvalidRequest
from bf16kit.protocol import inference_pb2 as pb
from service.wire.skim import parser, peek_model, peek_model_and_version

REQUEST = pb.DESCRIPTOR.message_types_by_name["ModelInferRequest"]
QUESTION = pb.DESCRIPTOR.message_types_by_name["ModelMetadataRequest"]
LARGE = 4 << 20  # well over the size that is parsed unchecked; messages that expand are rejected at this size


def parse(data: bytes, held: list[int] | None = None) -> pb.ModelInferRequest:
    message = parser(REQUEST)(data, (held if held is not None else []).append)
    assert isinstance(message, pb.ModelInferRequest)
    return message


@pytest.mark.parametrize("what", [name for name in SWELLING if name not in ("shape", "int64_contents", "strings")])
def test_a_message_that_expands_in_memory_is_rejected(what: str) -> None:
    data = SWELLING[what](LARGE)
    said = r"more than 65536 fields|a string of \d+ bytes, expected at most 1048576|Error parsing"
    with pytest.raises((InvalidRequest, DecodeError), match=said):
        parse(data)


@pytest.mark.parametrize("what", ["shape", "int64_contents"])
def test_integers_are_limited_and_counted_with_their_size_in_memory(what: str) -> None:
    held: list[int] = []
    data = SWELLING[what]((8 << 20) - 16)
    parse(data, held)
    assert held[0] == len(data)
    assert held[-1] >= 16 * len(data)
    with pytest.raises(InvalidRequest, match="more than 8388608 integers in shapes and contents"):
        parse(SWELLING[what]((8 << 20) + 1))


def test_an_integer_of_ten_bytes_counts_as_one() -> None:
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="INT8", shape=[900_000]).contents.int_contents.extend([-1] * 900_000)
    assert parse(message.SerializeToString()) == message


def test_a_message_of_a_client_that_has_left_is_not_parsed() -> None:
    def left(nbytes: int) -> None:
        raise Cancelled("the client left")

    with pytest.raises(Cancelled):
        parser(REQUEST)(field(1, b"m" * (32 << 10)), left)


def test_a_small_message_is_not_limited() -> None:
    assert len(parse(field(5, b"") * (8 << 10)).inputs) == 8 << 10


def test_large_tensors_pass_raw_and_typed() -> None:
    raw = infer_request(x=np.zeros((64, 3, 224, 224), np.float32))
    assert parse(raw.SerializeToString()) == raw
    typed = pb.ModelInferRequest(model_name="m")
    tensor = typed.inputs.add(name="x", datatype="FP32", shape=[4 << 20])
    tensor.contents.fp32_contents.extend(np.zeros(4 << 20).tolist())
    assert parse(typed.SerializeToString()) == typed
    words = pb.ModelInferRequest(model_name="m")
    words.inputs.add(name="x", datatype="BYTES", shape=[60_000]).contents.bytes_contents.extend([b"word"] * 60_000)
    words.parameters["headers"].string_param = "h" * (1 << 20)
    assert parse(words.SerializeToString()) == words


@pytest.mark.parametrize("end", [b"\x0a", b"\x0a\xff", b"\x0e", b"\x08" + b"\xff" * 11, b"\x0a\xff\xff\xff\xff\x0f"])
def test_truncated_and_invalid_messages_are_left_to_protobufs_error(end: bytes) -> None:
    with pytest.raises(DecodeError):
        parse(field(1, b"m" * (32 << 10)) + end)


def test_a_message_without_tensors_has_its_own_size_limit() -> None:
    question = parser(QUESTION, 64 << 10)

    def ask(data: bytes) -> None:
        question(data, lambda nbytes: None)

    ask(field(1, b"m" * (63 << 10)))
    with pytest.raises(InvalidRequest, match="the request has 65540 bytes, expected at most 65536 for a ModelMetadata"):
        ask(field(1, b"m" * (64 << 10)))


@pytest.mark.parametrize(("name", "version"), [("echo", ""), ("echo", "3"), ("n" * 127, "1"), ("é", "1")])
def test_the_model_of_a_request_is_known_before_the_message_is_parsed(name: str, version: str) -> None:
    message = pb.ModelInferRequest(model_name=name, model_version=version, id="7", raw_input_contents=[b"x"])
    assert peek_model_and_version(message.SerializeToString()) == (name, version)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x0a", pb.ModelInferRequest(model_name="n" * 128).SerializeToString(), field(3, b"id") + field(1, b"m")],
    ids=["nothing", "cut short", "a long name", "another order"],
)
def test_the_model_is_not_known_if_the_message_begins_differently(data: bytes) -> None:
    assert peek_model_and_version(data)[0] == ""


@pytest.mark.parametrize(
    "behind",
    [
        field(1, b"slow"),
        field(2, b"9"),
        field(3, b"id") + field(7, b"x" * 200) + field(1, b"slow"),
        b"\x8a\x00\x04slow",  # the tag in two bytes, which protobuf accepts
        field(7, b"x") * 64 + field(1, b"slow"),
        b"\x12\x85\x80\x00" + b"9" * 5,
        b"\x3a\x05x",
    ],
    ids=["a model", "a version", "behind others", "a long tag", "behind many", "a long length", "cut short"],
)
def test_the_model_is_not_known_if_another_may_be_named_later(behind: bytes) -> None:
    """If a field is repeated, protobuf takes the last: one model would be checked and another one run."""
    assert peek_model_and_version(field(1, b"quick") + field(2, b"1") + behind) == ("", "")


def test_the_model_known_before_parsing_equals_the_parsed_one() -> None:
    draw, known = random.Random(7), 0
    pieces = [field(n, text) for n in range(1, 9) for text in (b"", b"a", b"3", b"\x0a\x01b", b"c" * 130)]
    pieces += [b"\x8a\x00\x01z", b"\x08\x01", b"\x0b\x0c", b"\x3a\x81\x00c"]
    for _ in range(20_000):
        data = field(1, b"m") + b"".join(draw.choices(pieces, k=draw.randrange(5)))
        if (asked := peek_model_and_version(data)) == ("", ""):
            continue
        with suppress(DecodeError):
            message = parse(data)
            assert asked == (message.model_name, message.model_version)
            known += 1
    assert known > 500


class TestNamedModel:
    """The model of a request of any size, read before the request is parsed."""

    def test_the_model_of_a_normal_request(self) -> None:
        message = pb.ModelInferRequest(model_name="m", model_version="3", id="7")
        message.inputs.add(name="x", datatype="FP32", shape=[1, 1 << 20])
        message.raw_input_contents.append(bytes(4 << 20))
        assert peek_model(message.SerializeToString()) == "m"

    def test_the_last_of_two_names_counts_as_in_protobuf(self) -> None:
        one, other = (pb.ModelInferRequest(model_name=name).SerializeToString() for name in ("one", "other"))
        data = one + pb.ModelInferRequest(raw_input_contents=[bytes(100)]).SerializeToString() + other
        assert peek_model(data) == pb.ModelInferRequest.FromString(data).model_name == "other"

    @pytest.mark.parametrize("data", [b"", b"\x0a", b"\xff" * 20, b"\x0b\x0c", b"\x0a\x01m\x12", b"\x10\x01"])
    def test_bytes_that_are_no_message_give_no_wrong_name(self, data: bytes) -> None:
        assert peek_model(data) in ("", "m")

    @given(st.binary(max_size=200))
    def test_any_valid_message_is_read_as_by_protobuf(self, data: bytes) -> None:
        try:
            name = pb.ModelInferRequest.FromString(data).model_name
        except DecodeError:
            peek_model(data)  # must not raise
            return
        assert peek_model(data) in ("", name)
