"""Requests with inputs and outputs in shared memory: which bytes are read and written, and what is checked first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from loopback import LoopbackModel, infer_request

from bf16kit.messages.errors import InvalidRequest, NotFound, Overloaded, Unsupported
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from service.operations import Region
from service.regions.table import RegionLimits, RegionTable
from service.request import Cancellation, Reply, Request
from service.wire.memory import SharedMemory
from service.wire.outputs import OutputOptions
from service.wire.request import InferenceCodec

MODEL = LoopbackModel(
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
    regions = RegionTable(RegionLimits(""), file.parent)
    regions.register(Region("r", file.name, 0, 256))
    return regions


def place(
    tensor: pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor,
    offset: int,
    byte_size: int = 8,
) -> None:
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_byte_size"].int64_param = byte_size
    tensor.parameters["shared_memory_offset"].int64_param = offset


def request(*shared: str, **sent: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> pb.ModelInferRequest:
    """Return a request for inputs a, b and c. Those of ``shared`` are in shared memory, 16 bytes apart."""
    message = infer_request("echo", **sent)
    for name in shared:
        place(message.inputs.add(name=name, datatype="FP32", shape=[1, 2]), 16 * ord(name) - 16 * ord("a"))
    message.inputs.sort(key=lambda tensor: tensor.name)
    return message


def decode(
    message: pb.ModelInferRequest, memory: SharedMemory, held: list[int] | None = None
) -> tuple[Request, OutputOptions]:
    reserve = None if held is None else held.append
    return InferenceCodec(MODEL, memory).decode(message, 0, None, Cancellation(), reserve)


@pytest.mark.parametrize("shared", ["a", "b", "c", "ab", "ac", "bc", "abc"])
def test_the_message_has_an_entry_for_each_input_that_is_not_in_shared_memory(
    regions: RegionTable, shared: str
) -> None:
    sent = {name: ROW * 100 * (1 + "abc".index(name)) for name in "abc" if name not in shared}
    feeds = decode(request(*shared, **sent), SharedMemory(regions))[0].feeds
    for index, name in enumerate("abc"):
        expected = [[4.0 * index, 4.0 * index + 1]] if name in shared else sent[name]
        np.testing.assert_array_equal(feeds[name], expected)


def test_too_many_or_too_few_raw_entries_are_rejected(regions: RegionTable) -> None:
    for sent in ({}, {"b": ROW}):
        message = request(*(name for name in "abc" if name not in sent), **sent)
        message.raw_input_contents.append(ROW.tobytes())
        with pytest.raises(InvalidRequest, match=rf"has {len(sent) + 1} entries for {len(sent)} inputs"):
            decode(message, SharedMemory(regions))
    message = request("a", b=ROW, c=ROW)
    message.raw_input_contents.append(ROW.tobytes())  # as many as there are inputs, including the shared one
    with pytest.raises(InvalidRequest, match="has 3 entries for 2 inputs"):
        decode(message, SharedMemory(regions))
    del message.raw_input_contents[1:]
    with pytest.raises(InvalidRequest, match="has 1 entries for 2 inputs"):
        decode(message, SharedMemory(regions))


def test_typed_contents_and_shared_memory_mix_in_a_request_but_not_in_one_input(regions: RegionTable) -> None:
    message = request("a", "b", "c")
    message.inputs[1].parameters.clear()
    message.inputs[1].contents.fp32_contents.extend([7, 8])
    assert decode(message, SharedMemory(regions))[0].feeds["b"].tolist() == [[7, 8]]
    message.inputs[0].contents.fp32_contents.extend([7, 8])
    with pytest.raises(InvalidRequest, match="'a' has contents beside raw_input_contents or shared memory"):
        decode(message, SharedMemory(regions))


def test_bytes_are_counted_before_they_are_read(regions: RegionTable, file: Path) -> None:
    held: list[int] = []
    decode(request("a", "c", b=ROW), SharedMemory(regions), held)
    assert held == [8, 8]

    def refuse(nbytes: int) -> None:
        raise Overloaded("no room", "bytes")

    file.write_bytes(b"")  # a read would now fail because the file has shrunk
    with pytest.raises(Overloaded):
        InferenceCodec(MODEL, SharedMemory(regions)).decode(request("a", "b", "c"), 0, None, Cancellation(), refuse)


def test_a_requests_shared_memory_has_the_limit_of_a_message(regions: RegionTable) -> None:
    decode(request("a", "b", "c"), SharedMemory(regions, max_bytes=24))
    with pytest.raises(InvalidRequest, match="24 bytes or more in shared memory, expected at most 23"):
        decode(request("a", "b", "c"), SharedMemory(regions, max_bytes=23))


def test_an_unknown_region_is_not_found_and_disabled_shared_memory_is_unsupported(regions: RegionTable) -> None:
    with pytest.raises(Unsupported, match="input 'a' is in shared memory, which is off"):
        decode(request("a", "b", "c"), SharedMemory())
    regions.unregister("")
    with pytest.raises(NotFound, match="'r'"):
        decode(request("a", "b", "c"), SharedMemory(regions))


def test_an_output_is_written_even_if_its_region_is_unregistered_meanwhile(regions: RegionTable, file: Path) -> None:
    message = request(a=ROW, b=ROW, c=ROW)
    message.outputs.add(name="z")
    place(message.outputs.add(name="y"), 128)
    memory = SharedMemory(regions)
    _, answers = decode(message, memory)
    regions.unregister("")
    reply = Reply({"z": ROW, "y": ROW * 10}, "bf16")
    response = InferenceCodec(MODEL, memory).encode("", reply, answers)
    assert list(response.raw_output_contents) == [ROW.tobytes(), b""]
    assert [(o.name, list(o.shape), sorted(o.parameters)) for o in response.outputs] == [
        ("z", [1, 2], []),
        ("y", [1, 2], ["shared_memory_byte_size", "shared_memory_offset", "shared_memory_region"]),
    ]
    assert np.frombuffer(file.read_bytes(), np.float32)[30:35].tolist() == [30, 31, 10, 20, 34]


def test_one_output_may_be_classes_and_another_not() -> None:
    message = request(a=ROW, b=ROW, c=ROW)
    message.outputs.add(name="y").parameters["classification"].int64_param = 1
    message.outputs.add(name="z")
    _, answers = decode(message, SharedMemory())
    response = InferenceCodec(MODEL).encode("", Reply({"y": ROW, "z": ROW}, "bf16"), answers)
    assert [(o.name, o.datatype, list(o.shape)) for o in response.outputs] == [
        ("y", "BYTES", [1, 1]),
        ("z", "FP32", [1, 2]),
    ]
    assert response.raw_output_contents[0] == b"\x0a\0\0\x002.000000:1"


@pytest.mark.parametrize("dtype", ["string", "bool"])
def test_classes_of_a_string_or_bool_output_are_rejected(dtype: str) -> None:
    model = LoopbackModel(outputs=[TensorSpec("y", dtype, ("batch", 2))])
    message = infer_request(x=np.zeros((1, 3), np.float32))
    message.outputs.add(name="y").parameters["classification"].int64_param = 1
    with pytest.raises(InvalidRequest, match="only outputs of numbers have classes"):
        InferenceCodec(model).decode(message, 0, None, Cancellation())
