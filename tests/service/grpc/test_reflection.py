"""Reflection shows the public protocol: package ``inference``, not the internal package of the stubs."""

from __future__ import annotations

from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from loopback import LoopbackModel, serving

from bf16kit.protocol import inference_pb2 as pb
from service.grpc.reflection import public_file


def test_a_client_finds_the_services_and_messages_by_reflection_alone() -> None:
    with serving(LoopbackModel()) as served:
        database = ProtoReflectionDescriptorDatabase(served.channel)
        assert set(database.get_services()) == {
            "inference.GRPCInferenceService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        service = DescriptorPool(database).FindServiceByName("inference.GRPCInferenceService")
        infer = service.methods_by_name["ModelInfer"]
        assert infer.input_type.full_name == "inference.ModelInferRequest"
        assert infer.input_type.fields_by_name["raw_input_contents"].number == 7


def test_the_public_file_does_not_contain_the_stubs_package() -> None:
    assert b"bf16kit" in pb.DESCRIPTOR.serialized_pb
    assert b"bf16kit" not in public_file().SerializeToString()
