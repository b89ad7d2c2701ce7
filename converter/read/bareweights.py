"""Reads weights without a graph as a source, in a model that was saved with them or that ``--model`` names.

That is a torch module, filled by name, or with ``--map`` a module or an ONNX graph, filled by the map's rules. A
Lightning checkpoint's hyper-parameters are arguments for ``--model``.
"""

from __future__ import annotations

import inspect
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import onnx_ir as ir
import torch

from bf16kit.converter.graph.equality import OTHER_FLOATS
from bf16kit.converter.graph.initializers import dims
from bf16kit.converter.options import Options, is_import_spec
from bf16kit.converter.read import onnx_file, oracles, safetensors_file, statedict, torch_file
from bf16kit.converter.read.detect import Kind, recognise
from bf16kit.converter.read.mapping import fill
from bf16kit.converter.read.sources import Advance, check_names, exported_source, inputs_of, precision_notes
from bf16kit.converter.source import Array, Checkpoint, Feeds, Oracle, Source, digest_files, given_entry
from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.messages.wording import brief, first_few

Contents = Mapping[Any, Any]  # of a Lightning checkpoint
_VERSION, _WEIGHTS = "pytorch-lightning_version", "state_dict"
_NESTED = (
    "its TransformerEncoder gives zeros at padded positions in evaluation mode, which no graph does; with"
    " enable_nested_tensor=False it computes the same in all modes"
)
_FORMATS: Mapping[Kind, str] = {
    Kind.SAFETENSORS: "safetensors",
    Kind.SHARDED: "safetensors-sharded",
    Kind.TORCH_ZIP: "torch",
    Kind.PICKLE: "torch-pickle",
    Kind.LIGHTNING: "torch",  # a file that only mentions Lightning
}


def read(options: Options, kind: Kind, advance: Advance) -> Source:
    """Return the weights as a source, in the module or graph that ``--model`` names or that was saved with them."""
    if kind is Kind.LIGHTNING:
        loaded = torch_file.load(options.source, kind, trust_code=options.trust_code)
        if is_lightning(loaded):
            return _read_lightning(options, loaded, advance)
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
    from bf16kit.converter.read.onnx_export import adapt, not_served

    check_names(module, inputs := inputs_of(options))
    model = adapt(statedict.in_fp32(module), inputs, examples=options.examples)
    source = exported_source(checkpoint, model, None, bound=bound)
    if source.oracle is not None and any(getattr(part, "use_nested_tensor", False) for part in module.modules()):
        source.oracle, notes = replace(source.oracle, how=f"{source.oracle.how}; {_NESTED}"), [_NESTED, *notes]
    return replace(source, notes=(*not_served(model.outputs, model.left_out), *notes))


def _names_graph(options: Options) -> bool:
    """Return whether ``--model`` names a file, that is an ONNX graph, rather than a function."""
    named = options.model is not None and not is_import_spec(options.model)
    return named and Path(options.model or "").suffix != ".py" and Path(options.model or "").is_file()


def into_model(options: Options, checkpoint: Checkpoint, notes: Sequence[str]) -> Source:
    """Return the model that ``--model`` names, filled with the tensors of ``checkpoint`` by the map, as a source."""
    source = (_into_graph if _names_graph(options) else _into_module)(options, checkpoint, notes)
    rules = () if options.map is None else (given_entry("--map", options.map),)
    return replace(source, given=(*source.given, *rules))


def _into_module(options: Options, checkpoint: Checkpoint, notes: Sequence[str]) -> Source:
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
    path = Path(options.model or "")
    if (kind := recognise(path)) is not Kind.ONNX:
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
    from bf16kit.converter.read.simplify import as_initializer

    like = initializer.const_value
    assert like is not None  # noqa: S101 - only initializers with a value are filled
    if like.dtype is not ir.DataType.FLOAT or array.dtype.name not in OTHER_FLOATS:
        array = array.astype(like.dtype.numpy(), copy=False)
    initializer.const_value = as_initializer(array, like, initializer.name)


