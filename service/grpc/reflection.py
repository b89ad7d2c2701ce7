"""Server reflection, from its own descriptor pool, in which the service has its public package, ``inference``.

The stubs are generated in the package ``bf16kit.inference``: two files that define ``inference.*`` cannot coexist in
protobuf's default pool, which tritonclient uses too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
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
    own = FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    text = text_format.MessageToString(own).replace(f'".{own.package}.', f'".{_PUBLIC}.')
    file = text_format.Parse(text, FileDescriptorProto())
    file.name, file.package = PUBLIC_FILE, _PUBLIC
    return file
