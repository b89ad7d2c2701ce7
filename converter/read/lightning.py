"""Reads a Lightning checkpoint as a source.

``--model`` builds a module from the file's hyper-parameters, and the file's weights fill it.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.messages.wording import brief, first_few
from converter.options import Options
from converter.read import bareweights
from converter.read.detect import Kind
from converter.read.sources import Advance, precision_notes
from converter.read.statedict import fit, mismatches
from converter.source import Array, Checkpoint, Source, digest_files

if TYPE_CHECKING:
    import torch

_VERSION, _WEIGHTS = "pytorch-lightning_version", "state_dict"
_HYPER_PARAMETERS = ("hparams", "module_arguments", "hyper_parameters")  # the last one, since Lightning 0.8, wins
_OF_LIGHTNINGS_CLI = ("_instantiator", "_class_path")  # not arguments: they tell LightningCLI how to build the class
# Keys of averaged weights: of Lightning's StochasticWeightAveraging, and of users' own callbacks.
_AVERAGED = ("ema_state_dict", "ema_state", "ema_weights", "ema", "model_ema", "average_model_state")

Contents = Mapping[Any, Any]  # of a checkpoint
_COMPILED = "_orig_mod."  # torch.compile's prefix for the names of what it wraps, at any position
_AVERAGED_PREFIX = re.compile(r"(^|[._])(ema|swa|avg|averaged?|shadow)([._]|$)", re.IGNORECASE)


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """Return the checkpoint as a source; a torch file that only mentions Lightning is read like any torch file."""
    from converter.read import statedict, torch_file

    path = options.source
    loaded = torch_file.load(path, Kind.LIGHTNING, trust_code=options.trust_code)
    if not is_lightning(loaded):
        if options.weights is not None:
            raise UsageError(f"--weights: is for Lightning checkpoints, and {path} is not one")
        return bareweights.read(options, Kind.TORCH_ZIP, advance)
    chosen, prefix, notes = choose(loaded, options.weights)
    tensors = torch_file.arrays(path, Kind.LIGHTNING, chosen, trust_code=options.trust_code)
    if not tensors:
        raise SourceError(f"{path}: is a Lightning checkpoint whose state_dict holds no tensors")
    precisions = precision_notes(options, tensors)
    arguments, argument_notes = factory_arguments(statedict.factory_of(options), options.model_args, loaded)
    module = statedict.build(replace(options, model_args=arguments))
    prefix_notes = fit_behind_prefix(module, tensors, prefix)
    checkpoint = Checkpoint("lightning", digest_files([path], advance), tensors)
    notes = [training(loaded, tensors), *notes, *argument_notes, *prefix_notes, *precisions]
    return bareweights.in_module(options, checkpoint, module, notes)


def is_lightning(loaded: object) -> TypeGuard[Contents]:
    """Whether what was ``loaded`` from a torch file is a Lightning checkpoint."""
    return isinstance(loaded, Mapping) and _VERSION in loaded and isinstance(loaded.get(_WEIGHTS), Mapping)


def choose(loaded: Contents, wanted: str | None) -> tuple[Contents, str | None, list[str]]:
    """Return the weights that ``--weights`` asks for, the prefix left to choose, and a note if the file holds others.

    ``ema`` means averaged weights, completed with trained tensors that are not averaged (usually buffers), and
    ``model`` the trained ones. Without it, they are those that Lightning would load.
    """
    state, current = loaded[_WEIGHTS], loaded.get("current_model_state")
    if _holds_tensors(current):  # Lightning's WeightAveraging stores the average as the state_dict
        if wanted == "model":
            return current, wanted, []
        note = "these are the averaged weights, because the file's state_dict holds those; --weights model takes the"
        return state, None if wanted == "ema" else wanted, [] if wanted else [f"{note} weights of the last step"]
    key, average = next(_averages(loaded), ("", {}))
    if not key or wanted not in (None, "ema"):
        return state, wanted, []
    if wanted is None:
        return state, None, [f"the file also holds averaged weights under {key!r}; --weights ema takes them"]
    if not average.keys() & state.keys():
        average = {str(name).removeprefix("module."): tensor for name, tensor in average.items()}
    if not average.keys() & state.keys():  # other names: fitting them to the model finds their prefix, or fails
        return average, None, []
    missing = sorted(map(str, state.keys() - average.keys()))
    note = f"not averaged, so taken from the state_dict: {first_few(missing)}"
    return {**state, **average}, None, [note] if missing else []


def _averages(loaded: Contents) -> Iterator[tuple[str, Contents]]:
    """Yield averaged weights with the key that holds them, of the file or of one of its callbacks."""
    callbacks = loaded.get("callbacks")
    holders = {f"callbacks.{brief(name).partition('{')[0]}.": held for name, held in (callbacks or {}).items()}
    for where, holder in {"": loaded, **holders}.items():
        for key in _AVERAGED:
            if isinstance(holder, Mapping) and _holds_tensors(holder.get(key)):
                yield f"{where}{key}", holder[key]


def _holds_tensors(value: object) -> TypeGuard[Contents]:
    import torch

    return isinstance(value, Mapping) and any(isinstance(tensor, torch.Tensor) for tensor in value.values())


def factory_arguments(
    factory: Callable[..., Any], explicit: Mapping[str, Any], loaded: Contents
) -> tuple[dict[str, Any], list[str]]:
    """Return keyword arguments for ``factory``, and notes on which came from the file and which were left out.

    ``explicit`` overrides the file's hyper-parameters. As in Lightning's ``load_from_checkpoint``, these are passed as
    one mapping if the factory has a parameter of the name that the file states; otherwise, those that it accepts.
    """
    stored = [loaded[key] for key in _HYPER_PARAMETERS if isinstance(loaded.get(key), Mapping)]
    found = {name: value for each in stored for name, value in each.items() if isinstance(name, str)}
    found = {name: value for name, value in found.items() if name not in _OF_LIGHTNINGS_CLI}
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a factory written in C may have no signature: it gets only explicit arguments
        return dict(explicit), []
    accepted = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if found and loaded.get("hparams_name") in accepted:
        found = {loaded["hparams_name"]: found}
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    used = {n: value for n, value in found.items() if n not in explicit and (any_name or n in accepted)}
    ignored = [n for n in found if n not in explicit and n not in used]
    notes = {
        "hyper-parameters of the file passed to --model": [
            f"{n}={brief(repr(value), 30)}" for n, value in used.items()
        ],
        "--model-args in place of the file's hyper-parameters": [n for n in found if n in explicit],
        "hyper-parameters of the file that --model does not take": ignored,
    }
    return used | dict(explicit), [f"{what}: {first_few(names, 8)}" for what, names in notes.items() if names]


def training(loaded: Contents, tensors: Mapping[str, Array]) -> str:
    """Return what the file says about its training: Lightning's version, the progress, and the precision."""
    progress = [
        f"{key.replace('_', ' ')} {loaded[key]}" for key in ("epoch", "global_step") if type(loaded.get(key)) is int
    ]
    summary = ", ".join([f"Lightning {brief(loaded[_VERSION])}", *progress])
    scalers = [
        key
        for key, value in loaded.items()
        if isinstance(value, Mapping) and {"scale", "growth_factor"} <= value.keys()
    ]
    floats = sorted({array.dtype.name for array in tensors.values()} & {"float16", "bfloat16", "float32", "float64"})
    short = " and ".join(name.replace("bfloat", "bf").replace("float", "fp") for name in floats)
    meaning = {
        "bf16": "weights in bf16, as bf16-true trains them: rounding them loses nothing",
        "fp16": "weights in fp16, as 16-true trains them",
        "fp32": "weights in fp32 and no gradient scaler: trained in 32-true or bf16-mixed, the file does not say which",
    }.get(short, f"weights in {short}")
    if scalers:
        meaning = (
            f"trained in 16-mixed, its gradients scaled ({brief(scalers[0])} keeps the scaler); weights in {short}"
        )
    return f"{summary}: {meaning}"


