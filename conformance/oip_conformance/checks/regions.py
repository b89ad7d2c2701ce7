"""Regions of shared memory for the checks: real ones, in this machine's /dev/shm.

So these checks run only against servers on the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np

from oip_conformance.checks.sources import OBSERVED, extension
from oip_conformance.models import Model
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import Session
from oip_conformance.suite import TRITON, Check, Code, Level, Skipped, must
from oip_conformance.target import Response

NEEDS = "system_shared_memory"
SOURCE = extension(NEEDS)
SIZE = 1 << 16  # bytes of each region
_DIRECTORY = Path("/dev/shm")  # noqa: S108 -- where POSIX shared memory lives on Linux


@dataclass(frozen=True, slots=True)
class Memory:
    """An existing region of :data:`SIZE` bytes with key ``key``; it may be registered as ``name``."""

    session: Session
    key: str

    @property
    def name(self) -> str:
        return self.key.lstrip("/")

    @property
    def path(self) -> Path:
        return _DIRECTORY / self.name

    def register(self, offset: int = 0, byte_size: int = SIZE, key: str = "", name: str | None = None) -> Response:
        request = pb.SystemSharedMemoryRegisterRequest(
            name=self.name if name is None else name, key=key or self.key, offset=offset, byte_size=byte_size
        )
        return self.session.target.call(request)

    def unregister(self, name: str | None = None) -> Response:
        request = pb.SystemSharedMemoryUnregisterRequest(name=self.name if name is None else name)
        return self.session.target.call(request)

    def status(self, name: str = "") -> Response:
        return self.session.target.call(pb.SystemSharedMemoryStatusRequest(name=name))

    def write(self, data: bytes, offset: int = 0) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(data)


@contextmanager
def region(session: Session, *, registered: bool = True) -> Iterator[Memory]:
    """Create a region; at the end remove it from the server and from the machine."""
    if not session.options.same_host or not _DIRECTORY.is_dir():
        raise Skipped("the server is not on this machine (or say --same-host)")
    memory = Memory(session, f"/{session.options.region_prefix}{uuid4().hex[:12]}")
    memory.path.write_bytes(bytes(SIZE))
    try:
        if registered:
            response = memory.register()
            must(response.ok, "the region to be registered", response, memory.key)
        yield memory
    finally:
        memory.unregister()
        memory.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class RegionPlace:
    """A tensor's place in a region, as its parameters state it."""

    region: str
    byte_size: int | None
    offset: int | None = None

    def put(
        self, tensor: pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor
    ) -> None:
        tensor.parameters["shared_memory_region"].string_param = self.region
        if self.byte_size is not None:
            tensor.parameters["shared_memory_byte_size"].int64_param = self.byte_size
        if self.offset is not None:
            tensor.parameters["shared_memory_offset"].int64_param = self.offset


def request_with_region(memory: Memory, place: RegionPlace | None = None, offset: int = 0) -> pb.ModelInferRequest:
    """Return a request whose inputs lie one after the other in the region; ``place`` replaces the first input's place.

    If any input is in a region, all are: none is raw.
    """
    session, at = memory.session, offset
    request = session.request()
    data = list(request.raw_input_contents)
    if sum(map(len, data)) > SIZE // 4:
        raise Skipped("the model's inputs are larger than the regions that are tried")
    del request.raw_input_contents[:]
    for number, (tensor, raw) in enumerate(zip(request.inputs, data, strict=True)):
        memory.write(raw, at)
        own = RegionPlace(memory.name, len(raw), at if offset or number else None)
        (place if place and not number else own).put(tensor)
        at += len(raw)
    return request


def numeric_output(session: Session) -> tuple[Model, str, int]:
    """Return an output of the model with elements of fixed size, and the size of one row of it in bytes."""
    outputs = session.outputs(session.request())
    for name, array in outputs.items():
        if array.dtype != np.object_ and 0 < array.nbytes <= SIZE // 4:
            return session.model, name, array.nbytes
    raise Skipped("no output of the model has elements of a fixed size")


def region_refusal(
    name: str, level: Level, source: str, rule: str, codes: list[Code], call: Callable[[Memory], Response]
) -> tuple[Check, ...]:
    """Return checks that a call about a region is rejected, and with one of the status ``codes``."""

    def run(session: Session) -> None:
        with region(session) as memory:
            response = call(memory)
            must(not response.ok, "a rejection", response, name)

    def status(session: Session) -> None:
        with region(session) as memory:
            response = call(memory)
            wanted = " or ".join(code.name for code in codes)
            must(response.code in codes, wanted, response, name)

    return (
        Check(f"memory.{name}", level, source, rule, run, NEEDS),
        Check(f"memory.{name}/status", TRITON, OBSERVED, f"{rule} Which status.", status, NEEDS),
    )
