"""Reads weights without a graph as a source, in a model that was saved with them or that ``--model`` names.

That is a torch module, filled by name, or with ``--map`` a module or an ONNX graph, filled by the map's rules.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.messages.errors import SourceError, UsageError
from converter.graph.equality import OTHER_FLOATS
from converter.graph.initializers import dims
from converter.options import Options, is_import_spec
from converter.read.detect import Kind, recognise
from converter.read.mapping import fill
from converter.read.sources import Advance, exported_source, inputs_of, precision_notes
from converter.source import Array, Checkpoint, Feeds, Oracle, Source, digest_files, given_entry

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

_FORMATS: Mapping[Kind, str] = {
    Kind.SAFETENSORS: "safetensors",
    Kind.SHARDED: "safetensors-sharded",
    Kind.TORCH_ZIP: "torch",
    Kind.PICKLE: "torch-pickle",
}


def read(options: Options, kind: Kind, advance: Advance) -> Source:
    """Return the weights as a source, in the module or graph that ``--model`` names or that was saved with them."""
    from converter.read import safetensors_file, statedict

    tensors, files, module = _tensors(options, kind)
    if not tensors:
        raise SourceError(f"{options.source}: holds no tensors")
    notes = precision_notes(options, tensors)
    mapped = module is None and (options.map is not None or _names_graph(options))
    if module is not None and options.map is not None:
        raise UsageError(f"--map: {options.source} brings its own module; leave it out")
    if options.weights is not None and (mapped or module is not None):
        raise UsageError("--weights: chooses weights by the names of a module that --model builds; leave it out")
    if module is None and not mapped:
        module = statedict.build(options)
        try:
            notes = [*statedict.fit(module, tensors, options.weights), *notes]
        except SourceError as error:
            index = next(options.source.parent.glob("*.safetensors.index.json"), None)
            if kind is not Kind.SAFETENSORS or index is None:
                raise
            raise SourceError(f"{error}\n  if it is one of the shards of {index}, convert that file") from None
    shards = safetensors_file.shards(files[0]) if kind is Kind.SHARDED else ()
    checkpoint = Checkpoint(_FORMATS[kind], digest_files(files, advance), tensors, shards)
    if module is None:
        return into_model(options, checkpoint, notes)
    return in_module(options, checkpoint, module, notes)


def _tensors(options: Options, kind: Kind) -> tuple[Mapping[str, Array], list[Path], torch.nn.Module | None]:
    """Return the tensors, the files that hold them, and the module that was saved with them."""
    from converter.read import safetensors_file, torch_file

    path = options.source
    if kind is Kind.SAFETENSORS:
        return safetensors_file.read_file(path), [path], None
    if kind is Kind.SHARDED:
        index = next(path.glob("*.safetensors.index.json")) if path.is_dir() else path
        return *safetensors_file.read_sharded(index), None
    tensors, module = torch_file.read_file(path, kind, trust_code=options.trust_code)
    return tensors, [path], module


def in_module(
    options: Options,
    checkpoint: Checkpoint,
    module: torch.nn.Module,
    notes: Sequence[str],
    bound: Mapping[str, Array] | None = None,
) -> Source:
    """Return a ``module`` that holds the weights of ``checkpoint`` as a source; ``bound`` as `exported_source`."""
    from converter.read import statedict
    from converter.read.torch.onnx_export import adapt, not_served

    model = adapt(statedict.in_fp32(module), inputs_of(options))
    source = exported_source(checkpoint, model, None, bound=bound)
    return replace(source, notes=(*not_served(model.outputs, model.left_out), *notes))


def _names_graph(options: Options) -> bool:
    """Return whether ``--model`` names a file, that is an ONNX graph, rather than a function."""
    return options.model is not None and not is_import_spec(options.model) and Path(options.model).is_file()


def into_model(options: Options, checkpoint: Checkpoint, notes: Sequence[str]) -> Source:
    """Return the model that ``--model`` names, filled with the tensors of ``checkpoint`` by the map, as a source."""
    source = (_into_graph if _names_graph(options) else _into_module)(options, checkpoint, notes)
    rules = () if options.map is None else (given_entry("--map", options.map),)
    return replace(source, given=(*source.given, *rules))


def _into_module(options: Options, checkpoint: Checkpoint, notes: Sequence[str]) -> Source:
    from converter.read import statedict

    module = statedict.build(options)
    state = module.state_dict()
    places = Counter(map(statedict.place, state.values()))
    tied = {name for name, tensor in state.items() if places[statedict.place(tensor)] > 1}
    counters = {name for name, tensor in state.items() if not tensor.dtype.is_floating_point}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    filled = fill(options.source, options.map, checkpoint.tensors, shapes, tied | counters)
    statedict.fill(module, filled.tensors, kept=filled.kept | counters)
    return in_module(options, replace(checkpoint, orders=filled.orders), module, notes, filled.tensors)


def _into_graph(options: Options, checkpoint: Checkpoint, notes: Sequence[str]) -> Source:
    """Fill the floating-point initializers of a graph, except scalars, which belong to the graph."""
    from converter.read import onnx_file

    path = Path(options.model or "")
    kind = recognise(path)
    if kind is not Kind.ONNX:
        raise UsageError(f"--model {path}: is {kind.value}; expected pkg.mod:factory, or an ONNX graph")
    graph, files = onnx_file.read_graph(path)
    inputs, outputs = onnx_file.resolve_edges(graph, options.inputs)
    tensors = ((name, value.const_value) for name, value in graph.graph.initializers.items())
    shapes = {
        name: dims(tensor)
        for name, tensor in tensors
        if tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape)
    }
    filled = fill(options.source, options.map, checkpoint.tensors, shapes)
    for name, array in filled.tensors.items():
        _fill(graph.graph.initializers[name], array)
    return Source(
        replace(checkpoint, orders=filled.orders),
        graph,
        inputs,
        outputs,
        tools=("onnxscript",),
        oracle=_oracle(graph, path.name, options.target.path.parent),
        notes=tuple(notes),
        given=tuple(given_entry("--model", file) for file in files),
    )


def _fill(initializer: ir.Value, array: Array) -> None:
    """Set an initializer to ``array``, which has its shape, in the initializer's dtype."""
    import onnx_ir as ir

    from converter.read.torch.simplify import as_initializer

    like = initializer.const_value
    assert like is not None  # noqa: S101 - only initializers with a value are filled
    if like.dtype is not ir.DataType.FLOAT or array.dtype.name not in OTHER_FLOATS:
        array = array.astype(like.dtype.numpy(), copy=False)
    initializer.const_value = as_initializer(array, like, initializer.name)


def _oracle(graph: ir.Model, name: str, directory: Path) -> Oracle:
    """Return the oracle of the filled graph, which is written to a temporary directory while the oracle runs."""

    def outputs(feeds: Sequence[Feeds]) -> Iterator[Feeds]:
        import onnx_ir as ir

        from converter.read import oracles

        with tempfile.TemporaryDirectory(prefix=".bf16kit-graph-", dir=directory) as place:
            path = Path(place) / "graph.onnx"
            ir.save(graph, path, external_data="weights.bin")
            yield from oracles.of_onnx(path, graph).outputs(feeds)

    return Oracle(outputs, f"the graph of {name} with the checkpoint's weights in ONNX Runtime, no optimisation")
