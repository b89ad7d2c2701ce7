"""Runs a torch.export program (.pt2) with PyTorch, operator by operator, without torch's own loader.

``torch.export.load`` is for trusted files (see :mod:`bf16kit.runtime.exported.archive`), and turns the program into
Python code that calls ATen's operators one after the other. Here a checked value is run the same way. Device and
precision are replaced when the program is bound, so one file works for all devices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Array
from bf16kit.runtime.device import CPU
from bf16kit.runtime.exported import operators
from bf16kit.runtime.exported.archive import Archive, read_archive
from bf16kit.runtime.exported.graph import Graph, Node, Program, parse_program
from bf16kit.runtime.exported.steps import BoundProgram, Step, Values, assigned_names, referenced_names
from bf16kit.runtime.exported.values import Device, DType, Layout, MemoryFormat
from bf16kit.runtime.exportedguards import with_argument_checks
from bf16kit.runtime.torchscript import (
    TorchRuntime,
    last_line,
    to_array,
    to_tensor,
    torch_dtype,
    use_threads,
)

Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]
HALVES = ("bfloat16", "float16")


class TorchExportRuntime(TorchRuntime):
    """One torch.export program, loaded: a :class:`bf16kit.runtime.Runtime`.

    The arguments are those of :class:`~bf16kit.runtime.torchscript.TorchScriptRuntime`. Device, threads and bf16 on a
    CPU without bf16 instructions are handled as there. The file is read, not mapped.

    Raises :class:`DeviceUnavailable` when the device cannot be used, :class:`RuntimeFailure` for a file that is
    rejected (:mod:`bf16kit.runtime.exported`) or whose inputs and outputs differ from the specs.
    """

    def __init__(
        self,
        path: Path,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        device: str = CPU,
        threads: int | None = None,
        native_bf16: bool | None = None,
    ) -> None:
        super().__init__("torch.export", inputs, outputs, device, threads)
        try:
            archive = read_file(path)
            program = parse_program(archive.program, archive.tensors)
            arrays = {name: archive.tensor(name) for name in sorted(set(program.tensors.values()))}
            tensors = {id(array): to_tensor(array) for array in arrays.values()}  # one tensor for all names of an array
            is_bf16 = any(tensor.dtype is torch.bfloat16 for tensor in tensors.values())
            native = self._computes_in_bf16(is_bf16, native_bf16)
            halves = ("bfloat16",) if is_bf16 and not native else ()
            self._bound: BoundProgram | None = bind(program, self._device, widened=halves)
        except RuntimeFailure as error:
            raise RuntimeFailure(f"{path.name}: {error}") from None
        _check_edges(path, program, self._inputs, self._outputs)
        placed = {key: _to_device(tensor, self._device, widen=bool(halves)) for key, tensor in tensors.items()}
        self._values: Values = {value: placed[id(arrays[fqn])] for value, fqn in program.tensors.items()}
        self._info = self._runtime_info("torchexport", "pt2", is_bf16, native)

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        """See :meth:`bf16kit.runtime.Runtime.run`."""
        bound, values = self._bound, self._values
        if bound is None:
            raise RuntimeFailure("the model is closed")
        use_threads(self._threads)
        try:
            with torch.inference_mode():
                # Copies, each in memory of its own: a program can access all the memory that its inputs are in.
                given = [to_tensor(np.array(feeds[spec.name], order="C")).to(self._device) for spec in self._inputs]
                results = bound.run_graph(values | dict(zip(bound.inputs, given, strict=True)))
                found = {spec.name: tensor for spec, tensor in zip(self._outputs, results, strict=True)}
                requested = found if outputs is None else {name: found[name] for name in outputs}
                return {name: to_array(tensor, self._dtypes[name]) for name, tensor in requested.items()}
        except Exception as error:  # whatever an operator raises
            raise RuntimeFailure(f"torch.export's program failed: {last_line(error)}") from error

    def close(self) -> None:
        """Drop the weights; they are freed when the active runs have ended. Later calls of ``run`` fail."""
        self._bound = None
        self._values = {}


def _check_edges(path: Path, program: Program, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Check that the program's inputs and outputs match the specs in order; their names may differ."""
    if len(program.inputs) != len(inputs) or len(program.outputs) != len(outputs) or not all(program.outputs):
        raise RuntimeFailure(
            f"{path.name}: takes {len(program.inputs)} tensors and gives {len(program.outputs)}, expected"
            f" {len(inputs)} and {len(outputs)}"
        )
    for edge, spec in zip(program.inputs, inputs, strict=True):
        if edge.dtype != spec.dtype or len(edge.shape) != len(spec.shape):
            raise RuntimeFailure(
                f"{path.name}: input {edge.name!r} is {edge.dtype} of rank {len(edge.shape)}, expected {spec.dtype} of"
                f" rank {len(spec.shape)}"
            )


def read_file(path: Path) -> Archive:
    """Read the archive at ``path`` into private memory."""
    try:
        size = path.stat().st_size
        data = bytearray(size)
        with path.open("rb") as file:
            if file.readinto(data) != size:
                raise RuntimeFailure("was truncated while it was read")
    except OSError as error:
        raise RuntimeFailure(f"cannot be read: {error.strerror or error}") from None
    return read_archive(memoryview(data))


