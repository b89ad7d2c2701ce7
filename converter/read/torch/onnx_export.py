"""Exports a torch module to an fp32 ONNX graph whose weights are views of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.tensors import TensorSpec, describe
from converter.process.quiet import first_line, quiet, reason
from converter.read.torch.binding import bind
from converter.read.torch.simplify import simplify
from converter.source import Array, Feeds, TorchModel

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from converter.read.torch.positional import Call

OPSET = 22  # the first opset with bf16 Conv; ONNX Runtime accepts up to 26
_BATCH, _STEP = 2, 5  # sizes of free dimensions in the example: all different, and never 0 or 1


class Untranslatable(ConversionError):
    """ONNX cannot express what a module computes; other formats may be able to."""


def adapt(
    module: torch.nn.Module, inputs: Sequence[TensorSpec], *, call: Call | None = None, example: Feeds | None = None
) -> TorchModel:
    """Wrap ``module``, in evaluation mode, to take positional inputs, and run it once to find its outputs' names.

    ``call`` says how to call it if not with the inputs alone. ``example`` holds the inputs of that run; the default is
    ones and zeros of small sizes. ConversionError if the run fails.
    """
    import torch

    from converter.read.torch.positional import Positional, left_out, output_names

    tensors = _examples(inputs) if example is None else _given(inputs, example)
    wrapped = Positional(module.eval(), [spec.name for spec in inputs], call).eval()
    try:
        with quiet(), torch.no_grad():
            result = wrapped.call(*tensors)
    except Exception as error:  # the user's model may raise anything
        shapes = ", ".join(f"{s.name}{list(t.shape)}" for s, t in zip(inputs, tensors, strict=True))
        raise ConversionError(f"the model failed on an example input ({shapes}): {first_line(error)}") from error
    names = output_names(result, [spec.name for spec in inputs])
    return TorchModel(wrapped, tuple(inputs), names, tensors, left_out(result))


def not_served(outputs: Sequence[str], left_out: Sequence[str], remedy: str = "") -> list[str]:
    """Return a note on what a model computes besides its ``outputs``; ``remedy`` says how to get it."""
    if not left_out:
        return []
    note = f"served: {', '.join(outputs)}; not served, though the model computes it: {', '.join(left_out)}"
    return [f"{note}; {remedy}" if remedy else note]


def to_onnx(model: TorchModel, tensors: Mapping[str, Array]) -> ir.Model:
    """Return the module as an fp32 graph at opset 22.

    An initializer with the bytes of one of ``tensors``, or of its transpose, becomes a view of it and takes its name,
    so that the module's own memory can be freed. Raises :class:`Untranslatable` when torch's exporter fails.
    """
    import torch

    shapes = tuple(_dynamic(spec) for spec in model.inputs)
    try:
        with quiet(), torch.no_grad():
            program = torch.onnx.export(
                model.module,
                model.example,
                dynamo=True,
                opset_version=OPSET,
                input_names=[spec.name for spec in model.inputs],
                output_names=list(model.outputs),
                dynamic_shapes=(shapes,) if any(shapes) else None,
                optimize=False,  # `simplify` instead, which does not change weights
                verbose=False,
            )
    except Exception as error:  # the exporter raises errors of any kind
        raise Untranslatable(f"torch.onnx.export cannot translate the model: {reason(error)}") from error
    if program is None:
        raise ConversionError("torch.onnx.export returned no program")
    graph: ir.Model = program.model
    with quiet():
        simplify(graph)
    _name_inputs(graph, model.inputs)
    bind(graph, tensors)
    return graph.clone()  # drops what the steps above removed, which the exporter's values still refer to


def _sizes(inputs: Sequence[TensorSpec]) -> dict[str, int]:
    """Return a size for every named dimension, all different: equal ones could be taken for the same dimension."""
    names = list(dict.fromkeys(dim for spec in inputs for dim in spec.shape if isinstance(dim, str)))
    return {name: _BATCH + index * _STEP for index, name in enumerate(names)}


def _examples(inputs: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
    try:
        return tuple(_example(spec, _sizes(inputs)) for spec in inputs)
    except RuntimeError as error:  # torch's error for "out of memory"
        shapes = ", ".join(f"{spec.name}{describe(spec.shape)}" for spec in inputs)
        raise ConversionError(f"an example input cannot be made ({shapes}): {first_line(error)}") from error


def _given(inputs: Sequence[TensorSpec], example: Feeds) -> tuple[torch.Tensor, ...]:
    import torch

    return tuple(torch.from_numpy(example[spec.name]) for spec in inputs)


def _example(spec: TensorSpec, sizes: Mapping[str, int]) -> torch.Tensor:
    """Return ones for masks and floats, zeros for integers: 0 is a valid index into every table."""
    import torch

    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point or dtype is torch.bool or "mask" in spec.name:
        return torch.ones(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)


def _dynamic(spec: TensorSpec) -> dict[int, str]:
    """Return the free dimensions by name; the exporter finds their relations, and rejects one that is not free."""
    return {axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str)}


def _name_inputs(graph: ir.Model, inputs: Sequence[TensorSpec]) -> None:
    import onnx_ir as ir

    for value, spec in zip(graph.graph.inputs, inputs, strict=True):
        value.name = spec.name
        value.shape = ir.Shape(spec.shape)