def _oracle(graph: ir.Model, name: str, directory: Path) -> Oracle:
    """Return the oracle of the filled graph, which is written to a temporary directory while the oracle runs."""

    def outputs(feeds: Sequence[Feeds]) -> Iterator[Feeds]:
        with tempfile.TemporaryDirectory(prefix=".bf16kit-graph-", dir=directory) as place:
            path = Path(place) / "graph.onnx"
            ir.save(graph, path, external_data="weights.bin")
            yield from oracles.of_onnx(path, graph).outputs(feeds)

    return Oracle(outputs, f"the graph of {name} with the checkpoint's weights in ONNX Runtime, no optimisation")


# --- Lightning --------------------------------------------------------------------------------------------------------


def _read_lightning(options: Options, loaded: Contents, advance: Advance) -> Source:
    path = options.source
    chosen, prefix, notes = choose(loaded, options.weights)
    tensors = torch_file.arrays(path, Kind.LIGHTNING, chosen, trust_code=options.trust_code)
    if not tensors:
        raise SourceError(f"{path}: is a Lightning checkpoint whose state_dict holds no tensors")
    arguments, argument_notes = factory_arguments(statedict.factory_of(options), options.model_args, loaded)
    module = statedict.build(options, arguments)
    notes += [*argument_notes, *statedict.fit(module, tensors, prefix), *precision_notes(options, tensors)]
    return in_module(options, Checkpoint("lightning", digest_files([path], advance), tensors), module, notes)


def is_lightning(loaded: object) -> TypeGuard[Contents]:
    """Whether what was ``loaded`` from a torch file is a Lightning checkpoint."""
    return isinstance(loaded, Mapping) and _VERSION in loaded and isinstance(loaded.get(_WEIGHTS), Mapping)


def choose(loaded: Contents, wanted: str | None) -> tuple[Contents, str | None, list[str]]:
    """Return the weights that ``--weights`` asks for, the prefix left to choose, and notes on the file.

    They are the ``state_dict``, as Lightning would load it, unless ``wanted`` is another key of the file that holds
    weights, such as the averaged ones of a callback. Those are completed with tensors that are not averaged.
    """
    state = loaded[_WEIGHTS]
    named = [key for key in loaded if isinstance(key, str) and key != _WEIGHTS]
    others = [key for key in named if _holds_weights(loaded[key])]
    progress = [f"{key.replace('_', ' ')} {loaded[key]}" for key in ("epoch", "global_step") if key in loaded]
    notes = [", ".join([f"Lightning {brief(loaded[_VERSION])}", *map(brief, progress)])]
    if wanted in others:
        other = loaded[wanted]
        return {**state, **other} if other.keys() & state.keys() else other, None, notes
    if others:
        notes.append(f"the file also holds weights under {first_few([*map(repr, others)])}; --weights KEY takes those")
    return state, wanted, notes


def _holds_weights(value: object) -> bool:
    """Whether ``value`` maps names to several tensors and nothing else; a counter of an average is a single one."""
    return isinstance(value, Mapping) and len(value) > 1 and all(isinstance(t, torch.Tensor) for t in value.values())


def factory_arguments(
    factory: Callable[..., Any], explicit: Mapping[str, Any], loaded: Contents
) -> tuple[dict[str, Any], list[str]]:
    """Return keyword arguments for ``factory``, and notes on which came from the file and which were left out.

    ``explicit`` overrides the file's hyper-parameters. As in Lightning's ``load_from_checkpoint``, these are passed as
    one mapping if the factory has a parameter of the name that the file states; otherwise, those that it accepts.
    """
    stored = loaded.get("hyper_parameters")
    found = dict(stored) if isinstance(stored, Mapping) else {}
    # LightningCLI's own names, _instantiator and _class_path, are not arguments
    found = {name: value for name, value in found.items() if isinstance(name, str) and not name.startswith("_")}
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a factory written in C may have no signature: it gets only explicit arguments
        return dict(explicit), []
    accepted = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if found and loaded.get("hparams_name") in accepted:
        found = {loaded["hparams_name"]: found}
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    used = {n: value for n, value in found.items() if n not in explicit and (any_name or n in accepted)}
    notes = {
        "passed to --model": [f"{name}={brief(repr(value), 30)}" for name, value in used.items()],
        "that --model does not take": [name for name in found if name not in explicit and name not in used],
    }
    said = [f"hyper-parameters of the file {what}: {first_few(names, 8)}" for what, names in notes.items() if names]
    return used | dict(explicit), said
