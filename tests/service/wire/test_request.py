"""A whole request for one model: inputs and outputs by name, the batch's rows, and the response."""

from __future__ import annotations

import numpy as np
import pytest
from loopback import LoopbackModel, infer_request

from bf16kit.messages.errors import InvalidRequest
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from service.request import Cancellation, Reply, Request
from service.wire.request import InferenceCodec

MODEL = LoopbackModel(
    inputs=[TensorSpec("ids", "int64", ("batch", "seq")), TensorSpec("mask", "bool", ("batch", "seq"))],
    outputs=[TensorSpec("a", "float32", ("batch", 2)), TensorSpec("b", "float32", ("batch",))],
)
IDS = np.arange(6, dtype=np.int64).reshape(2, 3)
MASK = np.ones((2, 3), np.bool_)


def decode(message: pb.ModelInferRequest, model: LoopbackModel = MODEL) -> Request:
    return InferenceCodec(model).decode(message, 0, None, Cancellation())[0]


def refusal(message: pb.ModelInferRequest, model: LoopbackModel = MODEL) -> str:
    with pytest.raises(InvalidRequest) as refused:
        decode(message, model)
    return str(refused.value)


def test_inputs_may_come_in_any_order() -> None:
    request = decode(infer_request(mask=MASK, ids=IDS))
    np.testing.assert_array_equal(request.feeds["ids"], IDS)
    np.testing.assert_array_equal(request.feeds["mask"], MASK)


def test_rows_are_the_size_of_the_batch_axis() -> None:
    assert decode(infer_request(ids=IDS, mask=MASK)).rows == 2
    model = LoopbackModel(batch_axis=None, max_batch_size=0)
    assert decode(infer_request(x=np.zeros((5, 3), np.float32)), model).rows == 1


def test_zero_rows_are_legal() -> None:
    assert decode(infer_request(ids=IDS[:0], mask=MASK[:0])).rows == 0


def test_more_rows_than_max_batch_size_are_rejected() -> None:
    words = refusal(infer_request(x=np.zeros((9, 3), np.float32)), LoopbackModel())
    assert words == "input 'x' has 9 rows, expected at most 8 (the model's max_batch_size)"


def test_a_missing_an_unknown_and_a_repeated_input_are_rejected() -> None:
    assert "input 'mask' is missing" in refusal(infer_request(ids=IDS))
    assert "unknown input 'z'; the model's inputs are ids, mask" in refusal(infer_request(ids=IDS, mask=MASK, z=IDS))
    twice = infer_request(ids=IDS, mask=MASK)
    twice.inputs.append(twice.inputs[0])
    twice.raw_input_contents.append(twice.raw_input_contents[0])
    assert refusal(twice) == "input 'ids' was sent twice"


def test_dimensions_of_one_name_must_agree() -> None:
    assert "input 'mask' has shape [2, 2]" in refusal(infer_request(ids=IDS, mask=MASK[:, :2]))


def test_raw_and_typed_contents_do_not_mix() -> None:
    beside = infer_request(ids=IDS, mask=MASK)
    beside.inputs[0].contents.int64_contents.extend([1, 2, 3, 4, 5, 6])
    assert "input 'ids' has contents beside raw_input_contents" in refusal(beside)
    instead = infer_request(ids=IDS, mask=MASK)
    instead.inputs[0].contents.int64_contents.extend([1, 2, 3, 4, 5, 6])
    del instead.raw_input_contents[0]
    assert "raw_input_contents has 1 entries for 2 inputs" in refusal(instead)


def test_empty_contents_are_allowed_beside_raw_ones() -> None:
    """MLServer's converters send empty contents with every input."""
    beside = infer_request(ids=IDS, mask=MASK)
    for tensor in beside.inputs:
        tensor.contents.SetInParent()
    assert decode(beside).feeds["ids"].tolist() == IDS.tolist()


def test_typed_contents_alone_are_read() -> None:
    message = infer_request(ids=IDS, mask=MASK)
    del message.raw_input_contents[:]
    message.inputs[0].contents.int64_contents.extend(IDS.ravel().tolist())
    message.inputs[1].contents.bool_contents.extend(MASK.ravel().tolist())
    np.testing.assert_array_equal(decode(message).feeds["ids"], IDS)


def test_a_request_without_outputs_means_all_outputs() -> None:
    assert decode(infer_request(ids=IDS, mask=MASK)).outputs is None


def test_outputs_keep_the_order_of_the_request() -> None:
    message = infer_request(ids=IDS, mask=MASK)
    message.outputs.add(name="b")
    message.outputs.add(name="a")
    assert decode(message).outputs == ("b", "a")


def test_an_unknown_and_a_repeated_output_are_rejected() -> None:
    message = infer_request(ids=IDS, mask=MASK)
    message.outputs.add(name="c")
    assert "unknown output 'c'; the model's outputs are a, b" in refusal(message)
    message.outputs[0].name = "a"
    message.outputs.add(name="a")
    assert "output 'a' was requested twice" in refusal(message)


def test_the_response_has_id_version_and_raw_contents_in_order() -> None:
    codec = InferenceCodec(LoopbackModel("m", version=7, inputs=MODEL.inputs, outputs=MODEL.outputs))
    message = infer_request(ids=IDS, mask=MASK)
    message.outputs.add(name="b").parameters["datatype"].string_param = "BF16"
    message.outputs.add(name="a")
    _, dtypes = codec.decode(message, 0, None, Cancellation())
    reply = Reply({"b": np.ones(2, np.float32), "a": np.zeros((2, 2), np.float32)}, "bf16")
    answer = codec.encode("id-1", reply, dtypes)
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "7", "id-1")
    assert [(o.name, o.datatype, list(o.shape)) for o in answer.outputs] == [("b", "BF16", [2]), ("a", "FP32", [2, 2])]
    assert list(answer.raw_output_contents) == [b"\x80\x3f" * 2, bytes(16)]


@pytest.mark.parametrize(("made", "told"), [("bf16", "bf16"), ("bf16-weights", "bf16"), ("fp32", "fp32")])
def test_the_response_names_the_precision_that_computed_it(made: str, told: str) -> None:
    """Also a response without an id, after one with an id."""
    codec = InferenceCodec(MODEL)
    _, answers = codec.decode(infer_request(ids=IDS, mask=MASK), 0, None, Cancellation())
    reply = Reply({"a": np.zeros((2, 2), np.float32), "b": np.ones(2, np.float32)}, made)
    for request_id in ("id-1", ""):
        answer = codec.encode(request_id, reply, answers)
        assert answer.id == request_id
        assert {key: value.string_param for key, value in answer.parameters.items()} == {"precision": told}


def test_a_shape_of_huge_rank_is_rejected_before_its_sizes_are_multiplied() -> None:
    """The product has millions of digits, and no other thread runs while Python computes it."""
    message = infer_request(x=np.zeros((1, 3), np.float32))
    message.inputs[0].shape[:] = [2**62] * 200_000
    assert refusal(message, LoopbackModel()) == "input 'x' is of rank 200000, expected [batch,3]"
