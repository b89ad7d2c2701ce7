"""Reads a Lightning checkpoint: weights, averaged weights, hyper-parameters, and how it was trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from bf16kit.messages.errors import SourceError
from bf16kit.messages.wording import first_few
from converter.read import torch_file
from converter.read.detect import Kind
from converter.source import Array

VERSION, WEIGHTS = "pytorch-lightning_version", "state_dict"
_HYPER_PARAMETERS = ("hparams", "module_arguments", "hyper_parameters")  # the last one, since Lightning 0.8, wins
_OF_LIGHTNINGS_CLI = ("_instantiator", "_class_path")  # not arguments: they tell LightningCLI how to build the class
# Keys of averaged weights: of Lightning's StochasticWeightAveraging, and of users' own callbacks.
_AVERAGED = ("ema_state_dict", "ema_state", "ema_weights", "ema", "model_ema", "average_model_state")


@dataclass(frozen=True, slots=True)
class LightningFile:
    """A Lightning checkpoint; ``weights`` are those of its ``state_dict``, which Lightning itself would load.

    ``trained`` are the weights as training left them and ``averaged`` a moving average of them (EMA, SWA); either is
    None if the file does not have it. ``argument`` is the parameter that received all hyper-parameters as one mapping.
    Without ``trust_code``, ``hyper_parameters`` hold only tensors, numbers, strings and containers of them.
    """

    path: Path
    version: str
    weights: Mapping[str, Array]
    trained: Mapping[str, Array] | None = None
    averaged: Mapping[str, Array] | None = None
    averaged_key: str = ""
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    argument: str = ""
    notes: tuple[str, ...] = ()

    def choose(self, weights: str | None) -> tuple[Mapping[str, Array], list[str]]:
        """Return the weights that ``--weights`` asks for, and a note if the file holds others.

        ``ema`` means the averaged weights, completed with trained tensors that are not averaged (usually buffers).
        ``model`` means the trained weights. Anything else is a prefix, looked up in the ``state_dict``.
        """
        if weights == "ema" and self.averaged is not None:
            return self._completed(self.averaged)
        if weights == "model" and self.trained is not None:
            return self.trained, []
        if weights is not None or self.averaged is None:
            return self.weights, []
        if self.averaged is self.weights:
            return self.weights, [
                "these are the averaged weights, because the file's state_dict holds those; --weights model takes"
                " the weights of the last step"
            ]
        return self.weights, [
            f"the file also holds averaged weights under {self.averaged_key!r}; --weights ema takes them"
        ]

    def _completed(self, averaged: Mapping[str, Array]) -> tuple[Mapping[str, Array], list[str]]:
        bare = {name.removeprefix("module."): array for name, array in averaged.items()}
        ours = averaged if averaged.keys() & self.weights.keys() else bare
        if not ours.keys() & self.weights.keys():  # other names: fitting them to the model will report this
            return averaged, []
        missing = {name: array for name, array in self.weights.items() if name not in ours}
        unknown = sorted(ours.keys() - self.weights.keys())
        if unknown:
            raise SourceError(
                f"{self.path}: its averaged weights have a tensor {unknown[0]!r}, which its state_dict lacks"
            )
        shown = first_few(sorted(missing))
        note = f"not averaged, so taken from the state_dict: {shown}" if missing else ""
        return {name: ours.get(name, array) for name, array in self.weights.items()}, [note] if note else []


def read_file(path: Path, *, trust_code: bool) -> LightningFile | None:
    """Read the checkpoint at ``path``; None for a torch file that only mentions Lightning.

    Raises :class:`SourceError` when it is damaged, when its pickle needs more than ``weights_only`` allows, or when it
    holds no weights.
    """
    loaded = torch_file.load(path, Kind.LIGHTNING, trust_code=trust_code)
    if not isinstance(loaded, Mapping) or VERSION not in loaded or not isinstance(loaded.get(WEIGHTS), Mapping):
        return None
    weights = _tensors(path, loaded[WEIGHTS], trust_code)
    if not weights:
        raise SourceError(f"{path}: is a Lightning checkpoint whose state_dict holds no tensors")
    trained, averaged, key = _averages(path, loaded, weights, trust_code)
    hyper_parameters = _hyper_parameters(loaded)
    name = loaded.get("hparams_name")
    return LightningFile(
        path,
        _text(loaded[VERSION]),
        weights,
        trained,
        averaged,
        key,
        hyper_parameters,
        name if isinstance(name, str) and name.isidentifier() else "",
        tuple(_training(loaded, weights)),
    )


def _tensors(path: Path, state: Mapping[Any, Any], trust_code: bool) -> dict[str, Array]:
    return torch_file.arrays(path, Kind.LIGHTNING, state, trust_code=trust_code)


def _averages(
    path: Path, loaded: Mapping[Any, Any], weights: Mapping[str, Array], trust_code: bool
) -> tuple[Mapping[str, Array] | None, Mapping[str, Array] | None, str]:
    """Return the trained and the averaged weights, and the key of the latter."""
    current = loaded.get("current_model_state")
    if _holds_tensors(current):  # Lightning's WeightAveraging stores the average as the state_dict
        return _tensors(path, current, trust_code), weights, WEIGHTS
    for where, holder in _holders(loaded):
        for key in _AVERAGED:
            average = holder.get(key)
            if _holds_tensors(average):
                return weights, _tensors(path, average, trust_code), f"{where}{key}"
    return weights, None, ""


def _holders(loaded: Mapping[Any, Any]) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    yield "", loaded
    callbacks = loaded.get("callbacks")
    if isinstance(callbacks, Mapping):
        for name, state in callbacks.items():
            if isinstance(state, Mapping):
                yield f"callbacks.{_text(name).partition('{')[0]}.", state


def _holds_tensors(value: object) -> TypeGuard[Mapping[Any, Any]]:
    import torch

    return isinstance(value, Mapping) and any(isinstance(tensor, torch.Tensor) for tensor in value.values())


def _hyper_parameters(loaded: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in _HYPER_PARAMETERS:
        value = loaded.get(key)
        if isinstance(value, Mapping):
            found |= {name: one for name, one in value.items() if isinstance(name, str)}
    return {name: value for name, value in found.items() if name not in _OF_LIGHTNINGS_CLI}


def _training(loaded: Mapping[Any, Any], weights: Mapping[str, Array]) -> Iterator[str]:
    """Yield what the file says about its training: Lightning's version, the progress, and the precision."""
    named = (("epoch", "epoch"), ("global step", "global_step"))
    progress = [f"{label} {_text(loaded[key])}" for label, key in named if type(loaded.get(key)) is int]
    summary = ", ".join([f"Lightning {_text(loaded[VERSION])}", *progress])
    yield f"{summary}: {_precision(loaded, weights)}"


def _precision(loaded: Mapping[Any, Any], weights: Mapping[str, Array]) -> str:
    dtypes = {array.dtype.name for array in weights.values()} & {"float16", "bfloat16", "float32", "float64"}
    for key, value in loaded.items():
        if isinstance(value, Mapping) and "scale" in value and "growth_factor" in value:
            scale = value["scale"]
            amount = f", last at {scale:g}" if isinstance(scale, float) else ""
            scaler = f"{_text(key)} keeps the scaler{amount}"
            return f"trained in 16-mixed, its gradients scaled ({scaler}); weights in {_list(dtypes)}"
    if dtypes == {"bfloat16"}:
        return "weights in bf16, as bf16-true trains them: rounding them loses nothing"
    if dtypes == {"float16"}:
        return "weights in fp16, as 16-true trains them"
    if dtypes == {"float32"}:
        return "weights in fp32 and no gradient scaler: trained in 32-true or bf16-mixed (the file does not say which)"
    return f"weights in {_list(dtypes)}"


_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def _list(dtypes: set[str]) -> str:
    return " and ".join(sorted(_SHORT[name] for name in dtypes)) or "no floating-point type"


def _text(value: object) -> str:
    return str(value)[:80]
