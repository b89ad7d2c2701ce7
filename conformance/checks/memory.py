"""Checks of system shared memory: registering, listing and unregistering regions; and of the RPCs of CUDA regions."""

from __future__ import annotations

from conformance.checks.regions import NEEDS, SIZE, SOURCE, at_region, input_in, region
from conformance.checks.sources import SEEN, extension
from conformance.protocol import inference_pb2 as pb
from conformance.session import Session
from conformance.suite import Code, Level, Question, check, must, refusal

_CUDA = "cuda_shared_memory"

# --- regions --------------------------------------------------------------------------------------------------------


@check(
    "memory.register",
    Level.MUST,
    SOURCE,
    "After a region is registered, its status tells its name, key, offset and size, alone and among all.",
    NEEDS,
)
def register(session: Session) -> None:
    with region(session, registered=False) as memory:
        answer = memory.register(offset=4096, byte_size=8192)
        must(answer.ok, "an empty answer", answer, f"{memory.key}, offset 4096, 8192 bytes")
        for name in (memory.name, ""):
            status = memory.status(name)
            must(status.ok and memory.name in status.message.regions, f"the region {memory.name}", status, name)
            told = status.message.regions[memory.name]
            came = (told.name, told.key, told.offset, told.byte_size)
            must(came == (memory.name, memory.key, 4096, 8192), "what was registered", came)


@check("memory.unregister", Level.MUST, SOURCE, "After a region is unregistered, it can no longer be used.", NEEDS)
def unregister(session: Session) -> None:
    with region(session) as memory:
        request = input_in(memory)
        session.infer(request)
        answer = memory.unregister()
        must(answer.ok, "an empty answer", answer, memory.name)
        answer = session.target.call("ModelInfer", request)
        must(not answer.ok, "the region to be refused", answer, request)
        listed = memory.status()
        must(listed.ok and memory.name not in listed.message.regions, "the region to be gone", listed)


@check(
    "memory.unregister-all",
    Level.MUST,
    SOURCE,
    "Unregister without a name: all system shared-memory regions are unregistered.",
    NEEDS,
)
def unregister_all(session: Session) -> None:
    with region(session) as one, region(session) as two:
        answer = one.unregister("")
        must(answer.ok, "an empty answer", answer, "Unregister of ''")
        listed = two.status()
        must(listed.ok and not listed.message.regions, "no region", listed)


@check(
    "memory.unregister-unknown", Level.TRITON, SEEN, "Unregister of a name that is not registered is no error.", NEEDS
)
def unregister_unknown(session: Session) -> None:
    with region(session, registered=False) as memory:
        answer = memory.unregister()
        must(answer.ok, "an empty answer", answer, memory.name)


# Triton responds INTERNAL for memory that it cannot map; a code that says whose fault it is, is better
_UNMAPPABLE = [Code.INTERNAL, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.PERMISSION_DENIED, Code.OUT_OF_RANGE]
STATUS_UNKNOWN = at_region("status-unknown", Level.MUST, SOURCE, "Status of a region that is not registered is an error.", [Code.NOT_FOUND], lambda m: m.status(f"{m.name}-not"))  # fmt: skip
TWICE = at_region("register-twice", Level.TRITON, SEEN, "A name that is registered is not registered again.", [Code.ALREADY_EXISTS], lambda m: m.register())  # fmt: skip
NO_KEY = at_region("register-no-memory", Level.MUST, SOURCE, "Shared memory must be created before it is registered.", _UNMAPPABLE, lambda m: m.register(key=f"{m.key}-not", name=f"{m.name}-2"))  # fmt: skip
NO_NAME = at_region(
    "register-no-name", Level.TRITON, SEEN, "A region has a name.", _UNMAPPABLE, lambda m: m.register(name="")
)
NO_SIZE = at_region("register-no-size", Level.TRITON, SEEN, "A region has a size.", _UNMAPPABLE, lambda m: m.register(byte_size=0, name=f"{m.name}-2"))  # fmt: skip
TOO_LARGE = at_region("register-too-large", Level.TRITON, SEEN, "A region ends no later than its memory.", _UNMAPPABLE, lambda m: m.register(byte_size=SIZE + 1, name=f"{m.name}-2"))  # fmt: skip
TOO_FAR = at_region("register-too-far", Level.TRITON, SEEN, "A region ends no later than its memory.", _UNMAPPABLE, lambda m: m.register(offset=SIZE, byte_size=1, name=f"{m.name}-2"))  # fmt: skip
OVERFLOW = at_region("register-overflow", Level.TRITON, SEEN, "Offset and size that add up to more than 64 bits are refused.", _UNMAPPABLE, lambda m: m.register(offset=2**64 - 8, byte_size=16, name=f"{m.name}-2"))  # fmt: skip
OUTSIDE = at_region("register-outside", Level.TRITON, SEEN, "A key leads to shared memory and nowhere else.", _UNMAPPABLE, lambda m: m.register(key="/../../etc/passwd", byte_size=16, name=f"{m.name}-2"))  # fmt: skip


# --- CUDA -----------------------------------------------------------------------------------------------------------


@check(
    "memory.cuda-none",
    Level.MUST,
    extension(_CUDA),
    "Without CUDA regions their status is empty, and unregistering all is no error.",
    _CUDA,
)
def cuda_none(session: Session) -> None:
    status = session.target.call("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest())
    must(status.ok and not status.message.regions, "no region", status, "CudaSharedMemoryStatus")
    answer = session.target.call("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest())
    must(answer.ok, "an empty answer", answer, "CudaSharedMemoryUnregister")


CUDA_HANDLE = refusal(
    "memory.cuda-no-handle", Level.MUST, extension(_CUDA), "Bytes that are no handle of CUDA's are refused.",
    [Code.INVALID_ARGUMENT, Code.INTERNAL, Code.UNIMPLEMENTED],
    lambda session: Question(
        pb.CudaSharedMemoryRegisterRequest(name="conformance", raw_handle=b"x" * 64, byte_size=64), rpc="CudaSharedMemoryRegister"
    ), _CUDA,
)  # fmt: skip
