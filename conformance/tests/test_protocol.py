"""The suite's messages equal Triton's, field by field, and load in one process with Triton's client."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from oip_conformance.protocol import inference_pb2 as pb

MESSAGES = sorted(pb.DESCRIPTOR.message_types_by_name)
ELSEWHERE = {
    "properties",
    "PropertiesEntry",
}  # in ModelMetadataResponse: the Open Inference Protocol has this field, Triton does not


def theirs(name: str) -> Any:
    in_service = service_pb2.DESCRIPTOR.message_types_by_name
    return in_service[name] if name in in_service else model_config_pb2.DESCRIPTOR.message_types_by_name[name]


def compare(ours: Any, other: Any) -> None:
    for field in ours.fields:
        if field.name in ELSEWHERE:
            continue
        match = other.fields_by_name[field.name]
        assert (field.number, field.type) == (match.number, match.type), field.full_name
        assert field.is_repeated == match.is_repeated, field.full_name
    for nested in ours.nested_types:
        if nested.name not in ELSEWHERE:
            compare(nested, other.nested_types_by_name[nested.name])


@pytest.mark.parametrize("name", MESSAGES)
def test_every_field_has_tritons_number_and_type(name: str) -> None:
    compare(pb.DESCRIPTOR.message_types_by_name[name], theirs(name))


def test_triton_has_every_rpc() -> None:
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    assert {*pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name} <= {*theirs}


@pytest.mark.parametrize(
    "order", ["import oip_conformance.cli, tritonclient.grpc", "import tritonclient.grpc, oip_conformance.cli"]
)
def test_the_suite_and_tritonclient_load_in_one_process(order: str) -> None:
    subprocess.run([sys.executable, "-c", order], check=True, timeout=60)
