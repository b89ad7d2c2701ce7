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

_FILE, _PACKAGE = "inference.proto", "inference"


def reflection_handler(services: Sequence[str]) -> Callable[[Iterator[StreamRequest], Any], Iterator[Any]]:
    """Return the function that answers a stream of reflection requests about ``services`` and the files they need."""
    pool = DescriptorPool()
    pool.AddSerializedFile(public_file().SerializeToString())
    pool.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(reflection_pb2.DESCRIPTOR.serialized_pb)
    servicer = reflection.ReflectionServicer(services, pool=pool)
    return lambda requests, call: servicer.ServerReflectionInfo((request.message for request in requests), call)


def public_file() -> FileDescriptorProto:
    """Return the stubs' file with the package and every reference to it renamed, as in ``proto/inference.proto``."""
    own = FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    text = text_format.MessageToString(own).replace(f'".{own.package}.', f'".{_PACKAGE}.')
    file = text_format.Parse(text, FileDescriptorProto())
    file.name, file.package = _FILE, _PACKAGE
    return file
