"""How the outputs of one request are to be answered: in which datatype, where, or as the classes that come first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.tensors import Array, DType
from service.operations import RegionSlice
from service.wire.parameters import RegionPlace


@dataclass(frozen=True, slots=True)
class Sink:
    """Where in shared memory an output goes."""

    place: RegionPlace
    slice: RegionSlice

    def fill(self, output: pb.ModelInferResponse.InferOutputTensor, data: Array) -> None:
        """Write it, and say so in the response as Triton does."""
        self.slice.write(data)
        output.parameters["shared_memory_region"].string_param = self.place.region
        output.parameters["shared_memory_byte_size"].int64_param = self.place.byte_size
        if self.place.offset:
            output.parameters["shared_memory_offset"].int64_param = self.place.offset


@dataclass(frozen=True, slots=True)
class Answers:
    """By the outputs' names, ``dtypes`` in the order in which they are to be answered.

    ``sinks`` has those that go into shared memory, ``classes`` the number of classes of those that become BYTES.
    """

    dtypes: Mapping[str, DType]
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)
