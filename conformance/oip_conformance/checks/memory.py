"""Checks of system shared memory: registering, listing and unregistering regions; and of the RPCs of CUDA regions."""

from __future__ import annotations

from oip_conformance.checks.regions import NEEDS, SIZE, SOURCE, region, region_refusal, request_with_region
from oip_conformance.checks.sources import OBSERVED, extension
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import Session
from oip_conformance.suite import MUST, TRITON, Code, InvalidCall, check, must, refusal

_CUDA = "cuda_shared_memory"

# --- regions --------------------------------------------------------------------------------------------------------


@check(
    "memory.register",
    MUST,
    SOURCE,
    "After a region is registered, its status gives its name, key, offset and size, alone and among all.",
    NEEDS,
)
def register(session: Session) -> None:
    with region(session, registered=False) as memory:
        response = memory.register(offset=4096, byte_size=8192)
        must(response.ok, "an empty answer", response, f"{memory.key}, offset 4096, 8192 bytes")
        for name in (memory.name, ""):
            status = memory.status(name)
            must(status.ok and memory.name in status.message.regions, f"the region {memory.name}", status, name)
            region_status = status.message.regions[memory.name]
            received = (region_status.name, region_status.key, region_status.offset, region_status.byte_size)
            must(received == (memory.name, memory.key, 4096, 8192), "what was registered", received)


@check("memory.unregister", MUST, SOURCE, "After a region is unregistered, it can no longer be used.", NEEDS)
def unregister(session: Session) -> None:
    with region(session) as memory:
        request = request_with_region(memory)
        session.infer(request)
        response = memory.unregister()
        must(response.ok, "an empty answer", response, memory.name)
        response = session.target.call(request)
        must(not response.ok, "the region to be rejected", response, request)
        listed = memory.status()
        must(listed.ok and memory.name not in listed.message.regions, "the region to be gone", listed)


@check(
    "memory.unregister-all",
    MUST,
    SOURCE,
    "Unregister without a name: all system shared-memory regions are unregistered.",
    NEEDS,
)
def unregister_all(session: Session) -> None:
    with region(session) as one, region(session) as two:
        response = one.unregister("")
        must(response.ok, "an empty answer", response, "Unregister of ''")
        listed = two.status()
        must(listed.ok and not listed.message.regions, "no region", listed)


@check("memory.unregister-unknown", TRITON, OBSERVED, "Unregister of a name that is not registered is no error.", NEEDS)
def unregister_unknown(session: Session) -> None:
    with region(session, registered=False) as memory:
        response = memory.unregister()
        must(response.ok, "an empty answer", response, memory.name)


# Triton responds INTERNAL for memory that it cannot map; a code that says whose fault it is, is better
_UNMAPPABLE = [Code.INTERNAL, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.PERMISSION_DENIED, Code.OUT_OF_RANGE]
STATUS_UNKNOWN = region_refusal("status-unknown", MUST, SOURCE, "Status of a region that is not registered is an error.", [Code.NOT_FOUND], lambda m: m.status(f"{m.name}-not"))  # fmt: skip
TWICE = region_refusal("register-twice", TRITON, OBSERVED, "A name that is registered is not registered again.", [Code.ALREADY_EXISTS], lambda m: m.register())  # fmt: skip
NO_KEY = region_refusal("register-no-memory", MUST, SOURCE, "Shared memory must be created before it is registered.", _UNMAPPABLE, lambda m: m.register(key=f"{m.key}-not", name=f"{m.name}-2"))  # fmt: skip
NO_NAME = region_refusal(
    "register-no-name", TRITON, OBSERVED, "A region has a name.", _UNMAPPABLE, lambda m: m.register(name="")
)
NO_SIZE = region_refusal("register-no-size", TRITON, OBSERVED, "A region has a size.", _UNMAPPABLE, lambda m: m.register(byte_size=0, name=f"{m.name}-2"))  # fmt: skip
TOO_LARGE = region_refusal("register-too-large", TRITON, OBSERVED, "A region ends no later than its memory.", _UNMAPPABLE, lambda m: m.register(byte_size=SIZE + 1, name=f"{m.name}-2"))  # fmt: skip
TOO_FAR = region_refusal("register-too-far", TRITON, OBSERVED, "A region ends no later than its memory.", _UNMAPPABLE, lambda m: m.register(offset=SIZE, byte_size=1, name=f"{m.name}-2"))  # fmt: skip
OVERFLOW = region_refusal("register-overflow", TRITON, OBSERVED, "Offset and size that add up to more than 64 bits are rejected.", _UNMAPPABLE, lambda m: m.register(offset=2**64 - 8, byte_size=16, name=f"{m.name}-2"))  # fmt: skip
OUTSIDE = region_refusal("register-outside", TRITON, OBSERVED, "A key names shared memory and no other file.", _UNMAPPABLE, lambda m: m.register(key="/../../etc/passwd", byte_size=16, name=f"{m.name}-2"))  # fmt: skip


# --- CUDA -----------------------------------------------------------------------------------------------------------


@check(
    "memory.cuda-none",
    MUST,
    extension(_CUDA),
    "Without CUDA regions their status is empty, and unregistering all is no error.",
    _CUDA,
)
def cuda_none(session: Session) -> None:
    status = session.target.call(pb.CudaSharedMemoryStatusRequest())
    must(status.ok and not status.message.regions, "no region", status, "CudaSharedMemoryStatus")
    response = session.target.call(pb.CudaSharedMemoryUnregisterRequest())
    must(response.ok, "an empty answer", response, "CudaSharedMemoryUnregister")


CUDA_HANDLE = refusal(
    "memory.cuda-no-handle", MUST, extension(_CUDA), "Bytes that are not a CUDA handle are rejected.",
    [Code.INVALID_ARGUMENT, Code.INTERNAL, Code.UNIMPLEMENTED],
    lambda session: InvalidCall(pb.CudaSharedMemoryRegisterRequest(name="conformance", raw_handle=b"x" * 64, byte_size=64)), _CUDA,
)  # fmt: skip
