"""What the readers of all formats share: inputs and outputs, trust, precisions, and turning a module into a source."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from bf16kit.converter.graph.dimensions import UNKNOWN, name_dimensions
from bf16kit.converter.graph.equality import OTHER_FLOATS
from bf16kit.converter.graph.operators import MOVEMENT
from bf16kit.converter.options import Options
from bf16kit.converter.source import Array, Checkpoint, Sampler, Source, TorchModel
from bf16kit.messages.errors import ConversionError, RuntimeFailure, SourceError, UsageError
from bf16kit.messages.wording import quoted, size
from bf16kit.numerics.tensors import BY_NAME, BY_ONNX, Kind, TensorSpec, describe

Advance = Callable[[int], None]  # called with the number of bytes read
_CLAIM, _ALLOWANCE = 64, 1 << 30  # how many times the bytes of a source, and how many more, its tensors may need
_MORE = 3  # by how much every free dimension grows in the second run
_LARGEST = 2**47  # elements of one tensor: more than any machine can map


def inputs_of(options: Options) -> tuple[TensorSpec, ...]:
    """Return the inputs of ``--input``; :class:`UsageError` if there are none."""
    if not options.inputs:
        raise UsageError(
            f"{options.source}: a checkpoint does not describe its model's inputs; name each with --input"
            " NAME:DTYPE:DIMS, for example --input x:float32:batch,16"
        )
    return options.inputs


def check_names(module: Any, given: Sequence[TensorSpec]) -> None:
    """Raise :class:`UsageError` for an input that the ``forward`` of a torch module does not have, naming its own.

    Any names will do for a ``forward(*args)``, and for torch.nn.Sequential, whose ``input`` nobody has chosen.
    """
    named, takes_more = parameters_of(module)
    if not named or takes_more or named == ["input"]:
        return
    for spec in given:
        if spec.name not in named:
            raise UsageError(f"--input {spec.name}: {type(module).__name__} takes {', '.join(named)}")


def parameters_of(module: Any) -> tuple[list[str], bool]:
    """Return the names of the parameters of ``forward``, except ``*args`` and ``**kwargs``, and if it has ``*args``."""
    found = inspect.signature(module.forward).parameters.values()
    named = [each.name for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return named, any(each.kind is each.VAR_POSITIONAL for each in found)


def no_architecture(path: Path) -> UsageError:
    """Return the error for weights at ``path`` without ``--model``."""
    return UsageError(
        f"{path}: holds weights but no architecture; name it with --model pkg.mod:factory (a function or class that"
        " returns the torch module) or --model graph.onnx"
    )


def check_fp32(path: Path, tensors: Mapping[str, Array]) -> None:
    """Raise :class:`ConversionError` if none of the ``tensors`` at ``path`` is fp32, naming what they are."""
    dtypes = {tensor.dtype.name for tensor in tensors.values()}
    if "float32" not in dtypes:
        others = ", ".join(sorted(dtypes & set(OTHER_FLOATS)))
        remedy = f": they are {others}; export the model in fp32" if others else ""
        raise ConversionError(f"{path}: holds no fp32 weights, so there is nothing to convert{remedy}")


def check_claim(source: Path, claimed: int, files: Iterable[Path]) -> None:
    """Raise :class:`SourceError` if tensors of ``claimed`` bytes cannot be those of ``files``, before they get memory.

    zstd makes zeros 10,000 times smaller, and an expanded tensor is stored once. Weights are not like that.
    """
    stored = 0 if claimed <= _ALLOWANCE else sum(file.stat().st_size for file in files)
    if claimed > _CLAIM * stored + _ALLOWANCE:
        raise SourceError(f"{source}: damaged: its tensors claim {size(claimed)}, but its files have {size(stored)}")


def check_trusted(options: Options, what: str) -> None:
    """Raise :class:`SourceError` for ``what``, a source that is a program, unless ``--trust-code`` was given."""
    if not options.trust_code:
        raise untrusted(options.source, f"is {what}")


def untrusted(
    path: Path, reason: str, remedy: str = "save its weights as safetensors or the model as ONNX"
) -> SourceError:
    """Return the error for the program at ``path``; ``reason`` says what it is, ``remedy`` how to do without it."""
    return SourceError(
        f"{path}: {reason}, and loading it runs the code in it: whoever writes it decides what runs, as with Triton and"
        f" TorchServe; {remedy}, or pass --trust-code if you trust them"
    )


def mismatch_message(what: str, problems: Sequence[str]) -> str:
    """Return ``what``, then the first five of ``problems``, one per line, and how many more there are."""
    more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
    return f"{what}:" + "".join(f"\n  {problem}" for problem in problems[:5]) + more


def precision_notes(options: Options, tensors: Mapping[str, Array]) -> list[str]:
    """Return a sentence for each precision among ``tensors`` that loses something; bf16 loses nothing.

    Raises :class:`SourceError` naming the first fp64 tensor with a number that fp32 cannot hold.
    """
    halves = sum(tensor.dtype.name == "float16" for tensor in tensors.values())
    doubles = {name: tensor for name, tensor in tensors.items() if tensor.dtype == np.float64}
    for name, tensor in doubles.items():
        with np.errstate(over="ignore"):
            if np.any(np.isinf(tensor.astype(np.float32)) & np.isfinite(tensor)):
                raise SourceError(
                    f"{options.source}: tensor {quoted(name)} is fp64 and holds a number above fp32's largest,"
                    f" {np.finfo(np.float32).max:.4g}, which would become infinity in the model"
                )
    notes = []
    if halves:
        kept = "in the residual, so restore gives back fp16 bit for bit" if options.residual else "not kept"
        notes.append(
            f"{halves} of the checkpoint's tensors are fp16: bf16 has 8 of their 11 bits, the other three are {kept}"
        )
    if doubles:
        notes.append(
            f"{len(doubles)} of the checkpoint's tensors are fp64: the model computes in fp32, and restore gives fp32"
            " for tensors that the model uses; their fp64 precision is lost"
        )
    return notes


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
    from bf16kit.converter.read import oracles
    from bf16kit.converter.read.onnx_export import Untranslatable, to_onnx

    failure = None
    with oracles.unchanged(model.module, "torch.onnx.export"):
        try:
            graph = to_onnx(model, checkpoint.tensors if bound is None else bound)
        except Untranslatable as error:
            failure = str(error)
    if failure is not None:
        return source_without_graph(checkpoint, model, sampler, tools, reason=failure)
    tools, oracle = ("torch", "onnxscript", *tools), oracles.of_module(model)
    return Source(checkpoint, graph, model.inputs, output_specs(graph), model, sampler, tools, oracle)


def source_without_graph(
    checkpoint: Checkpoint, model: TorchModel, sampler: Sampler | None, tools: tuple[str, ...] = (), *, reason: str
) -> Source:
    """Return ``model`` as a source without a graph, for formats that torch runs; ``reason`` says why ONNX failed."""
    from bf16kit.converter.read import oracles

    outputs, oracle = measured_outputs(model), oracles.of_module(model)
    return Source(
        checkpoint, None, model.inputs, outputs, model, sampler, ("torch", *tools), oracle, no_graph_reason=reason
    )


def measured_outputs(model: TorchModel) -> tuple[TensorSpec, ...]:
    """Return the outputs of ``model``, found by running it twice with different sizes of the free dimensions.

    A dimension that equals a free input dimension in both runs gets its name. One that changes otherwise is free, and
    named after its output. Any other is fixed. Raises :class:`ConversionError` for a dtype that is not served, and for
    outputs whose rank changes.
    """
    from bf16kit.converter.read import oracles
    from bf16kit.runtime.torchruntimes import to_array

    run = oracles.of_module(model)
    small = {spec.name: to_array(tensor) for spec, tensor in zip(model.inputs, model.example, strict=True)}
    more = {spec.name: [(0, _MORE * isinstance(dim, str)) for dim in spec.shape] for spec in model.inputs}
    large = {name: np.pad(array, more[name], mode="edge") if more[name] else array for name, array in small.items()}
    (first,) = run([small])
    try:
        (second,) = run([large])
    except RuntimeFailure:  # a dimension looks free but is fixed; the samples will show the sizes
        second, large = first, small
    names: dict[tuple[int, int], str] = {}  # of free dimensions, by their sizes in both runs
    for spec in model.inputs:
        for dim, *sizes in zip(spec.shape, small[spec.name].shape, large[spec.name].shape, strict=True):
            if isinstance(dim, str):
                names.setdefault((sizes[0], sizes[1]), dim)
    found = []
    for name, one in first.items():
        two = second[name]
        if one.ndim != two.ndim:
            raise ConversionError(
                f"output {quoted(name)} has {one.ndim} dimensions for one input and {two.ndim} for another"
            )
        pairs = zip(one.shape, two.shape, strict=True)
        dims = tuple(names.get((a, b), a if a == b and a else UNKNOWN) for a, b in pairs)
        if one.dtype.name not in BY_NAME:
            raise ConversionError(
                f"output {quoted(name)} is {one.dtype.name}, and bf16kit serves tensors of plain dtypes only"
            )
        found.append(TensorSpec(name, one.dtype.name, dims, kind_of(name, one.dtype.name)))
    return name_dimensions(found, model.inputs)


def input_specs(model: ir.Model) -> tuple[TensorSpec, ...]:
    """Return the graph's inputs; unnamed free dimensions are named after input and axis.

    Raises :class:`ConversionError` for sequences, optionals, unknown ranks, dtypes that bf16kit does not serve, and
    sizes that do not fit any memory.
    """
    return name_dimensions([_spec(value, "other") for value in model.graph.inputs])


def output_specs(model: ir.Model) -> tuple[TensorSpec, ...]:
    """Return the graph's outputs as :func:`input_specs` does, each with the kind that its name suggests.

    Integers that the graph chose by comparing scores are labels, whatever their name.
    """
    found = []
    for value in model.graph.outputs:
        spec = _spec(value, "other")
        chosen = "int" in spec.dtype and _is_chosen(value)
        found.append(replace(spec, kind="logits" if chosen else kind_of(spec.name, spec.dtype)))
    return name_dimensions(found, input_specs(model))


def _is_chosen(value: ir.Value | None) -> bool:
    """Whether ``value`` holds indices that ArgMax, ArgMin or TopK chose, moved at most."""
    reached, waiting = {value}, [value]
    for each in waiting:  # which grows
        node = None if each is None else each.producer()
        if node is None:
            return False
        if node.op_type in (*MOVEMENT, "Cast"):
            moved = {*(node.inputs if node.op_type == "Concat" else node.inputs[:1])} - reached
            reached |= moved
            waiting += moved
        elif node.op_type not in ("ArgMax", "ArgMin") and (node.op_type != "TopK" or each is not node.outputs[1]):
            return False
    return True


def kind_of(name: str, dtype: str) -> Kind:
    """Return an output's kind, guessed from its name; of labels, which are what logits decide, it is that of logits."""
    if dtype == "bool" or re.search("label|class|argmax" if "int" in dtype else "logits|scores", name.lower()):
        return "logits"
    return "embedding" if re.search("embed|hidden_state|pooler", name.lower()) else "other"


def _spec(value: ir.Value, kind: Kind) -> TensorSpec:
    name = value.name or ""
    if value.type is None:
        raise SourceError(f"truncated or damaged: {quoted(name)} has no type")
    if value.dtype is None or int(value.dtype) not in BY_ONNX:
        raise ConversionError(f"{quoted(name)} is {value.type}, and bf16kit serves tensors of plain dtypes only")
    if value.shape is None:
        raise ConversionError(f"{quoted(name)} has no known rank; run ONNX shape inference on the model first")
    dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    if 0 in dims:
        raise ConversionError(
            f"{quoted(name)} has size 0 in dimension {dims.index(0)}; export the model with a named dimension there"
        )
    # some exporters write −1 for a free dimension
    shape = tuple(UNKNOWN if dim is None or (isinstance(dim, int) and dim < 0) else dim for dim in dims)
    if math.prod(dim for dim in shape if isinstance(dim, int)) > _LARGEST:
        raise ConversionError(f"{quoted(name)} is declared as {describe(shape)}, which does not fit in any memory")
    return TensorSpec(name, BY_ONNX[int(value.dtype)].name, shape, kind)
