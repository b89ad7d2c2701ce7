"""Parameters of requests, inputs and outputs: which are honoured, tolerated, and refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from bf16kit.errors import InvalidRequest, Unsupported
from bf16kit.protocol import inference_pb2 as pb
from service.wire.parameters import RequestParameters, check_input, check_request, output_datatype, wants_final_mark


def parameters(**values: pb.InferParameter) -> Mapping[str, pb.InferParameter]:
    return values


INT = pb.InferParameter(int64_param=250_000)
UINT = pb.InferParameter(uint64_param=250_000)
TEXT = pb.InferParameter(string_param="BF16")
YES = pb.InferParameter(bool_param=True)


@pytest.mark.parametrize("value", [INT, UINT])
def test_timeout_is_in_microseconds(value: pb.InferParameter) -> None:
    assert check_request(parameters(timeout=value)).timeout == 0.25


def test_a_timeout_of_zero_is_none() -> None:
    assert check_request(parameters(timeout=pb.InferParameter(int64_param=0))).timeout is None


@pytest.mark.parametrize("value", [INT, UINT])
def test_a_priority_is_a_number(value: pb.InferParameter) -> None:
    assert check_request(parameters(priority=value)).priority == 250_000


@pytest.mark.parametrize(
    "names",
    [
        {"sequence_id": INT, "sequence_start": YES, "sequence_end": YES},
        {"sequence_id": TEXT},
        {"binary_data_output": YES, "headers": TEXT},
        {"triton_enable_empty_final_response": YES},
        {"anything": pb.InferParameter(double_param=0.5)},
    ],
)
def test_reserved_parameters_of_their_type_and_unknown_ones_pass(names: Mapping[str, pb.InferParameter]) -> None:
    assert check_request(names) == RequestParameters()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"timeout": TEXT}, "'timeout' came as string_param, expected int64_param or uint64_param"),
        ({"timeout": pb.InferParameter(int64_param=-1)}, "'timeout' is -1, expected 0 or more"),
        ({"priority": YES}, "'priority' came as bool_param"),
        ({"sequence_start": INT}, "expected bool_param"),
        ({"triton_secret": YES}, "names starting with 'triton_' are reserved"),
        ({"mine": pb.InferParameter()}, "'mine' has no value"),
    ],
)
def test_a_bad_parameter_is_refused(names: Mapping[str, pb.InferParameter], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_request(names)


def test_an_fp32_output_can_be_had_as_bf16_or_as_itself() -> None:
    assert output_datatype("y", "FP32", parameters(datatype=TEXT)) == "BF16"
    assert output_datatype("y", "FP32", parameters(datatype=pb.InferParameter(string_param="FP32"))) == "FP32"
    assert output_datatype("y", "INT64", parameters(binary_data=YES)) == "INT64"


@pytest.mark.parametrize(("native", "value"), [("INT64", TEXT), ("FP32", pb.InferParameter(string_param="FP16"))])
def test_another_output_datatype_is_refused(native: str, value: pb.InferParameter) -> None:
    with pytest.raises(InvalidRequest, match="output 'y' was asked for as"):
        output_datatype("y", native, parameters(datatype=value))


def test_an_output_datatype_that_is_no_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be a string"):
        output_datatype("y", "FP32", parameters(datatype=YES))


@pytest.mark.parametrize("key", ["classification", "shared_memory_region"])
def test_an_output_in_a_way_not_served_is_unsupported(key: str) -> None:
    with pytest.raises(Unsupported, match=key):
        output_datatype("y", "FP32", {key: INT})


def test_an_input_in_shared_memory_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="shared memory"):
        check_input("x", {"shared_memory_region": TEXT})
    check_input("x", {"colour": TEXT})


def test_the_final_mark_is_for_those_who_ask() -> None:
    assert wants_final_mark({"triton_enable_empty_final_response": YES})
    assert not wants_final_mark({})
