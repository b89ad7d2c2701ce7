"""Server reflection, from its own descriptor pool, in which the service has its public package, ``inference``.

The stubs are generated in the package ``bf16kit.inference``: two files that define ``inference.*`` cannot coexist in
protobuf's default pool, which tritonclient uses too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from bf16kit.protocol import inference_pb2 as pb
from service.grpc.stream import StreamRequest

PUBLIC_FILE = "inference.proto"
_PUBLIC = "inference"


def reflection_handler(services: Sequence[str]) -> Callable[[Iterator[StreamRequest], Any], Iterator[Any]]:
    """Return the function that answers a stream of reflection requests about ``services`` and the files they need."""
    servicer = reflection.ReflectionServicer(services, pool=public_pool())

    def handle(requests: Iterator[StreamRequest], call: Any) -> Iterator[Any]:
        yield from servicer.ServerReflectionInfo((request.message for request in requests), call)

    return handle


def public_pool() -> DescriptorPool:
    """Return a pool of all services' files. The inference service is as in ``proto/inference.proto``."""
    pool = DescriptorPool()
    pool.AddSerializedFile(public_file().SerializeToString())
    pool.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(reflection_pb2.DESCRIPTOR.serialized_pb)
    return pool


def public_file() -> FileDescriptorProto:
    """Return the stubs' file with the package and every reference to it renamed."""
    file = FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    own = f".{file.package}."
    file.name, file.package = PUBLIC_FILE, _PUBLIC
    for message in file.message_type:
        _rename(message, own)
    for service in file.service:
        for method in service.method:
            method.input_type = _public(method.input_type, own)
            method.output_type = _public(method.output_type, own)
    return file


def _rename(message: DescriptorProto, own: str) -> None:
    for field in message.field:
        if field.type_name:
            field.type_name = _public(field.type_name, own)
    for nested in message.nested_type:
        _rename(nested, own)


def _public(type_name: str, own: str) -> str:
    return f".{_PUBLIC}.{type_name.removeprefix(own)}" if type_name.startswith(own) else type_name
