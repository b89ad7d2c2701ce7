"""Limits of a request that do not follow from its message's size."""

from __future__ import annotations

import numpy as np
import pytest
from loopback import LoopbackModel, infer_request

from bf16kit.messages.errors import InvalidRequest
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from service.contract import Array, Bounds
from service.request import Cancellation, Reply, Request
from service.wire.request import InferenceCodec

IDS = TensorSpec("ids", "int64", ("batch", "seq"))
STATES = TensorSpec("states", "float32", ("batch", "seq", 384))


def codec(
    bounds: Bounds, inputs: tuple[TensorSpec, ...] = (IDS,), outputs: tuple[TensorSpec, ...] = (STATES,), rows: int = 0
) -> InferenceCodec:
    return InferenceCodec(LoopbackModel(inputs=inputs, outputs=outputs, bounds=bounds, max_batch_size=rows))


def decode(codec: InferenceCodec, message: pb.ModelInferRequest) -> Request:
    return codec.decode(message, 0, None, Cancellation())[0]


def ids(*shape: int) -> pb.ModelInferRequest:
    return infer_request(ids=np.zeros(shape, np.int64))


@pytest.mark.parametrize(("shape", "dim", "size", "bound"), [((1, 513), "seq", 513, 512), ((9, 2), "batch", 9, 8)])
def test_a_dimension_over_its_limit_is_rejected_by_name(
    shape: tuple[int, ...], dim: str, size: int, bound: int
) -> None:
    bounded = codec(Bounds({"seq": 512, "batch": 8}))
    with pytest.raises(InvalidRequest) as refused:
        decode(bounded, ids(*shape))
    assert str(refused.value) == (
        f"dimension {dim!r} is {size}, expected at most {bound} (max_dims of the model's serving.yaml)"
    )
    assert decode(bounded, ids(8, 512)).rows == 8


def test_a_limit_also_holds_for_an_empty_tensor() -> None:
    with pytest.raises(InvalidRequest, match="dimension 'seq' is 513"):
        decode(codec(Bounds({"seq": 512})), ids(0, 513))


@pytest.mark.parametrize("shape", [(2**26, 0), (0, 2**26), (2**20 + 1, 0)])
def test_an_empty_tensor_with_a_huge_dimension_is_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="too large, although it is empty"):
        decode(codec(Bounds()), ids(*shape))


@pytest.mark.parametrize("shape", [(0, 512), (8, 0), (0, 0), (2**20, 0)])
def test_other_empty_tensors_are_valid(shape: tuple[int, ...]) -> None:
    assert decode(codec(Bounds()), ids(*shape)).feeds["ids"].shape == shape


def test_the_models_fixed_dimensions_do_not_make_an_empty_tensor_too_large() -> None:
    image = TensorSpec("image", "float32", ("batch", 3, 1024, 1024))
    message = infer_request(image=np.zeros((0, 3, 1024, 1024), np.float32))
    assert decode(codec(Bounds(), (image,)), message).rows == 0


def test_a_response_whose_size_is_known_is_rejected_before_the_run() -> None:
    bounded = codec(Bounds(response_bytes=2 * 100 * 384 * 4))
    assert decode(bounded, ids(2, 100)).rows == 2
    with pytest.raises(InvalidRequest) as refused:
        decode(bounded, ids(2, 101))
    assert str(refused.value) == (
        "the response has 310272 bytes or more, expected at most 307200;"
        " ask for fewer rows, shorter inputs or fewer outputs"
    )


def test_only_requested_outputs_count_in_their_requested_datatype() -> None:
    pooled = TensorSpec("pooled", "float32", ("batch", 384))
    bounded = codec(Bounds(response_bytes=2 * 384 * 4), outputs=(STATES, pooled))
    message = ids(2, 100)
    with pytest.raises(InvalidRequest, match="the response has"):
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


@pytest.mark.parametrize(("elements", "fits"), [(10, True), (11, False)])
def test_a_response_is_measured_before_it_is_encoded(elements: int, fits: bool) -> None:
    found = TensorSpec("found", "float32", ("hits",))
    bounded = codec(Bounds(response_bytes=40), outputs=(found,))
    _, dtypes = bounded.decode(ids(1, 1), 0, None, Cancellation())
    array: Array = np.zeros(elements, np.float32)
    if fits:
        assert len(bounded.encode("", Reply({"found": array}, "bf16"), dtypes).raw_output_contents[0]) == 40
    else:
        with pytest.raises(InvalidRequest, match="44 bytes or more, expected at most 40"):
            bounded.encode("", Reply({"found": array}, "bf16"), dtypes)
