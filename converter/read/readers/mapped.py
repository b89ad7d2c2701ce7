"""Puts weights of any framework into the model that ``--model`` names, a torch module or an ONNX graph, by a map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.messages.errors import UsageError
from converter.graph.equality import OTHER_FLOATS, in_fp32
from converter.options import Options
from converter.process.imports import is_import_spec
from converter.read.mapping import ModelTensors, fill
from converter.read.readers.common import exported_source, inputs_of
from converter.source import Array, Checkpoint, Feeds, Oracle, Source, given_entry

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch


def is_graph(options: Options) -> bool:
    """Return whether ``--model`` names a file, that is an ONNX graph, rather than a function."""
    return options.model is not None and not is_import_spec(options.model) and Path(options.model).is_file()


def read(options: Options, checkpoint: Checkpoint, notes: Sequence[str]) -> Source:
    """Return the model that ``--model`` names, filled with the tensors of ``checkpoint``, as a source."""
    source = (_into_graph if is_graph(options) else _into_module)(options, checkpoint, notes)
    rules = () if options.map is None else (given_entry("--map", options.map),)
    return replace(source, given=(*source.given, *rules))


def _into_module(options: Options, checkpoint: Checkpoint, notes: Sequence[str]) -> Source:
    from converter.read import statedict
    from converter.read.torch.onnx_export import adapt, not_served

    module = statedict.build(options)
    mapped = fill(options.source, options.map, checkpoint.tensors, _of_module(module))
    statedict.fit(module, mapped.tensors, kept=mapped.kept)
    model = adapt(statedict.in_fp32(module), inputs_of(options))
    source = exported_source(replace(checkpoint, orders=mapped.orders), model, None, bound=mapped.tensors)
    return replace(source, notes=(*not_served(model.outputs, model.left_out), *notes))


def _of_module(module: torch.nn.Module) -> ModelTensors:
    """Return the parameters and buffers in the state dict of ``module``."""
    state = module.state_dict()
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    tied = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and first.setdefault(place, name) != name:
            tied[name] = first[place]
    integers = frozenset(name for name, tensor in state.items() if not tensor.dtype.is_floating_point)
    return ModelTensors({name: tuple(tensor.shape) for name, tensor in state.items()}, tied, integers)


def _into_graph(options: Options, checkpoint: Checkpoint, notes: Sequence[str]) -> Source:
    from converter.read import onnx_file
    from converter.read.detect import Kind, recognise

    path = Path(options.model or "")
    kind = recognise(path)
    if kind is not Kind.ONNX:
        raise UsageError(f"--model {path}: is {kind.value}; expected pkg.mod:factory, or an ONNX graph")
    graph, files = onnx_file.read_graph(path)
    inputs, outputs = onnx_file.resolve_edges(graph, options.inputs)
    mapped = fill(options.source, options.map, checkpoint.tensors, _of_graph(graph))
    for name, array in mapped.tensors.items():
        _fill(graph, name, array)
    return Source(
        replace(checkpoint, orders=mapped.orders),
        graph,
        inputs,
        outputs,
        tools=("onnxscript",),
        oracle=_oracle(graph, path.name, options.target.path.parent),
        notes=tuple(notes),
        given=tuple(given_entry("--model", file) for file in files),
    )


def _of_graph(model: ir.Model) -> ModelTensors:
    """Return the floating-point initializers of the main graph, except scalars, which belong to the graph."""
    tensors = ((name, value.const_value) for name, value in model.graph.initializers.items())
    return ModelTensors(
        {
            name: tuple(int(size) for size in tensor.shape.numpy())
            for name, tensor in tensors
            if tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape)
        }
    )


def _fill(graph: ir.Model, name: str, array: Array) -> None:
    """Set an initializer to ``array``, which has its shape, in the initializer's dtype."""
    import onnx_ir as ir

    from converter.graph.initializers import ComputedTensor, rows_of

    value = graph.graph.initializers[name]
    like = value.const_value
    assert like is not None  # noqa: S101 - only initializers with a value are filled
    if like.dtype is not ir.DataType.FLOAT:
        value.const_value = ir.Tensor(array.astype(like.dtype.numpy()), name=name)
    elif array.dtype.name in OTHER_FLOATS:
        value.const_value = ComputedTensor(lambda rows: in_fp32(rows_of(array, rows)), like)
        value.const_value.name = name
    else:
        value.const_value = ir.Tensor(array.astype("float32", copy=False), name=name)


def _oracle(graph: ir.Model, name: str, directory: Path) -> Oracle:
    """Return the oracle of the filled graph, which is written to a temporary directory while the oracle runs."""
    import tempfile

    def outputs(feeds: Sequence[Feeds]) -> Iterator[Feeds]:
        import onnx_ir as ir

        from converter.read import oracles

        with tempfile.TemporaryDirectory(prefix=".bf16kit-graph-", dir=directory) as place:
            path = Path(place) / "graph.onnx"
            ir.save(graph, path, external_data="weights.bin")
            yield from oracles.of_onnx(path, graph).outputs(feeds)

    return Oracle(outputs, f"the graph of {name} with the checkpoint's weights in ONNX Runtime, no optimisation")
