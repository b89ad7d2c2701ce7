"""A whole request for one model: inputs and outputs by name, in the message or in shared memory, and the response."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import LoopbackModel, infer_request

from bf16kit.messages.errors import InvalidRequest, NotFound, Overloaded, Unsupported
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.operations import Region
from bf16kit.service.regions import RegionTable
from bf16kit.service.request import Reply, Request
from bf16kit.service.wire.codec import InferenceCodec, OutputOptions, SharedMemory

MODEL = LoopbackModel(
    inputs=[TensorSpec("ids", "int64", ("batch", "seq")), TensorSpec("mask", "bool", ("batch", "seq"))],
    outputs=[TensorSpec("a", "float32", ("batch", 2)), TensorSpec("b", "float32", ("batch",))],
)
IDS = np.arange(6, dtype=np.int64).reshape(2, 3)
MASK = np.ones((2, 3), np.bool_)


def decode(message: pb.ModelInferRequest, model: LoopbackModel = MODEL) -> Request:
    return InferenceCodec(model).decode(message)[0]


def refuses(words: str, message: pb.ModelInferRequest, model: LoopbackModel = MODEL) -> None:
    with pytest.raises(InvalidRequest, match=words):
        decode(message, model)


def test_inputs_come_in_any_order_raw_or_typed() -> None:
    """MLServer's converters send empty contents beside raw ones."""
    raw, typed = infer_request(mask=MASK, ids=IDS), infer_request(mask=MASK, ids=IDS)
    for tensor in raw.inputs:
        tensor.contents.SetInParent()
    del typed.raw_input_contents[:]
    typed.inputs[0].contents.bool_contents.extend(MASK.ravel().tolist())
    typed.inputs[1].contents.int64_contents.extend(IDS.ravel().tolist())
    for message in (raw, typed):
        request = decode(message)
        np.testing.assert_array_equal(request.feeds["ids"], IDS)
        np.testing.assert_array_equal(request.feeds["mask"], MASK)


def test_inputs_that_do_not_fit_the_model_are_rejected() -> None:
    """The checks of one tensor are those of test_tensors.py."""
    refuses("'x' has 9 rows, expected at most 8", infer_request(x=np.zeros((9, 3), np.float32)), LoopbackModel())
    refuses("'mask' has shape", infer_request(ids=IDS, mask=MASK[:, :2]))
    refuses("'mask' is missing", infer_request(ids=IDS))
    refuses("unknown input 'z'", infer_request(ids=IDS, mask=MASK, z=IDS))
    twice = infer_request(ids=IDS, mask=MASK)
    twice.inputs.append(twice.inputs[0])
    twice.raw_input_contents.append(twice.raw_input_contents[0])
    refuses("'ids' was sent twice", twice)


def test_raw_and_typed_contents_do_not_mix() -> None:
    message = infer_request(ids=IDS, mask=MASK)
    message.inputs[0].contents.int64_contents.extend([1, 2, 3, 4, 5, 6])
    refuses("'ids' has contents beside raw_input_contents", message)
    del message.raw_input_contents[0]
    refuses("raw_input_contents has 1 entries for 2 inputs", message)


@pytest.mark.parametrize(("made", "told"), [("bf16", "bf16"), ("bf16-weights", "bf16"), ("fp32", "fp32")])
def test_the_response_names_the_precision_that_computed_it(made: str, told: str) -> None:
    """Also a response without an id, after one with an id."""
    codec = InferenceCodec(MODEL)
    _, answers = codec.decode(infer_request(ids=IDS, mask=MASK))
    reply = Reply({"a": np.zeros((2, 2), np.float32), "b": np.ones(2, np.float32)}, made)
    for request_id in ("id-1", ""):
        answer = codec.encode(request_id, reply, answers)
        assert answer.id == request_id
        assert {key: value.string_param for key, value in answer.parameters.items()} == {"precision": told}


# --- shared memory ----------------------------------------------------------------------------------------------------

