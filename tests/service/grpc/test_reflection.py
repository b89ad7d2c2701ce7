"""Reflection shows the public protocol: package ``inference``, not the internal package of the stubs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from loopback import LoopbackModel, serving


def test_a_client_finds_the_services_and_messages_by_reflection_alone() -> None:
    with serving(LoopbackModel()) as served:
        database = ProtoReflectionDescriptorDatabase(served.channel)
        assert set(database.get_services()) == {
            "inference.GRPCInferenceService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        service = DescriptorPool(database).FindServiceByName("inference.GRPCInferenceService")
        assert b"bf16kit" not in service.file.serialized_pb
        infer = service.methods_by_name["ModelInfer"]
        assert infer.input_type.full_name == "inference.ModelInferRequest"
        assert infer.input_type.fields_by_name["raw_input_contents"].number == 7


def test_clients_that_go_on_asking_take_no_place_of_health_checks() -> None:
    stay, asked = threading.Event(), reflection_pb2.ServerReflectionRequest(list_services="")

    def questions() -> Iterator[reflection_pb2.ServerReflectionRequest]:
        yield asked
        stay.wait(60)

    with serving(LoopbackModel()) as served:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        streams = [stub.ServerReflectionInfo(questions(), timeout=60) for _ in range(8)]
        for stream in streams:
            next(stream)
        assert served.transport.pools["reflection"].shares.in_use == 8
        assert served.transport.pools["control"].shares.in_use == 0
        stay.set()