def bind(
    program: Program, device: torch.device, *, widened: Collection[str] = (), wrap: Wrap | None = None
) -> BoundProgram:
    """Bind ``program`` to ``device``; dtypes in ``widened`` become float32.

    ``wrap`` may replace an ATen operator, by name.

    Raises :class:`RuntimeFailure` for an operator that this torch does not have.
    """
    binder = _Binder(device, frozenset(widened), wrap)
    fixed = frozenset({*program.tensors, *(edge.name for edge in program.inputs)})
    steps, results = binder.graph(program.graph, fixed)
    return BoundProgram(tuple(edge.name for edge in program.inputs), steps, results, program.outputs)


class _Binder:
    def __init__(self, device: torch.device, widened: frozenset[str], wrap: Wrap | None) -> None:
        self._device, self._widened, self._wrap = device, widened, wrap

    def graph(self, graph: Graph, fixed: frozenset[str]) -> tuple[tuple[Step, ...], tuple[Any, ...]]:
        results = tuple(map(self._argument, graph.results))
        last: dict[str, int] = {}
        for position, node in enumerate(graph.nodes):
            for name in referenced_names((*node.args, *node.kwargs.values())):
                last[name] = position
        kept = {*fixed, *referenced_names(graph.results)}
        dead_values: dict[int, list[str]] = {}
        made = {name for node in graph.nodes for name in assigned_names(node.outputs)}
        for name, position in last.items():
            if name not in kept and name in made:
                dead_values.setdefault(position, []).append(name)
        return tuple(
            self._step(node, tuple(dead_values.get(position, ()))) for position, node in enumerate(graph.nodes)
        ), results

    def _step(self, node: Node, dead_values: tuple[str, ...]) -> Step:
        function, args = self._function(node)
        bound = tuple(map(self._argument, args))
        kwargs = {key: self._argument(value) for key, value in node.kwargs.items()}
        return Step(function, bound, kwargs, node.outputs, node.single, dead_values)

    def _function(self, node: Node) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if node.target in (operators.GRAD_MODE, operators.AUTOCAST):
            return self._bind_subgraph(node)
        module, _, rest = node.target.rpartition(".")
        if module in _MODULES:
            return _sizes_only(node.target, getattr(_MODULES[module], rest)), node.args
        name = module.removeprefix("torch.ops.aten.")
        packet = getattr(torch.ops.aten, name, None)
        found = getattr(packet, rest, None)
        if not isinstance(found, torch._ops.OpOverload):
            raise RuntimeFailure(f"uses the operator {node.target!r}, which torch {torch.__version__} does not have")
        if name not in operators.IN_PLACE and name not in operators.RUNNING and _writes(found):
            raise RuntimeFailure(f"uses the operator {node.target!r}, which writes into its inputs")
        return with_argument_checks(name, found, found if self._wrap is None else self._wrap(name, found)), node.args

    def _bind_subgraph(self, node: Node) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Bind a graph that runs in a torch mode.

        The node's arguments are the mode's settings, the graph, and its inputs.
        """
        position = next((i for i, value in enumerate(node.args) if isinstance(value, Graph)), None)
        if position is None or node.kwargs or len(node.args) - position - 1 != len(node.args[position].inputs):
            raise RuntimeFailure(f"operator {node.target!r} does not get a graph and that graph's inputs")
        graph = node.args[position]
        steps, results = self.graph(graph, frozenset(graph.inputs))
        bound = BoundProgram(graph.inputs, steps, results)
        mode = self._autocast(node.args[:position]) if node.target == operators.AUTOCAST else nullcontext

        def run(*given: Any) -> list[Any]:
            with mode():
                return bound.run_graph(dict(zip(graph.inputs, given, strict=True)))

        return run, node.args[position + 1 :]

    def _autocast(self, settings: tuple[Any, ...]) -> Callable[[], Any]:
        dtype, enabled = (*settings[1:3], True)[:2] if len(settings) > 1 else (None, True)
        chosen = self._argument(dtype) if isinstance(dtype, DType) else None
        on = enabled is True and chosen is not torch.float32
        return lambda: torch.autocast(self._device.type, chosen if on else None, enabled=on, cache_enabled=False)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._argument(item) for item in value]
        if isinstance(value, DType):
            return torch.float32 if value.name in self._widened else torch_dtype(value.name)
        if isinstance(value, Device):
            return self._device
        if isinstance(value, MemoryFormat):
            return getattr(torch, value.name)
        if isinstance(value, Layout):
            return torch.strided
        if isinstance(value, Graph):
            raise RuntimeFailure("an operator that takes no graph is given one")
        return value


def _writes(operator: torch._ops.OpOverload) -> bool:
    """Return whether ``operator`` declares that it writes into an argument, as sort.values does among others."""
    return any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in operator._schema.arguments
    )


def _sizes_only(target: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that it accepts and returns sizes only.

    Tensors would bypass the operators' guards and the check of writes. The product of a large integer, a string or a
    list could be arbitrarily long.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs) if not any(map(_is_not_a_size, (*args, *kwargs.values()))) else None
        if found is None or (type(found) is int and not -_LARGEST <= found < _LARGEST):
            raise RuntimeFailure(f"operator {target!r} is given a value that is not a size")
        return found

    return run


def _is_not_a_size(value: Any) -> bool:
    return isinstance(value, torch.Tensor | list | str)


_LARGEST = 2**63
_MODULES: Mapping[str, Any] = {"_operator": operator, "torch": torch, "math": math}


def _to_device(tensor: torch.Tensor, device: torch.device, *, widen: bool) -> torch.Tensor:
    found = tensor.float() if widen and tensor.dtype is torch.bfloat16 else tensor
    return found.to(device)
