"""Makes a bare state dict runnable: ``--model`` builds the architecture, and the weights are fitted into it by name."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bf16kit.messages.errors import SourceError, UsageError
from converter.options import Options
from converter.process.imports import import_callable
from converter.process.quiet import first_line, quiet
from converter.source import Array

if TYPE_CHECKING:
    import torch

# Prefixes that wrappers put before every name: DistributedDataParallel, Lightning modules by habit, torch.compile.
_PREFIXES = ("module.", "model.", "_orig_mod.")
_NAMED = 5


def build(options: Options) -> torch.nn.Module:
    """Return the module that ``--model pkg.mod:factory`` makes with ``--model-args``, in fp32.

    Its large tensors are in temporary files. UsageError if the factory fails or returns something else.
    """
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


def factory_of(options: Options) -> Callable[..., Any]:
    """Return the callable that ``--model`` names; :class:`UsageError` if it is missing or cannot be called."""
    if options.model is None:
        raise UsageError(
            f"{options.source}: holds weights but no architecture; name it with --model pkg.mod:factory"
            " (a function or class that returns the torch module)"
        )
    return import_callable("--model", options.model)


def in_fp32(module: torch.nn.Module) -> torch.nn.Module:
    """Convert the parameters of ``module`` to fp32, in place, if any has another floating precision; return it."""
    import torch

    others = (torch.float16, torch.bfloat16, torch.float64)
    return module.float() if any(parameter.dtype in others for parameter in module.parameters()) else module


def fit(module: torch.nn.Module, tensors: Mapping[str, Array], *, kept: Container[str] = ()) -> None:
    """Copy ``tensors`` into ``module``, in the module's dtypes; those in ``kept`` may be missing.

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
    """Return ``tensors`` without wrappers' prefixes, even nested ones."""
    for prefix in _PREFIXES:
        if not tensors or any(name.startswith(prefix) for name in state):
            continue
        if all(name.startswith(prefix) for name in tensors):
            return _without_prefix({name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, state)
    return dict(tensors)


def mismatches(
    tensors: Mapping[str, Array], state: Mapping[str, torch.Tensor], kept: Container[str] = ()
) -> Iterator[str]:
    """Yield what of ``state`` is missing or has another shape in ``tensors``, and what is only in ``tensors``.

    Names in ``kept`` may be missing.
    """
    # Some writers save tied weights once: a name is not missing if another present name fills its memory.
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
    """Return where the memory of ``tensor`` begins; works on the meta device, too, where every address is 0."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def mismatch_message(what: str, problems: Sequence[str]) -> str:
    """Return ``what``, then the first five of ``problems``, one per line, and how many more there are."""
    more = f"\n  and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    return f"{what}:" + "".join(f"\n  {problem}" for problem in problems[:_NAMED]) + more


def to_torch(array: Array) -> torch.Tensor:
    """Return a tensor over the memory of ``array``."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
