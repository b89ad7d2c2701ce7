"""A torch.export program as a torch module: its operators called one by one, its tensors as parameters and buffers.

A module is what the other steps can run, export and trace. torch's own loader for such files is not used: see
:mod:`bf16kit.runtime.exported.archive`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from bf16kit.messages.errors import SourceError
from bf16kit.runtime.exported.graph import Program
from bf16kit.runtime.torchexport import bind
from converter.read.statedict import to_torch
from converter.source import Array

# On some devices these kernels need input and parameters of one dtype, and on all devices they lose precision in bf16.
_IN_FP32 = frozenset(
    """
    _native_batch_norm_legit _native_batch_norm_legit_no_training batch_norm group_norm gru gru_cell instance_norm
    layer_norm lstm lstm_cell native_batch_norm native_group_norm native_layer_norm rms_norm rnn_relu rnn_tanh
    """.split()  # noqa: SIM905 - words are read more easily than a list of quoted ones
)
_TABLES = frozenset({"embedding", "embedding_bag"})


class ProgramModule(torch.nn.Module):
    """Takes the program's inputs by position, and returns its outputs by name.

    ``tensors`` are the archive's by name, and ``parameters`` names those that are parameters. Dtypes in ``widened``
    become float32, in the program's arguments, too.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Array],
        parameters: Collection[str],
        widened: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.held = torch.nn.Module()
        self._paths = {value: fqn.split(".") for value, fqn in program.tensors.items()}
        made: dict[tuple[int, bool], torch.Tensor] = {}  # one tensor for all names of an array
        for fqn, array in tensors.items():
            key = id(array), fqn in parameters and array.dtype.kind not in "biu"
            if key not in made:
                made[key] = _made(array, is_parameter=key[1], widen=array.dtype.name in widened)
            _register(self.held, fqn, made[key])
        self._bound = bind(program, torch.device("cpu"), widened=widened, wrap=_careful)

    def forward(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        values: dict[str, Any] = {
            value: functools.reduce(getattr, path, self.held) for value, path in self._paths.items()
        }
        found: dict[str, torch.Tensor] = self._bound.run(values | dict(zip(self._bound.inputs, inputs, strict=True)))
        return found


def _made(array: Array, *, is_parameter: bool, widen: bool) -> torch.Tensor:
    tensor = to_torch(array)
    if widen:
        tensor = tensor.to(torch.float32)
    return torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def _register(root: torch.nn.Module, fqn: str, tensor: torch.Tensor) -> None:
    """Register ``tensor`` as ``fqn``, creating the modules on its path; :class:`SourceError` for an invalid name."""
    *path, name = fqn.split(".")
    module = root
    try:
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        if isinstance(tensor, torch.nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
    except KeyError as error:
        raise SourceError(f"tensor {fqn!r} has a name that is not possible in a module: {error.args[0]}") from None


def _careful(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an ATen operator for use under autocast: norms compute in fp32, and tables return fp32.

    :func:`converter.write.torchscript.narrowed` does the same for modules.
    """
    if name in _TABLES:
        return lambda *args, **kwargs: _wide(function(*args, **kwargs))
    if name not in _IN_FP32:
        return function

    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tuple(map(_wide, args)), {key: _wide(value) for key, value in kwargs.items()}
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return in_fp32


def _wide(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_wide, value))
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 else value
