"""Parameters of requests, inputs and outputs: which are honoured, ignored and rejected."""

from collections.abc import Mapping

import pytest

from bf16kit.messages.errors import InvalidRequest
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.wire.parameters import (
    RegionPlace,
    check_request,
    class_count,
    output_datatype,
    region_place,
)

Parameters = Mapping[str, pb.InferParameter]
INT = pb.InferParameter(int64_param=250_000)
UINT = pb.InferParameter(uint64_param=250_000)
ZERO = pb.InferParameter(int64_param=0)
NEGATIVE = pb.InferParameter(int64_param=-1)
TEXT = pb.InferParameter(string_param="BF16")
EMPTY = pb.InferParameter(string_param="")
YES = pb.InferParameter(bool_param=True)
NO = pb.InferParameter(bool_param=False)


@pytest.mark.parametrize("value", [INT, UINT])
def test_timeout_is_in_microseconds(value: pb.InferParameter) -> None:
    assert check_request({"timeout": value}) == 0.25


@pytest.mark.parametrize(
    "names",
    [
        {"timeout": ZERO},  # no timeout
        {"priority": INT},
        {"priority": UINT},
        {"sequence_id": ZERO},
        {"sequence_id": EMPTY},
        {"sequence_start": NO, "sequence_end": NO},
        {"binary_data_output": YES, "headers": TEXT},
        {"triton_enable_empty_final_response": YES},
        {"mine": YES, "": TEXT},
    ],
)
def test_other_parameters_are_checked_and_ignored(names: Parameters) -> None:
    assert check_request(names) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", TEXT),
        ("timeout", NEGATIVE),
        ("priority", YES),
        ("priority", NEGATIVE),
        ("sequence_start", INT),
        ("sequence_id", INT),
        ("sequence_id", TEXT),
        ("sequence_end", YES),
        ("triton_secret", YES),
        ("mine", pb.InferParameter()),
    ],
)
def test_a_bad_parameter_is_rejected_by_name(name: str, value: pb.InferParameter) -> None:
    with pytest.raises(InvalidRequest, match=f"'{name}'"):
        check_request({name: value})


def test_an_fp32_output_may_be_requested_as_bf16_fp16_or_fp32() -> None:
    def requested(native: str, value: pb.InferParameter) -> str:
        return output_datatype("y", native, {"datatype": value})

    for datatype in ("BF16", "FP16", "FP32"):
        assert requested("FP32", pb.InferParameter(string_param=datatype)) == datatype
    assert output_datatype("y", "INT64", {"binary_data": YES}) == "INT64"
    for native, value in (("INT64", TEXT), ("FP32", pb.InferParameter(string_param="FP64")), ("FP32", YES)):
        with pytest.raises(InvalidRequest, match="output 'y'"):
            requested(native, value)


def place(**values: pb.InferParameter) -> RegionPlace | None:
    return region_place("input 'x'", {f"shared_memory_{name}": value for name, value in values.items()})


def test_a_place_in_shared_memory_is_a_region_a_size_and_perhaps_an_offset() -> None:
    region, size = pb.InferParameter(string_param="r"), pb.InferParameter(int64_param=64)
    assert place(region=region, byte_size=size) == ("r", 0, 64)
    assert place(region=region, byte_size=size, offset=UINT) == ("r", 250_000, 64)
    assert region_place("input 'x'", {"colour": TEXT}) is None


@pytest.mark.parametrize(
    ("wrong", "values"),
    [
        ("byte_size", {"region": TEXT}),
        ("byte_size", {"byte_size": INT}),
        ("offset", {"offset": INT}),
        ("region", {"region": INT, "byte_size": INT}),
        ("byte_size", {"region": TEXT, "byte_size": TEXT}),
        ("offset", {"region": TEXT, "byte_size": INT, "offset": YES}),
    ],
)
def test_an_incomplete_place_in_shared_memory_is_rejected(wrong: str, values: dict[str, pb.InferParameter]) -> None:
    with pytest.raises(InvalidRequest, match=f"'shared_memory_{wrong}'"):
        place(**values)


def test_a_class_count_is_positive_and_excludes_other_output_parameters() -> None:
    assert class_count("y", {"classification": INT}) == 250_000
    assert class_count("y", {"colour": TEXT}) == 0
    for value in (ZERO, NEGATIVE, TEXT):
        with pytest.raises(InvalidRequest):
            class_count("y", {"classification": value})
    for other in ("datatype", "shared_memory_region"):
        with pytest.raises(InvalidRequest):
            class_count("y", {"classification": INT, other: TEXT})