SHARING = LoopbackModel(
    inputs=[TensorSpec(name, "float32", ("batch", 2)) for name in "abc"],
    outputs=[TensorSpec(name, "float32", ("batch", 2)) for name in "yz"],
)
ROW = np.array([[1.0, 2.0]], np.float32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.write_bytes(np.arange(64, dtype=np.float32).tobytes())
    return path


@pytest.fixture
def regions(file: Path) -> RegionTable:
    regions = RegionTable("", file.parent)
    regions.register(Region("r", file.name, 0, 256))
    return regions


@pytest.fixture
def codec(regions: RegionTable) -> InferenceCodec:
    return InferenceCodec(SHARING, SharedMemory(regions))


def place(tensor: Any, offset: int) -> None:
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_byte_size"].int64_param = 8
    tensor.parameters["shared_memory_offset"].int64_param = offset


def shared_request(*shared: str, **sent: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> pb.ModelInferRequest:
    """Return a request for inputs a, b and c. Those of ``shared`` are in shared memory, 16 bytes apart."""
    message = infer_request("echo", **sent)
    for name in shared:
        place(message.inputs.add(name=name, datatype="FP32", shape=[1, 2]), 16 * ord(name) - 16 * ord("a"))
    message.inputs.sort(key=lambda tensor: tensor.name)
    return message


@pytest.mark.parametrize("shared", ["", "a", "b", "ac", "abc"])
def test_the_message_has_an_entry_for_each_input_that_is_not_in_shared_memory(
    codec: InferenceCodec, shared: str
) -> None:
    sent = {name: ROW * 100 * (1 + "abc".index(name)) for name in "abc" if name not in shared}
    feeds = codec.decode(shared_request(*shared, **sent))[0].feeds
    for index, name in enumerate("abc"):
        expected = [[4.0 * index, 4.0 * index + 1]] if name in shared else sent[name]
        np.testing.assert_array_equal(feeds[name], expected)


@pytest.mark.parametrize(("shared", "entries"), [("abc", 1), ("ac", 2), ("a", 3), ("a", 1)])
def test_too_many_or_too_few_raw_entries_are_rejected(codec: InferenceCodec, shared: str, entries: int) -> None:
    """Three entries are as many as there are inputs, including the shared one."""
    message = shared_request(*shared, **{name: ROW for name in "abc" if name not in shared})
    message.raw_input_contents[:] = [ROW.tobytes()] * entries
    with pytest.raises(InvalidRequest, match=f"has {entries} entries for {3 - len(shared)} inputs"):
        codec.decode(message)


def test_typed_contents_and_shared_memory_mix_in_a_request_but_not_in_one_input(codec: InferenceCodec) -> None:
    message = shared_request("a", "b", "c")
    message.inputs[1].parameters.clear()
    message.inputs[1].contents.fp32_contents.extend([7, 8])
    assert codec.decode(message)[0].feeds["b"].tolist() == [[7, 8]]
    message.inputs[0].contents.fp32_contents.extend([7, 8])
    with pytest.raises(InvalidRequest, match="'a' has contents beside raw_input_contents or shared memory"):
        codec.decode(message)


def test_bytes_are_counted_before_they_are_read(codec: InferenceCodec, file: Path) -> None:
    held: list[int] = []
    codec.decode(shared_request("a", "c", b=ROW), reserve=held.append)
    assert held == [8, 8]

    def refuse(nbytes: int) -> None:
        raise Overloaded("no room", "bytes")

    file.write_bytes(b"")  # a read would now fail because the file has shrunk
    with pytest.raises(Overloaded):
        codec.decode(shared_request("a", "b", "c"), reserve=refuse)


def test_an_unknown_region_is_not_found_and_disabled_shared_memory_is_unsupported(
    codec: InferenceCodec, regions: RegionTable
) -> None:
    message = shared_request("a", "b", "c")
    with pytest.raises(Unsupported):
        InferenceCodec(SHARING).decode(message)
    regions.unregister("")
    with pytest.raises(NotFound):
        codec.decode(message)


def test_an_output_is_written_even_if_its_region_is_unregistered_meanwhile(
    codec: InferenceCodec, regions: RegionTable, file: Path
) -> None:
    message = shared_request(a=ROW, b=ROW, c=ROW)
    message.outputs.add(name="z")
    place(message.outputs.add(name="y"), 128)
    _, options = codec.decode(message)
    regions.unregister("")
    response = codec.encode("", Reply({"z": ROW, "y": ROW * 10}, "bf16"), options)
    assert list(response.raw_output_contents) == [ROW.tobytes(), b""]
    placed = {"shared_memory_byte_size", "shared_memory_offset", "shared_memory_region"}
    assert [(o.name, list(o.shape), set(o.parameters)) for o in response.outputs] == [
        ("z", [1, 2], set()),
        ("y", [1, 2], placed),
    ]
    assert np.frombuffer(file.read_bytes(), np.float32)[30:35].tolist() == [30, 31, 10, 20, 34]


def test_an_output_of_numbers_may_be_classes_and_another_not() -> None:
    def classified(model: LoopbackModel, message: pb.ModelInferRequest) -> OutputOptions:
        message.outputs.add(name="y").parameters["classification"].int64_param = 1
        return InferenceCodec(model).decode(message)[1]

    message = shared_request(a=ROW, b=ROW, c=ROW)
    message.outputs.add(name="z")
    response = InferenceCodec(SHARING).encode("", Reply({"z": ROW, "y": ROW}, "bf16"), classified(SHARING, message))
    found = [(o.name, o.datatype, list(o.shape)) for o in response.outputs]
    assert found == [("z", "FP32", [1, 2]), ("y", "BYTES", [1, 1])]
    assert response.raw_output_contents[1] == b"\x0a\0\0\x002.000000:1"
    for dtype in ("string", "bool"):
        model = LoopbackModel(outputs=[TensorSpec("y", dtype, ("batch", 2))])
        with pytest.raises(InvalidRequest, match="only outputs of numbers have classes"):
            classified(model, infer_request(x=np.zeros((1, 3), np.float32)))
