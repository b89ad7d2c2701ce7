"""A bare state dict made runnable: the architecture comes from ``--model``, the weights are fitted into it by name."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bf16kit.errors import SourceError, UsageError
from converter.model import Array
from converter.options import Options
from converter.process.imports import import_callable
from converter.process.quiet import first_line, quiet

if TYPE_CHECKING:
    import torch

# What wrappers put before every name: DistributedDataParallel, Lightning modules by habit, torch.compile.
_PREFIXES = ("module.", "model.", "_orig_mod.")
_NAMED = 5


def build(options: Options) -> torch.nn.Module:
    """What ``--model pkg.mod:factory`` returns for ``--model-args``, in fp32, its large tensors in temporary files."""
    import torch

    from converter.process.tensorfiles import TensorFiles

    factory = factory_of(options)
    files = TensorFiles(options.target.path.parent)
    try:
        with quiet(), files:
            module = factory(**options.model_args)
    except Exception as error:  # the user's code may raise anything
        raise UsageError(f"--model {options.model}: the factory failed: {first_line(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"--model {options.model}: returned {type(module).__name__}, expected a torch.nn.Module")
    with files:
        return in_fp32(module)


def outline(options: Options) -> dict[str, torch.Tensor] | None:
    """The state of what :func:`build` would build, in shapes alone; None where it cannot be built without memory.

    The arguments may come from a file, and a file may say any size.
    """
    import torch

    factory = factory_of(options)
    try:
        with quiet(), torch.device("meta"):
            module = factory(**options.model_args)
    except Exception:  # noqa: BLE001 - the user's code may need numbers, which the meta device has none of
        return None
    return module.state_dict() if isinstance(module, torch.nn.Module) else None


def factory_of(options: Options) -> Callable[..., Any]:
    """What ``--model`` names; :class:`UsageError` where it names nothing, or nothing that can be called."""
    if options.model is None:
        raise UsageError(
            f"{options.source}: holds weights but no architecture; name it with --model pkg.mod:factory"
            " (a function or class that returns the torch module)"
        )
    return import_callable("--model", options.model)


def in_fp32(module: torch.nn.Module) -> torch.nn.Module:
    """``module``, its parameters brought to fp32, in place, where any is of another floating precision."""
    import torch

    others = (torch.float16, torch.bfloat16, torch.float64)
    return module.float() if any(parameter.dtype in others for parameter in module.parameters()) else module


def fit(module: torch.nn.Module, tensors: Mapping[str, Array], *, kept: Container[str] = ()) -> None:
    """Copy ``tensors`` into ``module``, in its own dtypes; those ``kept`` may be missing.

    Raises :class:`SourceError` naming the first five tensors that are missing, unexpected or of another shape.
    """
    state = module.state_dict()
    renamed = _without_prefix(tensors, state)
    problems = list(mismatches(renamed, state, kept))
    if problems:
        raise SourceError(mismatch_message("the checkpoint does not fit the model", problems))
    with quiet():
        module.load_state_dict({name: to_torch(renamed[name]) for name in state if name in renamed}, strict=False)


def _without_prefix(tensors: Mapping[str, Array], state: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """``tensors`` without what wrappers put before their names, however many stood around each other."""
    for prefix in _PREFIXES:
        if not tensors or any(name.startswith(prefix) for name in state):
            continue
        if all(name.startswith(prefix) for name in tensors):
            return _without_prefix({name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, state)
    return dict(tensors)


def mismatches(
    tensors: Mapping[str, Array], state: Mapping[str, torch.Tensor], kept: Container[str] = ()
) -> Iterator[str]:
    """What of ``state`` is missing in ``tensors`` or of another shape there, and what is there and not in ``state``;
    those ``kept`` may be missing."""
    # Tied weights are saved once by some writers: a name whose memory another present name fills is not missing.
    filled = {_place(state[name]) for name in tensors if name in state}
    for name, parameter in state.items():
        shape = list(parameter.shape)
        if name not in tensors:
            if name not in kept and (_place(parameter) not in filled or parameter.numel() == 0):
                yield f"missing: {name} {shape}"
        elif list(tensors[name].shape) != shape:
            yield f"shape: {name} is {list(tensors[name].shape)} in the checkpoint, {shape} in the model"
    for name in tensors:
        if name not in state:
            yield f"unexpected: {name} {list(tensors[name].shape)}"


def _place(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where the memory of ``tensor`` begins, were it on the meta device, where all of it begins at 0."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def mismatch_message(what: str, problems: Sequence[str]) -> str:
    """``what``, then the first five of ``problems``, one a line, and how many more there are."""
    more = f"\n  and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    return f"{what}:" + "".join(f"\n  {problem}" for problem in problems[:_NAMED]) + more


def to_torch(array: Array) -> torch.Tensor:
    """A tensor over the memory of ``array``."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
