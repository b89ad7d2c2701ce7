"""Parameters of requests, inputs and outputs: which are honoured, ignored and rejected."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from bf16kit.messages.errors import InvalidRequest
from bf16kit.protocol import inference_pb2 as pb
from service.wire.parameters import (
    RegionPlace,
    check_request,
    class_count,
    output_datatype,
    region_place,
    wants_final_mark,
)

Parameters = Mapping[str, pb.InferParameter]
INT = pb.InferParameter(int64_param=250_000)
UINT = pb.InferParameter(uint64_param=250_000)
ZERO = pb.InferParameter(int64_param=0)
NEGATIVE = pb.InferParameter(int64_param=-1)
TEXT = pb.InferParameter(string_param="BF16")
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
        {"sequence_id": pb.InferParameter(string_param="")},
        {"sequence_start": NO, "sequence_end": NO},
        {"binary_data_output": YES, "headers": TEXT},
        {"triton_enable_empty_final_response": YES},
        {"mine": YES, "": TEXT},
    ],
)
def test_other_parameters_are_checked_and_ignored(names: Parameters) -> None:
    assert check_request(names) is None


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"timeout": TEXT}, "'timeout' came as string_param, expected int64_param or uint64_param"),
        ({"timeout": NEGATIVE}, "'timeout' is -1, expected 0 or more"),
        ({"priority": YES}, "'priority' came as bool_param"),
        ({"priority": NEGATIVE}, "'priority' is -1, expected 0 or more"),
        ({"sequence_start": INT}, "expected bool_param"),
        ({"sequence_id": INT}, "'sequence_id': models of this server keep no state between requests"),
        ({"sequence_id": TEXT}, "'sequence_id': models of this server keep no state"),
        ({"sequence_end": YES}, "'sequence_end': models of this server keep no state"),
        ({"triton_secret": YES}, "names starting with 'triton_' are reserved"),
        ({"mine": pb.InferParameter()}, "'mine' has no value"),
    ],
)
def test_a_bad_parameter_is_rejected(names: Parameters, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_request(names)


def test_an_fp32_output_may_be_requested_as_bf16_fp16_or_fp32() -> None:
    for datatype in ("BF16", "FP16", "FP32"):
        assert output_datatype("y", "FP32", {"datatype": pb.InferParameter(string_param=datatype)}) == datatype
    assert output_datatype("y", "INT64", {"binary_data": YES}) == "INT64"
    for native, value, words in (
        ("INT64", TEXT, "output 'y' was requested as 'BF16', but is available as INT64$"),
        ("FP32", pb.InferParameter(string_param="FP64"), "requested as 'FP64', but is available as FP32, BF16 or FP16"),
        ("FP32", YES, "came as bool_param, expected string_param"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            output_datatype("y", native, {"datatype": value})


def place(**values: pb.InferParameter) -> RegionPlace | None:
    return region_place("input 'x'", {f"shared_memory_{name}": value for name, value in values.items()})


def test_a_place_in_shared_memory_is_a_region_a_size_and_perhaps_an_offset() -> None:
    region, size = pb.InferParameter(string_param="r"), pb.InferParameter(int64_param=64)
    assert place(region=region, byte_size=size) == ("r", 0, 64)
    assert place(region=region, byte_size=size, offset=UINT) == ("r", 250_000, 64)
    assert region_place("input 'x'", {"colour": TEXT}) is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"region": TEXT}, "input 'x' has 'shared_memory_region' without 'shared_memory_byte_size'"),
        ({"byte_size": INT}, "'shared_memory_byte_size' without 'shared_memory_region'"),
        ({"offset": INT}, "'shared_memory_offset' without 'shared_memory_region'"),
        ({"region": INT, "byte_size": INT}, "'shared_memory_region' of input 'x' came as int64_param, expected string"),
        ({"region": TEXT, "byte_size": TEXT}, "'shared_memory_byte_size' of input 'x' came as string_param"),
        ({"region": TEXT, "byte_size": INT, "offset": YES}, "'shared_memory_offset' of input 'x' came as bool_param"),
    ],
)
def test_an_incomplete_place_in_shared_memory_is_rejected(values: dict[str, pb.InferParameter], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        place(**values)


def test_a_class_count_is_positive_and_excludes_other_output_parameters() -> None:
    assert class_count("y", {"classification": INT}) == 250_000
    assert class_count("y", {"colour": TEXT}) == 0
    for bad, words in (
        ({"classification": ZERO}, "with 0 classes, expected 1 or more"),
        ({"classification": NEGATIVE}, "with -1 classes"),
        ({"classification": TEXT}, "came as string_param, expected int64_param or uint64_param"),
        ({"classification": INT, "datatype": TEXT}, "'datatype' beside 'classification'"),
        ({"classification": INT, "shared_memory_region": TEXT}, "'shared_memory_region' beside 'classification'"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            class_count("y", bad)


def test_the_final_mark_is_set_only_on_request() -> None:
    assert wants_final_mark({"triton_enable_empty_final_response": YES})
    assert not wants_final_mark({})
