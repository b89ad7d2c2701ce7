"""Health and reflection of the real server, as Kubernetes, Envoy and grpcurl request them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as channel:
        yield channel


@pytest.mark.parametrize(
    ("service", "status"), [("mlp", SERVING), ("drifted", NOT_SERVING), ("", NOT_SERVING)], ids=["ready", "not", "all"]
)
def test_check_and_watch_agree(channel: grpc.Channel, service: str, status: int) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    assert stub.Check(request, timeout=30).status == status
    watch = stub.Watch(request, timeout=30)
    assert next(watch).status == status
    watch.cancel()


def test_reflection_shows_the_public_service(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert "inference.GRPCInferenceService" in database.get_services()
    assert database.FindFileContainingSymbol("inference.ModelInferRequest").package == "inference"
