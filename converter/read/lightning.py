"""Reads a Lightning checkpoint as a source.

``--model`` builds a module from the file's hyper-parameters, and the file's weights fill it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from bf16kit.messages.errors import SourceError
from bf16kit.messages.wording import brief, first_few
from converter.options import Options
from converter.read import bareweights, statedict, torch_file
from converter.read.detect import Kind
from converter.read.sources import Advance, precision_notes
from converter.source import Checkpoint, Source, digest_files

Contents = Mapping[Any, Any]  # of a checkpoint
_VERSION, _WEIGHTS = "pytorch-lightning_version", "state_dict"


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """Return the checkpoint as a source; a torch file that only mentions Lightning is read like any torch file."""
    path = options.source
    loaded = torch_file.load(path, Kind.LIGHTNING, trust_code=options.trust_code)
    if not is_lightning(loaded):
        return bareweights.read(options, Kind.TORCH_ZIP, advance)
    chosen, prefix, notes = choose(loaded, options.weights)
    tensors = torch_file.arrays(path, Kind.LIGHTNING, chosen, trust_code=options.trust_code)
    if not tensors:
        raise SourceError(f"{path}: is a Lightning checkpoint whose state_dict holds no tensors")
    arguments, argument_notes = factory_arguments(statedict.factory_of(options), options.model_args, loaded)
    module = statedict.build(options, arguments)
    notes += [*argument_notes, *statedict.fit(module, tensors, prefix), *precision_notes(options, tensors)]
    checkpoint = Checkpoint("lightning", digest_files([path], advance), tensors)
    return bareweights.in_module(options, checkpoint, module, notes)


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
    import torch

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
