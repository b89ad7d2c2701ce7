"""Reads a torch.export program (.pt2) as a source, with its own operators and weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument
from torch.export.passes import move_to_device_pass
from torch.utils._pytree import tree_map

from bf16kit.converter.graph.dimensions import UNKNOWN, name_dimensions
from bf16kit.converter.graph.equality import OTHER_FLOATS
from bf16kit.converter.options import Options
from bf16kit.converter.process.quiet import quiet
from bf16kit.converter.read import onnx_file, oracles, statedict, torch_file
from bf16kit.converter.read.detect import Kind
from bf16kit.converter.read.onnx_export import adapt
from bf16kit.converter.read.sources import Advance, check_trusted, exported_source, precision_notes
from bf16kit.converter.source import Checkpoint, Source, digest_files
from bf16kit.messages.errors import RuntimeFailure, SourceError
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.torchruntimes import graph_modules, load_program, tensors_of, widen

_HOW = "the program as torch.export.load gives it, fp32, on the CPU"

# On some devices these kernels need input and parameters of one dtype, and on all devices they lose precision in bf16.
_IN_FP32 = re.compile(r"(_?native_)?(batch|group|instance|layer|rms)_norm(_legit.*)?|(gru|lstm)(_cell)?|rnn_\w+")


def read(options: Options, kind: Kind, advance: Advance) -> Source:
    """Return the file as a source: the program's module, exported like any other module."""
    check_trusted(options, kind.value)
    torch_file.check_bytes(options.source)
    program = _load(options.source)
    tensors = torch_file.to_numpy(options.source, tensors_of(program))
    notes = precision_notes(options, tensors)
    parameters = [tensors[name] for name in program.graph_signature.parameters]
    others = frozenset(array.dtype.name for array in parameters) & frozenset(OTHER_FLOATS)
    inputs = onnx_file.resolve_inputs(program_inputs(options.source, program, others), options.inputs)
    checkpoint = Checkpoint("torch-export", digest_files([options.source], advance), tensors)
    module = statedict.in_fp32(ProgramModule(program, others)).eval()
    with oracles.unchanged(module, "running the program"):  # its tensors share the checkpoint's memory
        model = adapt(module, inputs, examples=options.examples)
    oracle = replace(oracles.of_module(model), how=_HOW)
    return replace(exported_source(checkpoint, model, None), notes=tuple(notes), oracle=oracle)


def _load(path: Path) -> ExportedProgram:
    """Load the program at ``path`` on the CPU; :class:`SourceError` for one that torch cannot load."""
    with quiet():
        try:
            program = load_program(path)
        except RuntimeFailure as error:
            try:
                if "transformers." not in str(error):
                    raise
                with suppress(ImportError):
                    import transformers.modeling_outputs  # noqa: F401 - torch then knows the class of its outputs
                program = load_program(path)
            except RuntimeFailure as last:
                raise SourceError(f"{path}: {last}") from None
        elsewhere = any(tensor.device.type != "cpu" for tensor in tensors_of(program).values())
        return move_to_device_pass(program, "cpu") if elsewhere else program


def _arguments(program: ExportedProgram) -> list[Any]:
    """Return the program's own inputs in order."""
    return [spec.arg for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]


def program_inputs(path: Path, program: ExportedProgram, others: Collection[str]) -> tuple[TensorSpec, ...]:
    """Return the program's inputs, in its order; those in a precision of ``others`` become fp32."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    names: dict[str, str] = {}
    specs = []
    for argument in _arguments(program):
        if isinstance(argument, ConstantArgument):
            continue
        if not isinstance(argument, TensorArgument):
            raise SourceError(f"{path}: its input {argument.name!r} is a {type(argument).__name__}, expected a tensor")
        value: Any = values[argument.name]  # the tensor that the program was exported with
        dims: list[int | str] = []
        for axis, dim in enumerate(value.shape):
            if isinstance(dim, int) or not dim.node.expr.is_symbol:
                dims.append(dim if isinstance(dim, int) else UNKNOWN)
            else:  # named after the input and axis where it occurs first
                first = "batch" if axis == 0 and not names else f"{argument.name}_{axis}"
                dims.append(names.setdefault(str(dim), first))
        dtype = str(value.dtype).removeprefix("torch.")
        specs.append(TensorSpec(argument.name, "float32" if dtype in others else dtype, tuple(dims)))
    return name_dimensions(specs)


class ProgramModule(torch.nn.Module):
    """The module of ``program``, which takes its input tensors by position; dtypes in ``others`` become float32."""

    def __init__(self, program: ExportedProgram, others: Collection[str] = ()) -> None:
        super().__init__()
        self.own = program.module(check_guards=False)
        if others:
            widen(self.own, [getattr(torch, name) for name in others])
        for part in graph_modules(self.own):
            for node in list(part.graph.nodes):
                if node.target is torch.ops.aten._assert_tensor_metadata.default:
                    part.graph.erase_node(node)  # of a dtype, before a cast: autocast gives another
                elif isinstance(node.target, torch._ops.OpOverload):
                    node.target = _careful(node.target)
            part.recompile()
        self._arguments = _arguments(program)
        self._structure = program.call_spec.in_spec

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return what the exported module returns."""
        tensors = iter(inputs)
        flat = [each.value if isinstance(each, ConstantArgument) else next(tensors) for each in self._arguments]
        args, kwargs = self._structure.unflatten(flat)
        return self.own.forward(*args, **kwargs)

    def train(self, mode: bool = True) -> ProgramModule:
        """Do nothing: a program was exported in one mode, and torch's modules of programs refuse to be asked."""
        return self


def _careful(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """Wrap an ATen operator for autocast, as `narrowed` does modules: norms compute in fp32, tables return it."""
    name = operator.overloadpacket.__name__

    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_wide, (args, kwargs))
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
            return operator(*args, **kwargs)

    if name in ("embedding", "embedding_bag"):
        return lambda *args, **kwargs: tree_map(_wide, operator(*args, **kwargs))
    return in_fp32 if _IN_FP32.fullmatch(name) else operator


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 else value
