"""The models of the server under test, from its metadata and configuration, and inputs that fit them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.target import Target
from oip_conformance.wire import DATATYPES, Tensor, filled

_ANY = 4  # size of a dimension that may have any


class UsageError(Exception):
    """The user's request cannot be carried out."""


@dataclass(frozen=True, slots=True)
class InputSetting:
    """The user's settings for an input: its shape, batch dimension included, and the values to repeat."""

    shape: tuple[int, ...]
    values: tuple[float, ...] = ()


def parse_input(text: str) -> tuple[str, InputSetting]:
    """Parse ``NAME=2,16``, ``NAME=2,16/101,2023,102`` or ``NAME=2,16/0..30000``.

    Raises :class:`UsageError` for anything else.
    """
    name, equals, rest = text.partition("=")
    shape, _, values = rest.partition("/")
    try:
        sizes = tuple(int(size) for size in shape.split(",") if size)
        low, dots, high = values.partition("..")
        if dots:
            step = max((float(high) - float(low)) / 7, 0)
            numbers = tuple(float(low) + step * k for k in range(8))
        else:
            numbers = tuple(float(value) for value in values.split(",") if value)
    except ValueError:
        equals = ""
    if not equals or not name or (sizes and min(sizes) < 0):
        raise UsageError(
            f"--input {text!r}: expected NAME=SHAPE or NAME=SHAPE/VALUES, as ids=1,8/101,2023 or x=2,16/0..1"
        )
    return name, InputSetting(sizes, numbers)


@dataclass(frozen=True, slots=True)
class Model:
    """One model, its newest version. With ``max_batch_size`` 0 its shapes have no batch dimension in Triton's sense."""

    name: str
    metadata: pb.ModelMetadataResponse
    config: pb.ModelConfig | None = None
    known: Mapping[str, InputSetting] = field(default_factory=dict)

    @property
    def max_batch_size(self) -> int:
        return self.config.max_batch_size if self.config else 0

    @property
    def raw_only(self) -> bool:
        """Whether it has an FP16 or BF16 input.

        If so its requests have no typed form, because raw and typed are never mixed.
        """
        return any(DATATYPES[spec.datatype].field is None for spec in self.inputs)

    @property
    def optional(self) -> frozenset[str]:
        """The inputs that may be left out."""
        return frozenset(tensor.name for tensor in self.config.input if tensor.optional) if self.config else frozenset()

    @property
    def inputs(self) -> Sequence[pb.ModelMetadataResponse.TensorMetadata]:
        return self.metadata.inputs

    @property
    def outputs(self) -> Sequence[pb.ModelMetadataResponse.TensorMetadata]:
        return self.metadata.outputs

    def shape(self, name: str, rows: int = 1) -> tuple[int, ...]:
        """Return a shape for an input, with ``rows`` rows if the model batches."""
        spec = next(tensor for tensor in self.inputs if tensor.name == name)
        setting = self.known.get(name)
        open_sizes = (self._size(axis) if size < 0 else size for axis, size in enumerate(spec.shape))
        sizes = setting.shape if setting and setting.shape else tuple(open_sizes)
        return (rows, *sizes[1:]) if self.max_batch_size > 0 and sizes else tuple(sizes)

    def _size(self, axis: int) -> int:
        """Return a size for a dimension that may have any.

        It is the size that the user gave another input there, because the two often agree.
        """
        for spec in self.inputs:
            setting = self.known.get(spec.name)
            if setting and axis < len(setting.shape) and axis < len(spec.shape) and spec.shape[axis] < 0:
                return setting.shape[axis]
        return _ANY

    def feed(self, name: str, rows: int = 1) -> Tensor:
        """Return a value for one input."""
        spec = next(tensor for tensor in self.inputs if tensor.name == name)
        setting = self.known.get(name)
        return filled(spec.datatype, self.shape(name, rows), setting.values if setting else None)

    def feeds(self, rows: int = 1) -> dict[str, Tensor]:
        """Return a value for every input."""
        return {spec.name: self.feed(spec.name, rows) for spec in self.inputs}


def discover(target: Target, names: Sequence[str], inputs: Mapping[str, InputSetting]) -> list[Model]:
    """Return the models called ``names``, or else those in the repository's index. Raises :class:`UsageError`."""
    if not names:
        index = target.call(pb.RepositoryIndexRequest(ready=True))
        if not index.ok:
            raise UsageError(f"the server does not list its models ({index}); name one with --model")
        names = list(dict.fromkeys(m.name for m in index.message.models if m.state in ("READY", "")))
        if not names:
            raise UsageError("the server lists no model that is ready; load one")
    models = [_describe(target, name, inputs) for name in names]
    found = [model for model in models if model is not None]
    if not found:
        raise UsageError(f"the server gives no metadata of {', '.join(names)}")
    return found


def _describe(target: Target, name: str, inputs: Mapping[str, InputSetting]) -> Model | None:
    metadata = target.call(pb.ModelMetadataRequest(name=name))
    if not metadata.ok or any(spec.datatype not in DATATYPES for spec in metadata.message.inputs):
        return None
    config = target.call(pb.ModelConfigRequest(name=name))
    model = Model(name, metadata.message, config.message.config if config.ok else None)
    return replace(model, known={spec.name: inputs[spec.name] for spec in model.inputs if spec.name in inputs})


def preference(model: Model) -> tuple[bool, bool, int, str]:
    """Sort key of models by how much of the protocol they can show: batching ones, with floats, with few inputs."""
    floats = any(spec.datatype == "FP32" for spec in model.inputs)
    return model.max_batch_size <= 1, not floats, len(model.inputs), model.name
