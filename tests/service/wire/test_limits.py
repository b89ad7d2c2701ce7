"""Requests that would take far more memory or time than their bytes are rejected; others pass."""

import gzip
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from loopback import LoopbackModel, infer_request
from swelling import SWELLING
from wireedits import field

from bf16kit.messages.errors import Cancelled, InvalidRequest
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.contract import Bounds
from bf16kit.service.request import Reply, Request
from bf16kit.service.wire.codec import InferenceCodec
from bf16kit.service.wire.limits import MessageReader

REQUEST = pb.DESCRIPTOR.message_types_by_name["ModelInferRequest"]
QUESTION = pb.DESCRIPTOR.message_types_by_name["ModelMetadataRequest"]
LARGE = 4 << 20  # well over the size that is parsed unchecked; messages that expand are rejected at this size


def parse(data: bytes, held: list[int] | None = None, max_bytes: int = 1 << 30) -> pb.ModelInferRequest:
    message = MessageReader(REQUEST, max_bytes)(data, (held if held is not None else []).append)
    assert isinstance(message, pb.ModelInferRequest)
    return message


@pytest.mark.parametrize("what", [name for name in SWELLING if name not in ("shape", "int64_contents", "strings")])
def test_a_message_that_expands_in_memory_is_rejected(what: str) -> None:
    data = SWELLING[what](LARGE)
    said = r"more than 65536 fields|a string of \d+ bytes, expected at most 1048576|cannot be parsed"
    with pytest.raises(InvalidRequest, match=said):
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
    with pytest.raises(InvalidRequest, match="cannot be parsed"):
        parse(field(1, b"m" * (32 << 10)) + end)


def test_a_message_without_tensors_has_its_own_size_limit() -> None:
    question = MessageReader(QUESTION, 64 << 10)

    def ask(data: bytes) -> None:
        question(data, lambda nbytes: None)

    ask(field(1, b"m" * (63 << 10)))
    with pytest.raises(InvalidRequest, match="the request has 65540 bytes, expected at most 65536 for a ModelMetadata"):
        ask(field(1, b"m" * (64 << 10)))


# --- compressed messages ----------------------------------------------------------------------------------------------

MESSAGE = infer_request(x=np.zeros((4, 1000), np.float32))
DATA = MESSAGE.SerializeToString()
Compress = Callable[[bytes], bytes]


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zlib.compress, lambda data: zlib.compress(data, 9)])
def test_a_message_is_restored_and_counted_with_its_full_size(compress: Compress) -> None:
    held: list[int] = []
    assert parse(compress(DATA), held) == MESSAGE
    assert held[-1] == len(DATA)


def test_a_large_request_that_has_ended_before_its_turn_is_not_decompressed() -> None:
    def over(nbytes: int) -> None:
        held.append(nbytes)
        raise Cancelled("the client left")

    held: list[int] = []
    data = gzip.compress(bytes(1 << 20))
    with pytest.raises(Cancelled):
        MessageReader(REQUEST, 1 << 20)(data, over)
    assert held == [len(data)]


def test_a_small_request_does_not_wait_for_a_large_one() -> None:
    read, small = MessageReader(REQUEST, 1 << 20), gzip.compress(DATA)
    large = pb.ModelInferRequest(raw_input_contents=[bytes(1 << 19)])

    def meanwhile(nbytes: int) -> None:  # the large request is being decompressed or parsed
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(read, small, lambda _: None).result(timeout=20) == MESSAGE

    assert read(gzip.compress(large.SerializeToString()), meanwhile) == large


