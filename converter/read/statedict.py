"""Makes a bare state dict runnable: ``--model`` builds the architecture, and the weights are fitted into it by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch

from bf16kit.converter.options import Options, import_callable
from bf16kit.converter.process.quiet import first_line, quiet
from bf16kit.converter.read.sources import mismatch_message, no_architecture
from bf16kit.converter.source import Array
from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.messages.wording import first_few

_COMPILED = "_orig_mod."  # torch.compile's prefix for the names of what it wraps, at any position


def build(options: Options, arguments: Mapping[str, Any] | None = None) -> torch.nn.Module:
    """Return the module that ``--model pkg.mod:factory`` makes, in fp32, with ``arguments`` or ``--model-args``.

    Its large tensors are in temporary files. UsageError if the factory fails or returns something else.
    """
    from bf16kit.converter.process.tensorfiles import TensorFiles

    factory, files = factory_of(options), TensorFiles(options.target.path.parent)
    try:
        with quiet(), files:
            module = factory(**(options.model_args if arguments is None else arguments))
    except Exception as error:  # the user's code may raise anything
        raise UsageError(f"--model {options.model}: the factory failed: {first_line(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"--model {options.model}: returned {type(module).__name__}, expected a torch.nn.Module")
    with files:
        return in_fp32(module)


def factory_of(options: Options) -> Callable[..., Any]:
    """Return the callable that ``--model`` names; :class:`UsageError` if it is missing or cannot be called."""
    if options.model is None:
        raise no_architecture(options.source)
    return import_callable("--model", options.model)


def in_fp32(module: torch.nn.Module) -> torch.nn.Module:
    """Convert the parameters of ``module`` to fp32, in place, if any has another floating precision; return it."""
    others = (torch.float16, torch.bfloat16, torch.float64)
    return module.float() if any(parameter.dtype in others for parameter in module.parameters()) else module


def fit(module: torch.nn.Module, tensors: Mapping[str, Array], wanted: str | None = None) -> list[str]:
    """Copy those of ``tensors`` that fill ``module``, by its names behind one prefix, into it; return notes on that.

    Wrappers put prefixes before names (``module.``, ``model.``), and training scripts store other modules beside the
    model. ``wanted`` chooses between several prefixes.

    Raises :class:`UsageError` when the user must choose or chose an unknown prefix, and :class:`SourceError` when
    nothing fits, naming what is missing or has another shape.
    """
    state = module.state_dict()
    if not any(_COMPILED in name for name in state):
        tensors = {name.replace(_COMPILED, ""): tensor for name, tensor in tensors.items()}
    # How many of the model's names each prefix precedes.
    found = Counter(prefix for name in tensors for prefix in _prefixes(name) if name.removeprefix(prefix) in state)
    ranked = sorted(found, key=lambda prefix: (-found[prefix], len(prefix), prefix)) or [""]
    fitting = [prefix for prefix in ranked if not any(mismatches(_behind(prefix, tensors), state))]
    prefix = _choose(fitting, ranked, wanted)
    fill(module, _behind(prefix, tensors))
    others = [other for other in fitting if other != prefix]
    unused = [name for name in tensors if not name.startswith((prefix, *filter(None, others)))]
    notes = [f"the model's weights are those whose names begin with {prefix!r}"] if prefix else []
    if others:
        shown = first_few([*map(repr, others)])
        notes.append(f"the checkpoint also has weights of this model under {shown}; --weights PREFIX takes those")
    if unused:
        notes.append(f"tensors that the model does not use, stored only for restore: {first_few(unused)}")
    return notes


def _prefixes(name: str) -> Iterator[str]:
    """Yield the beginnings of ``name`` before each of its parts: "", "model.", "model.up." for model.up.weight."""
    parts = name.split(".")
    return (".".join([*parts[:start], ""]) if start else "" for start in range(len(parts)))


def _behind(prefix: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _choose(fitting: list[str], ranked: list[str], wanted: str | None) -> str:
    if wanted is not None:
        prefix = f"{wanted}.".replace("..", ".")
        if prefix in ranked:
            return prefix
        shown = first_few([*map(repr, ranked)])
        raise UsageError(f"--weights {wanted}: no tensor of the model has the prefix {prefix!r}; found: {shown}")
    if len(fitting) > 1 and "" not in fitting:
        raise UsageError(
            f"the checkpoint has weights of this model under several prefixes, {first_few([*map(repr, fitting)])};"
            f" choose one, such as --weights {fitting[0]}"
        )
    return "" if "" in fitting else (fitting or ranked)[0]


def fill(module: torch.nn.Module, tensors: Mapping[str, Array], *, kept: Container[str] = ()) -> None:
    """Copy ``tensors`` into ``module``, in the module's dtypes; those in ``kept`` may be missing.

    Raises :class:`SourceError` naming the first five tensors that are missing, unexpected or of another shape.
    """
    state = module.state_dict()
    problems = list(mismatches(tensors, state, kept))
    if problems:
        raise SourceError(mismatch_message("the checkpoint does not fit the model", problems))
    with quiet():
        module.load_state_dict({name: to_torch(tensors[name]) for name in state if name in tensors}, strict=False)


def mismatches(
    tensors: Mapping[str, Array], state: Mapping[str, torch.Tensor], kept: Container[str] = ()
) -> Iterator[str]:
    """Yield what of ``state`` is missing or has another shape in ``tensors``, and what is only in ``tensors``.

    Names in ``kept`` may be missing.
    """
    # Some writers save tied weights once: a name is not missing if another present name fills its memory.
    filled = {place(state[name]) for name in tensors if name in state}
    for name, parameter in state.items():
        shape = list(parameter.shape)
        if name not in tensors:
            if name not in kept and (place(parameter) not in filled or parameter.numel() == 0):
                yield f"missing: {name} {shape}"
        elif list(tensors[name].shape) != shape:
            yield f"shape: {name} is {list(tensors[name].shape)} in the checkpoint, {shape} in the model"
    for name in tensors:
        if name not in state:
            yield f"unexpected: {name} {list(tensors[name].shape)}"


def place(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return where the memory of ``tensor`` begins; works on the meta device, too, where every address is 0."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def to_torch(array: Array) -> torch.Tensor:
    """Return a tensor over the memory of ``array``."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
