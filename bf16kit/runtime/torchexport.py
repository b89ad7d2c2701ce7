"""Runs a torch.export program (.pt2) with PyTorch, as ``torch.export.load`` gives it.

Loading one runs what is in it: whoever writes the repository decides what runs (SECURITY.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.export.pt2_archive._package import load_pt2
from torch.fx.node import map_aggregate

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.device import CPU
from bf16kit.runtime.torchscript import TorchRuntime, last_line

_LOADING = threading.Lock()  # torch keeps the program that it loads in a variable of the process


class TorchExportRuntime(TorchRuntime):
    """One torch.export program, loaded. The file is read, not mapped."""

    title, backend, profile = "torch.export's program", "torchexport", "pt2"

    @staticmethod
    def _load(path: Path, device: torch.device, native: bool) -> tuple[Callable[..., Any], bool]:
        program = load_program(path)
        is_bf16 = any(tensor.dtype is torch.bfloat16 for tensor in tensors_of(program).values())
        if device.type != CPU:
            program = move_to_device_pass(program, device)
        module = program.module(check_guards=False)
        if is_bf16 and not native:
            widen(module, (torch.bfloat16,))
        return module.forward, is_bf16  # not the module itself, which prints its code when an operator fails


def load_program(path: Path) -> ExportedProgram:
    """Load the program at ``path``; raise :class:`RuntimeFailure` with the reason if torch cannot."""
    with _LOADING:
        with suppress(Exception):  # torch only logs the reason, so it is asked again
            return torch.export.load(path)
        try:
            program: ExportedProgram = load_pt2(str(path)).exported_programs["model"]
        except Exception as error:
            raise RuntimeFailure(f"torch.export cannot load {path.name}: {last_line(error)}") from error
    return program


def tensors_of(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the tensors of ``program`` by name: parameters, buffers and constants."""
    constants = {name: value for name, value in program.constants.items() if isinstance(value, torch.Tensor)}
    return {**program.state_dict, **constants}


def widen(module: torch.fx.GraphModule, dtypes: Collection[torch.dtype]) -> None:
    """Make ``module`` compute in float32 instead of ``dtypes``: its tensors, and the dtypes in its graphs."""

    def wide(value: Any) -> Any:
        return torch.float32 if isinstance(value, torch.dtype) and value in dtypes else value

    for part in graph_modules(module):
        for node in part.graph.nodes:
            node.args, node.kwargs = map_aggregate(node.args, wide), map_aggregate(node.kwargs, wide)
        part.recompile()
    widened: dict[tuple[Any, ...], torch.Tensor] = {}  # once for all names of a tensor
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype in dtypes:
            key = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
            tensor.data = widened.setdefault(key, tensor.data.float())


def graph_modules(module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """Return ``module`` and the graphs that run inside it, under a mode of torch or on a condition."""
    return [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
