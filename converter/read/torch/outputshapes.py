"""Finds the shapes of a torch module's outputs by running it, if there is no graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bf16kit.messages.errors import ConversionError
from bf16kit.messages.wording import quoted
from bf16kit.numerics.tensors import BY_NAME, TensorSpec
from converter.graph.dimensions import UNKNOWN, name_dimensions
from converter.process.quiet import first_line, quiet
from converter.read.signature import kind_of

if TYPE_CHECKING:
    import torch

    from converter.source import TorchModel

_MORE = 3  # by how much every free dimension grows in the second run


def output_specs(model: TorchModel) -> tuple[TensorSpec, ...]:
    """Return the outputs of ``model``, found by running it twice with different sizes of the free dimensions.

    A dimension that equals a free input dimension in both runs gets its name. One that changes otherwise is free, and
    named after its output. Any other is fixed. Raises :class:`ConversionError` for a dtype that is not served, and for
    outputs whose rank changes.
    """
    first = _run(model, model.example)
    larger = tuple(_larger(spec, tensor) for spec, tensor in zip(model.inputs, model.example, strict=True))
    try:
        second = _run(model, larger)
    except ConversionError:  # a dimension looks free but is fixed; the samples will show the sizes
        second, larger = first, model.example
    sizes = _named_sizes(model.inputs, model.example, larger)
    found = []
    for name, first_output, second_output in zip(model.outputs, first, second, strict=True):
        if first_output.ndim != second_output.ndim:
            raise ConversionError(
                f"output {quoted(name)} has {first_output.ndim} dimensions for one input and {second_output.ndim} for"
                " another"
            )
        dims = tuple(_dim(sizes, pair) for pair in zip(first_output.shape, second_output.shape, strict=True))
        found.append(TensorSpec(name, _dtype(name, first_output), dims, kind_of(name)))
    return name_dimensions(found, model.inputs)


def _run(model: TorchModel, example: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    import torch

    try:
        with quiet(), torch.no_grad():
            found: tuple[torch.Tensor, ...] = model.module(*(tensor.clone() for tensor in example))
    except Exception as error:  # the user's model may raise anything
        raise ConversionError(f"the model failed on an example input: {first_line(error)}") from error
    return found


def _larger(spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, all ones or zeros, with longer free dimensions."""
    for axis, dim in enumerate(spec.shape):
        if isinstance(dim, str):
            shape = list(tensor.shape)
            shape[axis] += _MORE
            tensor = tensor.narrow(axis, 0, 1).expand(shape).contiguous()
    return tensor


def _named_sizes(
    inputs: tuple[TensorSpec, ...], first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]
) -> Mapping[tuple[int, int], str]:
    """Map the sizes of free dimensions in both runs to their names; the first name if two have the same sizes."""
    found: dict[tuple[int, int], str] = {}
    for spec, first_tensor, second_tensor in zip(inputs, first, second, strict=True):
        for dim, sizes in zip(spec.shape, zip(first_tensor.shape, second_tensor.shape, strict=True), strict=True):
            if isinstance(dim, str):
                found.setdefault(sizes, dim)
    return found


def _dim(sizes: Mapping[tuple[int, int], str], pair: tuple[int, int]) -> int | str:
    return sizes.get(pair, pair[0] if pair[0] == pair[1] and pair[0] else UNKNOWN)


def _dtype(name: str, tensor: torch.Tensor) -> str:
    import torch

    dtype = "float32" if tensor.dtype is torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")
    if dtype not in BY_NAME:
        raise ConversionError(f"output {quoted(name)} is {dtype}, and bf16kit serves tensors of plain dtypes only")
    return dtype
