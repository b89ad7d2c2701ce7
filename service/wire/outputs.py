"""How to return the outputs of one request: their datatype, in shared memory or not, as values or as top classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bf16kit.numerics.tensors import Array, DType
from bf16kit.protocol import inference_pb2 as pb
from service.operations import RegionSlice
from service.wire.parameters import RegionPlace


@dataclass(frozen=True, slots=True)
class Sink:
    """The place in shared memory for one output."""

    place: RegionPlace
    slice: RegionSlice

    def fill(self, output: pb.ModelInferResponse.InferOutputTensor, data: Array) -> None:
        """Write the output, and describe its place in the response as Triton does."""
        self.slice.write(data)
        output.parameters["shared_memory_region"].string_param = self.place.region
        output.parameters["shared_memory_byte_size"].int64_param = self.place.byte_size
        if self.place.offset:
            output.parameters["shared_memory_offset"].int64_param = self.place.offset


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How to return the outputs, by name; ``dtypes`` is in the order of the response.

    ``sinks`` has the outputs that go into shared memory. ``classes`` has the number of classes of outputs returned as
    BYTES.
    """

    dtypes: Mapping[str, DType]
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)