def fit_behind_prefix(module: torch.nn.Module, tensors: Mapping[str, Array], weights: str | None = None) -> list[str]:
    """Copy the ``tensors`` with one prefix that fill ``module``, by its names, into it; return notes on the choice.

    ``weights`` chooses between several prefixes: ``ema`` one that names an average, ``model`` another one, any other
    value is the prefix itself. Without it, trained weights are preferred to averaged ones.

    Raises :class:`UsageError` when the user must choose or chose an unknown prefix, and :class:`SourceError` when
    nothing fits, naming what is missing or has another shape.
    """
    state = module.state_dict()
    if not any(_COMPILED in name for name in state):
        tensors = {name.replace(_COMPILED, ""): tensor for name, tensor in tensors.items()}
    found: Counter[str] = Counter()  # by prefix, how many of the model's names it precedes
    for name in tensors:
        parts = name.split(".")
        for start in range(len(parts)):
            found[name.removesuffix(".".join(parts[start:]))] += ".".join(parts[start:]) in state
    ranked = sorted((p for p in found if found[p]), key=lambda prefix: (-found[prefix], len(prefix), prefix)) or [""]
    fitting = [prefix for prefix in ranked if not any(mismatches(_behind(prefix, tensors), state))]
    prefix = _choose(fitting, ranked, weights)
    fit(module, _behind(prefix, tensors))
    others = [other for other in fitting if other != prefix]
    unused = [name for name in tensors if not name.startswith((prefix, *filter(None, others)))]
    notes = [f"the model's weights are those whose names begin with {prefix!r}"] if prefix else []
    if others:
        shown = first_few([*map(repr, others)])
        notes.append(f"the checkpoint also has weights of this model under {shown}; --weights PREFIX takes those")
    if unused:
        notes.append(f"tensors that the model does not use, stored only for restore: {first_few(unused)}")
    return notes


def _behind(prefix: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _choose(fitting: list[str], ranked: list[str], weights: str | None) -> str:
    if weights not in (None, "ema", "model"):
        prefix = f"{weights}.".replace("..", ".")
        if prefix in ranked:
            return prefix
        shown = first_few([*map(repr, ranked)])
        raise UsageError(f"--weights {weights}: no tensor of the model has the prefix {prefix!r}; found: {shown}")
    averaged = [prefix for prefix in fitting if _AVERAGED_PREFIX.search(prefix)]
    if weights == "ema" and fitting and not averaged:
        raise UsageError("--weights ema: the checkpoint holds no averaged weights of this model; leave it out")
    trained = [prefix for prefix in fitting if prefix not in averaged]
    candidates = averaged if weights == "ema" else trained or averaged
    if len(candidates) > 1 and "" not in candidates:
        raise UsageError(
            f"the checkpoint has weights of this model under several prefixes, {first_few([*map(repr, candidates)])};"
            f" choose one, such as --weights {candidates[0]}"
        )
    return "" if "" in candidates else (candidates or ranked)[0]
