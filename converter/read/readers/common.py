"""Shared by the readers: required inputs, and turning a module into a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bf16kit.messages.errors import UsageError
from bf16kit.numerics.tensors import TensorSpec
from converter.options import Options
from converter.source import Array, Checkpoint, Sampler, Source

if TYPE_CHECKING:
    from converter.source import TorchModel

Advance = Callable[[int], None]  # called with the number of bytes read


def inputs_of(options: Options) -> tuple[TensorSpec, ...]:
    """Return the inputs of ``--input``; :class:`UsageError` if there are none."""
    if not options.inputs:
        raise UsageError(
            f"{options.source}: a checkpoint does not describe its model's inputs; name each with --input"
            " NAME:DTYPE:DIMS, for example --input x:float32:batch,16"
        )
    return options.inputs


def exported_source(
    checkpoint: Checkpoint,
    model: TorchModel,
    sampler: Sampler | None,
    tools: tuple[str, ...] = (),
    *,
    bound: Mapping[str, Array] | None = None,
) -> Source:
    """Export ``model`` and return it as a source; its oracle works until the module is dropped.

    Checks that the export left the module unchanged. ``bound`` are the checkpoint's tensors by the model's names and
    layouts, if these differ. A model that ONNX cannot express becomes a source without a graph.
    """
    from converter.read import oracles
    from converter.read.signature import output_specs
    from converter.read.torch.onnx_export import Untranslatable, to_onnx

    unchanged = oracles.UnchangedTensors(model.module)
    try:
        graph = to_onnx(model, checkpoint.tensors if bound is None else bound)
    except Untranslatable as error:
        unchanged.check("torch.onnx.export")
        return source_without_graph(checkpoint, model, sampler, tools, reason=str(error))
    unchanged.check("torch.onnx.export")
    return Source(
        checkpoint,
        graph,
        model.inputs,
        output_specs(graph),
        model,
        sampler,
        ("torch", "onnxscript", *tools),
        oracles.of_module(model),
    )


def source_without_graph(
    checkpoint: Checkpoint, model: TorchModel, sampler: Sampler | None, tools: tuple[str, ...] = (), *, reason: str
) -> Source:
    """Return ``model`` as a source without a graph, for formats that torch runs; ``reason`` says why ONNX failed."""
    from converter.read import oracles
    from converter.read.torch.outputshapes import output_specs

    return Source(
        checkpoint,
        None,
        model.inputs,
        output_specs(model),
        model,
        sampler,
        ("torch", *tools),
        oracles.of_module(model),
        no_graph_reason=reason,
    )