@pytest.mark.parametrize("data", [b"\x0a", b"\x78", b"\x08\x1f\x8b"])
def test_an_uncompressed_request_is_not_taken_for_a_compressed_one(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot be parsed"):
        parse(data)


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_a_request_that_is_too_large_once_decompressed_is_rejected(compress: Compress) -> None:
    assert parse(compress(DATA), max_bytes=len(DATA)) == MESSAGE
    with pytest.raises(InvalidRequest, match=f"more than {len(DATA)} bytes once it is decompressed"):
        parse(compress(DATA + b"\0" * (64 << 20)), max_bytes=len(DATA))


@pytest.mark.parametrize("damage", [lambda z: z[:-5], lambda z: z + b"\0", lambda z: z[:20] + b"\xff\xff" + z[22:]])
def test_a_request_that_cannot_be_decompressed_is_rejected(damage: Compress) -> None:
    with pytest.raises(InvalidRequest, match="cannot be decompressed"):
        parse(damage(gzip.compress(DATA)))


# --- the model's limits -----------------------------------------------------------------------------------------------

IDS = TensorSpec("ids", "int64", ("batch", "seq"))
STATES = TensorSpec("states", "float32", ("batch", "seq", 384))


def codec(
    bounds: Bounds, inputs: tuple[TensorSpec, ...] = (IDS,), outputs: tuple[TensorSpec, ...] = (STATES,), rows: int = 0
) -> InferenceCodec:
    return InferenceCodec(LoopbackModel(inputs=inputs, outputs=outputs, bounds=bounds, max_batch_size=rows))


def decode(codec: InferenceCodec, message: pb.ModelInferRequest) -> Request:
    return codec.decode(message)[0]


def ids(*shape: int) -> pb.ModelInferRequest:
    return infer_request(ids=np.zeros(shape, np.int64))


@pytest.mark.parametrize(
    ("shape", "dim", "size", "bound"),
    [((1, 513), "seq", 513, 512), ((0, 513), "seq", 513, 512), ((9, 2), "batch", 9, 8)],
)
def test_a_dimension_over_its_limit_is_rejected_by_name(
    shape: tuple[int, ...], dim: str, size: int, bound: int
) -> None:
    bounded = codec(Bounds({"seq": 512, "batch": 8}))
    with pytest.raises(InvalidRequest, match=f"dimension {dim!r} is {size}, expected at most {bound} "):
        decode(bounded, ids(*shape))
    assert decode(bounded, ids(8, 512)).rows == 8


def test_a_huge_dimension_of_an_empty_tensor_is_rejected_unless_the_model_has_it() -> None:
    for shape in ((2**26, 0), (0, 2**26), (2**20 + 1, 0)):
        with pytest.raises(InvalidRequest, match="too large, although it is empty"):
            decode(codec(Bounds()), ids(*shape))
    for shape in ((0, 512), (8, 0), (0, 0), (2**20, 0)):
        assert decode(codec(Bounds()), ids(*shape)).feeds["ids"].shape == shape
    image = TensorSpec("image", "float32", ("batch", 3, 1024, 1024))
    message = infer_request(image=np.zeros((0, 3, 1024, 1024), np.float32))
    assert decode(codec(Bounds(), (image,)), message).rows == 0


def test_a_response_whose_size_is_known_is_rejected_before_the_run() -> None:
    bounded = codec(Bounds(response_bytes=2 * 100 * 384 * 4))
    assert decode(bounded, ids(2, 100)).rows == 2
    with pytest.raises(InvalidRequest, match="310272 bytes or more, expected at most 307200;"):
        decode(bounded, ids(2, 101))


def test_only_requested_outputs_count_in_their_requested_datatype() -> None:
    pooled = TensorSpec("pooled", "float32", ("batch", 384))
    bounded = codec(Bounds(response_bytes=2 * 384 * 4), outputs=(STATES, pooled))
    message = ids(2, 100)
    with pytest.raises(InvalidRequest, match="ask for fewer rows"):
        decode(bounded, message)
    message.outputs.add(name="pooled")
    assert decode(bounded, message).outputs == ("pooled",)
    message = ids(1, 4)
    message.outputs.add(name="states").parameters["datatype"].string_param = "BF16"
    assert decode(bounded, message).outputs == ("states",)


def test_a_string_output_counts_4_bytes_per_element_before_the_run() -> None:
    labels = TensorSpec("labels", "string", ("batch",))
    bounded = codec(Bounds(response_bytes=40), outputs=(labels,))
    assert decode(bounded, ids(10, 1)).rows == 10
    with pytest.raises(InvalidRequest, match="44 bytes or more"):
        decode(bounded, ids(11, 1))


def test_a_response_is_measured_before_it_is_encoded() -> None:
    found = TensorSpec("found", "float32", ("hits",))
    bounded = codec(Bounds(response_bytes=40), outputs=(found,))
    _, options = bounded.decode(ids(1, 1))
    response = bounded.encode("", Reply({"found": np.zeros(10, np.float32)}, "bf16"), options)
    assert len(response.raw_output_contents[0]) == 40
    with pytest.raises(InvalidRequest, match="44 bytes or more, expected at most 40"):
        bounded.encode("", Reply({"found": np.zeros(11, np.float32)}, "bf16"), options)
